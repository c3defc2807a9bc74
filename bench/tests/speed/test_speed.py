"""The page of speed is that of its records, and every ratio on it has one."""

import math
import re
from dataclasses import replace
from importlib import import_module

import pytest
import torch
from torch import nn
from torch.func import functional_call, vmap

import offmap
from offmap.data import Rows
from offmap.export.module import guard_module
from offmap.integrations.nets import mlp
from offmap.likelihoods import Gaussian
from offmap.maxwent.config import Runtime
from offmap.model.params import stack_models
from offmap.posterior.basis import observe
from offmap_bench.methods import deep_ensemble
from offmap_bench.speed import measure, page, scoring
from offmap_bench.speed.measure import Claim, Measurement, Record, Timing, count_flops

RECORDS = {theme: record for theme in measure.THEMES if (record := measure.read(theme)) is not None}


def test_the_page_is_that_of_the_records():
    assert page.PAGE.read_text(encoding="utf-8") == page.text(list(RECORDS.values())), "run `python -m offmap_bench.speed table`"


def test_the_figure_shows_the_exponents_on_record():
    shown = re.findall(r">([a-z]+), ([0-9.]+)<", scoring.FIGURE.read_text(encoding="utf-8"))
    claims = RECORDS["exponents"].claims
    assert [name for name, _ in shown] == [claim.what.split(", ")[-1] for claim in claims]
    # records have four digits, the figure two: what lies between two numbers may be rounded to either
    assert [float(slope) for _, slope in shown] == pytest.approx([claim.value for claim in claims], abs=0.0051)


@pytest.mark.parametrize("source", [source for cells in page.RATIOS.values() for source in cells.values()], ids="-".join)
def test_a_ratio_is_that_of_a_record(source: list[str]):
    assert 0 < page.ratio(RECORDS, source) < math.inf


def test_a_ratio_is_a_claim_or_one_best_time_over_another():
    times = [Measurement("slow", "s", 6.0, 8.0), Measurement("quick", "s", 2.0, 9.0)]
    records = {"race": Record("race", 1, times, [Claim("times faster", 5.0, "at least", 1.0)], {}, {})}
    assert page.ratio(records, ["race", "times faster"]) == 5.0
    assert page.ratio(records, ["race", "slow", "quick"]) == 3.0


def test_what_was_not_measured_has_a_dash():
    header, _, *rows = (line.strip("| ").split(" | ") for line in page.ratio_table({}).splitlines())
    assert len(header) == len(page.PEERS) + len(page.LIMITS)
    assert {cell for row in rows for cell in row[1:]} == {"–"}
    assert {column for cells in page.RATIOS.values() for column in cells} <= {*page.PEERS, *page.LIMITS}


def test_exponents_are_the_slopes_of_what_was_measured():
    kept = RECORDS["exponents"]
    slopes = {f"exponent, {name}": scoring.slope(seconds) for name, seconds in scoring.series_of(kept).items()}
    assert slopes == pytest.approx({claim.what: claim.value for claim in kept.claims}, abs=1e-3)
    assert all(len(seconds) == 4 for seconds in scoring.series_of(kept).values())
    assert {name.partition(", ")[2] for name in scoring.series_of(kept)} == {"rows", "draws", "weights", "members"}


WIDTHS = (3, 5, 7, 2)
PRODUCTS = 3 * 5 + 5 * 7 + 7 * 2
"""Multiplications of one row by one net."""


def small(seed: int = 0) -> nn.Sequential:
    return mlp(WIDTHS[0], WIDTHS[-1], hidden=WIDTHS[1:-1], seed=seed)


def rows(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(count, WIDTHS[0], generator=torch.Generator().manual_seed(count))
    return x, x.sum(1)


def small_guard(score: str) -> offmap.Guard:
    guard = offmap.fit(small(), rows(60), rows(30), solver="closed-form", score=score, draws=4, progress=False)
    guard = replace(guard, clip=1.0)
    guard(rows(1)[0])  # from now on the draws are cached, and nothing is turned by a basis
    return guard


def test_flops_of_scores_are_those_of_all_draws_and_of_an_answer_those_of_two_passes():
    guard, x = small_guard("paper"), rows(11)[0]
    assert count_flops(lambda: guard.score(x)) == 2 * 4 * 11 * PRODUCTS
    assert count_flops(lambda: guard(x)) == 2 * 2 * 4 * 11 * PRODUCTS


def test_a_graph_has_the_flops_of_the_guard_that_it_came_from():
    guard, x = small_guard("default"), rows(11)[0]
    graph = guard_module(guard, x)
    traced, direct = count_flops(lambda: graph(x)), count_flops(lambda: guard(x))
    assert direct > 2 * 2 * 4 * 11 * PRODUCTS
    assert direct <= traced < 1.01 * direct  # a graph's pass of the base model goes on to its last layer


def test_flops_of_training_are_those_of_a_pass_forwards_and_of_two_backwards():
    train, valid = Rows(*rows(48), 16, "train"), Rows(*rows(30), 16, "valid")

    def fit(steps: int) -> object:
        config, members = deep_ensemble.Config(steps=steps, check_every=1_000), [small(seed) for seed in range(5)]
        return deep_ensemble.fit(members, train, valid, likelihood=Gaussian(), config=config, runtime=Runtime(progress=False))

    step = 2 * 16 * 5 * (3 * PRODUCTS - 3 * 5)  # nobody asks for the gradient of the inputs
    assert count_flops(lambda: fit(8)) - count_flops(lambda: fit(5)) == 3 * step


def test_flops_of_a_basis_pass_are_those_of_a_pass_and_of_the_moments():
    stacked = stack_models(small())
    short, long = (count_flops(lambda n=n: observe(stacked, lambda _: rows(n)[0].split(10), rotated=True)) for n in (40, 60))
    assert long - short == 2 * 20 * (PRODUCTS + 3 * 3 + 5 * 5 + 7 * 7)


def test_flops_are_seen_through_vmap():
    net, x = nn.Conv2d(3, 4, 3, padding=1), torch.zeros(2, 3, 8, 8)
    stack = {name: p.detach().expand(6, *p.shape) for name, p in net.named_parameters()}
    assert count_flops(lambda: vmap(lambda w: functional_call(net, w, x))(stack)) == 2 * 6 * 2 * 64 * 3 * 4 * 9


def test_flops_are_seen_in_attention():
    q, k = torch.zeros(2, 3, 5, 4), torch.zeros(2, 3, 7, 4)
    attention = nn.functional.scaled_dot_product_attention
    assert count_flops(lambda: attention(q, k, k)) == 2 * 2 * (2 * 3) * 5 * 7 * 4


def test_the_least_time_is_in_proportion_to_the_flops():
    turn = measure.PRODUCTS * 2 * measure.SIDE**3
    assert measure.least_time(Timing([1.0, 3.0], [2.0, 4.0]), turn / 2) == Timing([0.5, 1.5], [1.0, 2.0])


@pytest.mark.parametrize("name", measure.THEMES)
def test_a_theme_is_a_function_of_its_module(name: str):
    assert callable(getattr(import_module(f"offmap_bench.speed.{measure.THEMES[name]['module']}"), name))
