"""Themes of fitting: complete fits, gradient steps, stacked nets, and the pass that finds the basis."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from typing import Any
from unittest import mock

import torch
from torch import nn

import offmap
from offmap.data import Rows
from offmap.likelihoods import Gaussian
from offmap.maxwent.objective import maxwent
from offmap.maxwent.train import adam, minimize
from offmap.model.select import stack_models
from offmap.posterior.construct import observe, scaling, svd
from offmap.posterior.protocol import Runtime
from offmap_bench.methods import anchored, negative_correlation
from offmap_bench.runner.base_models import models
from offmap_bench.speed import peers
from offmap_bench.speed.measure import GEMM, Claim, Measurement, Record, Timing, Work, compare, count_flops, measurements, race
from offmap_bench.speed.subjects import (
    BATCH,
    CONV1D,
    MLP,
    RESNET,
    TRANSFORMER,
    Subject,
    fit_guard,
    run_passes,
    table,
    trained_net,
)
from offmap_bench.tasks.catalog import task

# ------------------------------------------------------------------------------------------------------------ whole fits


def fitting(rounds: int = 7, peer_steps: int = 20_000) -> Record:
    """Ours against the gradient steps of the authors' package."""
    steps, theirs = peers.maxwent_steps(epochs=7)
    closed, paper = 'offmap, solver="closed-form"', 'offmap, solver="closed-form", score="paper"'
    refined = 'offmap, solver="refine", 500 steps (the default)'
    ours: dict[str, Work] = {closed: fit_guard, paper: lambda: fit_guard(score="paper"), refined: lambda: fit_guard("refine")}
    bounds = {f"{GEMM} as the closed form": ours[closed], f"{GEMM} as the default": ours[refined]}
    timings = race({**ours, "steps": theirs}, rounds=rounds, at_most={refined: 3}, gemm=bounds)
    spent = timings.pop("steps")
    extrapolated = spent.times(peer_steps / steps)
    measured = measurements(timings)
    measured[3:3] = [
        Measurement.of("maxwent, one gradient step", spent, "ms", per=steps),
        Measurement.of("maxwent, 20,000 steps (extrapolated)", extrapolated),
    ]
    claims = [
        ratio("times faster, closed form against 20,000 steps", extrapolated, timings[closed], "at least", 100.0),
        ratio("times faster, the same with the paper's score", extrapolated, timings[paper], "at least", 100.0),
    ]
    values = {name: round(count_flops(ours[fit]) / 1e9, 1) for name, fit in (("closed", closed), ("refined", refined))}
    return Record("fitting", rounds, measured, claims, {"timed": steps, **values})


TASKS = ("uci/concrete/extrapolation", "uci/power/extrapolation", "uci/protein/extrapolation")
STEPS, FEW, MORE = 50_000, 100, 500
SOLVERS = {"closed form": 300.0, "closed form, paper's score": 300.0, "default": 50.0}


def paper_steps(rounds: int = 3) -> Record:
    """Fits of five nets on data of three sizes against the paper's settings, extrapolated from two short fits."""
    timings: dict[str, dict[str, Timing]] = {}
    measured: list[Measurement] = []
    for name in TASKS:
        data = task(name, 0)
        own = race(_paper_contestants(name), rounds=rounds, at_most=dict.fromkeys(("default", "few", "more"), 2))
        few, more = (
            own.pop("few"),
            own.pop("more"),
        )  # the best turns compared, and the worst: pairs of turns would favour slow ones
        turns = [
            [b - a for a, b in zip(sorted(f), sorted(m), strict=True)] for f, m in ((few.cpu, more.cpu), (few.wall, more.wall))
        ]
        label, timings[name] = name.split("/")[1], own | {"paper": Timing(*turns).times(STEPS / (MORE - FEW))}
        words = f"{label}, {len(data.train[1]):,} + {len(data.valid[1]):,} rows"
        names = {"default": "default solver", "paper": "paper's settings (extrapolated)"}
        measured += measurements({f"{words}: {names.get(n, n)}": timing for n, timing in timings[name].items()})
    claims: list[Claim] = []
    for solver in ("default", "closed form", "closed form, paper's score"):
        pairs = {name.split("/")[1]: (own["paper"].cpu[0], own[solver].best) for name, own in timings.items()}
        pairs["sum"] = sum(paper for paper, _ in pairs.values()), sum(ours for _, ours in pairs.values())
        what = f"times faster than the paper's settings, {solver}"
        claims += [Claim(f"{what}, {name}", paper / ours, "at least", SOLVERS[solver]) for name, (paper, ours) in pairs.items()]
    return Record("paper_steps", rounds, measured, claims)


def _paper_contestants(name: str) -> dict[str, Work]:
    """Complete fits, and two parts of the paper's; models are those of the benchmark, trained if they are missing."""
    data, nets = task(name, 0), models(task(name, 0))

    def fit(**settings: Any) -> Work:
        return lambda: offmap.fit(nets, data.train, data.valid, progress=False, **settings)

    paper = {key: fit(config="paper", steps=steps) for key, steps in (("few", FEW), ("more", MORE))}
    closed = {"closed form": fit(solver="closed-form"), "closed form, paper's score": fit(solver="closed-form", score="paper")}
    return {**closed, "default": fit(), **paper}


# ------------------------------------------------------------------------------------------------------------------ steps


def descent(members: int, basis: str = "svd", steps: int = 100) -> Callable[[], str]:
    """A hundred steps of the MaxWEnt objective for so many nets."""
    nets = [trained_net(seed) for seed in range(members)]
    rows = Rows(*table()["train"], BATCH, "train")
    at = stack_models(nets)
    model = Runtime().model(at.net, at.mean | at.fixed, rows.inputs)
    q = svd(nets, (x for x, _ in rows)) if basis == "svd" else scaling(nets)
    objective = maxwent(q, model, Gaussian(), entropy_weight=30.0)
    optimizer = adam(q.raw_scale.parameters(), lr=1e-4)
    return lambda: minimize(objective, optimizer, rows, steps=steps)


def steps(rounds: int = 15) -> Record:
    """SVD and scaling, for one net and for five."""
    words = {1: "one net", 5: "five nets, stacked"}
    labels = {f"{name}, {words[n]}": descent(n, basis) for n in words for basis, name in (("scaling", "scaling"), ("svd", "SVD"))}
    timings = race(labels, rounds=rounds)
    claims = [
        ratio(f"times the scaling step, {w}", timings[f"SVD, {w}"], timings[f"scaling, {w}"], "at most", 2.0)
        for w in words.values()
    ]
    return Record("steps", rounds, measurements(timings, "ms", per=100), claims)


def stacking(rounds: int = 15) -> Record:
    """One net, five stacked nets, and five of the authors' package in turn."""
    taken, theirs = peers.maxwent_steps(epochs=4)
    one, five, peer, bound = "one net", "five nets, stacked", "maxwent, five nets in turn", f"{GEMM}, five nets"
    works: dict[str, Work] = {one: descent(1), five: descent(5), peer: theirs}
    timings = race(works, rounds=rounds, gemm={bound: works[five]})
    timings[peer] = timings[peer].times(5 * 100 / taken)
    claim = ratio("times the step of one", timings[five], timings[one], "at most", 3.0)
    return Record("stacking", rounds, measurements(timings, "ms", per=100), [claim])


ANCHORED = [anchored.Config(steps=50, tradeoff=t, anchor_scale=s) for t, s in product((0.1, 1.0, 10.0), (0.1, 1.0))]
CORRELATED = [negative_correlation.Config(steps=50, tradeoff=10.0**-k) for k in range(6)]


def grids(rounds: int = 3) -> Record:
    """Five members and a grid of six settings, stacked and in turn."""
    nets = [trained_net(seed) for seed in range(5)]

    def fit(method: Any, nets: Sequence[nn.Module], configs: Sequence[Any]) -> object:
        train, valid = (Rows(*table()[part], BATCH, part) for part in ("train", "valid"))
        return method.fit_grid(nets, train, valid, likelihood=Gaussian(), configs=configs, runtime=Runtime(progress=False))

    anchor, correlated, turn = "anchored networks", "negative correlation", "six ensembles of five, one after another"
    thirty, stacked = f"{anchor}: thirty nets, one after another", f"{anchor}: all stacked"
    works: dict[str, Work] = {
        thirty: lambda: [fit(anchored, [net], [config]) for config in ANCHORED for net in nets],
        f"{anchor}: {turn}": lambda: [fit(anchored, nets, [config]) for config in ANCHORED],
        stacked: lambda: fit(anchored, nets, ANCHORED),
        f"{correlated}: {turn}": lambda: [fit(negative_correlation, nets, [config]) for config in CORRELATED],
        f"{correlated}: all stacked": lambda: fit(negative_correlation, nets, CORRELATED),
    }
    timings = race(works, rounds=rounds, gemm={f"{stacked}, {GEMM}": works[stacked]})
    claim = ratio("stacked, times thirty nets one after another", timings[stacked], timings[thirty], "at most", 0.5)
    return Record("grids", rounds, measurements(timings, "ms", per=50), [claim])


# ------------------------------------------------------------------------------------------------------------------ basis

SUBJECTS = [replace(s, rows=rows) for s, rows in ((MLP, 102_400), (CONV1D, 20_480), (RESNET, 4_096), (TRANSFORMER, 8_192))]
"""As many rows as data sets have: the first few thousand cost more, as all of their inputs are counted."""


def basis(rounds: int = 3) -> Record:
    """The basis pass against a forward pass, model by model."""
    measured: list[Measurement] = []
    claims: list[Claim] = []
    for subject in SUBJECTS:
        timings = _basis_passes(subject, rounds)
        measured += measurements({f"{subject.name}, {subject.rows:,} rows: {name}": t for name, t in timings.items()}, "ms")
        what = f"{subject.name}: basis pass, times a plain pass"
        claims.append(ratio(what, timings["basis pass"], timings["plain pass"], "at most", 1.5))
        print(what, claims[-1].value, flush=True)
    return Record("basis", rounds, measured, claims)


def _basis_passes(subject: Subject, rounds: int) -> dict[str, Timing]:
    """The forward pass, the basis pass without `eigh`, `eigh`, both, the bound, and the authors' package."""
    net, x = subject.net(), subject.inputs(subject.rows)
    at, eigh = stack_models(net), Timing()

    def find_basis() -> None:
        with _clock_eigh(eigh):
            observe(at, lambda rows: iter(x.split(max(BATCH, rows))), rotated=True)

    works: dict[str, Work] = {"plain": lambda: run_passes(net, x, BATCH), "basis": find_basis}
    if subject.name == MLP.name:
        works["peer"] = lambda: peers.maxwent(net).fit_svd(x.numpy(), batch_size=BATCH)
    timings = race(works, rounds=rounds, gemm={GEMM: find_basis})
    both, apart = timings["basis"], Timing(eigh.cpu[1 : rounds + 1], eigh.wall[1 : rounds + 1])  # the first turn was not measured
    rest = [[a - b for a, b in zip(*pair, strict=True)] for pair in ((both.cpu, apart.cpu), (both.wall, apart.wall))]
    return {
        "plain pass": timings["plain"], "basis pass": Timing(*rest), "`eigh`": apart, "basis pass and `eigh`": both,
        GEMM: timings[GEMM], **({"maxwent, `fit_svd`": timings["peer"]} if "peer" in timings else {}),
    }  # fmt: skip


@contextmanager
def _clock_eigh(timing: Timing) -> Generator[None]:
    """Add the time that `torch.linalg.eigh` takes within the block as one more turn."""
    function = torch.linalg.eigh
    timing.cpu.append(0.0)
    timing.wall.append(0.0)

    def timed(*args: Any, **options: Any) -> Any:
        cpu, wall = time.process_time(), time.perf_counter()
        try:
            return function(*args, **options)
        finally:
            timing.cpu[-1] += time.process_time() - cpu
            timing.wall[-1] += time.perf_counter() - wall

    with mock.patch.object(torch.linalg, "eigh", timed):
        yield
