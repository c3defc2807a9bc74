"""Ensembles in a benchmark: a grid in one stack, nets that are cached, and MaxWEnt around them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from offmap.errors import ConfigError
from offmap_bench.methods import anchored
from offmap_bench.runner import base_models
from offmap_bench.runner import run as cells
from offmap_bench.runner.base_models import SILENT, Recipe, digest, init_nets, load_nets, prepare
from offmap_bench.runner.methods import FitContext, candidates, recipe
from offmap_bench.runner.plan import METHODS, Cell, parse
from offmap_bench.runner.plan import cells as plan_cells
from offmap_bench.runner.run import Bench, fit_cell
from offmap_bench.runner.store import settings_of
from offmap_bench.tasks.catalog import task
from offmap_bench.tasks.task import Task

QUICK: dict[str, Any] = {"hidden": [8], "steps": 40, "check_every": 20, "lr": 0.01}
DATA = task("regression")


@pytest.fixture(autouse=True)
def _cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OFFMAP_CACHE", str(tmp_path))


def cell(method: str, config: dict[str, Any] | None = None, **options: Any) -> Cell:
    return Cell("regression", method, method, QUICK if config is None else config, 0, **{"members": 5} | options)


GRIDS: dict[str, dict[str, list[float]]] = {
    "negative_correlation": {"tradeoff": [1.0, 1e-3]},
    "overall_diversity": {"tradeoff": [0.1, 1e-3]},
    "anchored": {"tradeoff": [0.1, 10.0], "anchor_scale": [0.1, 1.0]},
    "mc_dropout": {"dropout": [0.05, 0.5]},
}


@pytest.mark.parametrize("name", GRIDS)
def test_a_stacked_grid_chooses_as_fits_one_after_another_do(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = cell(name, grid=GRIDS[name])
    stacked = fit_cell(asked, DATA)
    fits: list[tuple[float, dict[str, Any]]] = []
    for candidate in candidates(asked.grid):
        alone = METHODS[name].fit(FitContext(DATA, 0, {}), {**QUICK, **candidate})
        fits.append((cells.validation_risk(alone, DATA, asked), candidate))
    risk, best = min(fits, key=lambda fit: fit[0])
    assert stacked.chosen == best
    assert cells.validation_risk(stacked, DATA, asked) == pytest.approx(risk, rel=1e-4)
    monkeypatch.setitem(METHODS, name, replace(METHODS[name], fit_grid=None))
    assert fit_cell(asked, DATA).chosen == best


def test_a_grid_that_no_stack_can_hold_is_fitted_one_after_another() -> None:
    asked = cell("negative_correlation", grid={"steps": [1, 40]})
    assert fit_cell(asked, DATA).chosen == {"steps": 40}


def test_the_chosen_nets_are_cached(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    candidates = [{"tradeoff": 1.0}, {"tradeoff": 1e-3}]
    how = recipe("negative_correlation", QUICK, candidates)
    first = load_nets(DATA, 0, how)
    monkeypatch.setattr(base_models, "train", pytest.fail)
    again = load_nets(DATA, 0, how)
    assert (again.chosen, again.seconds) == (first.chosen, first.seconds)
    for one, other in zip(first.nets, again.nets, strict=True):
        assert all(torch.equal(p, q) for p, q in zip(one.parameters(), other.parameters(), strict=True))
    assert len(list((tmp_path / "models").iterdir())) == 1


def test_the_lowest_validation_nll_is_chosen() -> None:
    """Among fits of which only one has learned anything."""
    candidates = [{"tradeoff": 0.0}, {"tradeoff": 1e6}, {"tradeoff": 1e7}]
    made = load_nets(DATA, 0, recipe("anchored", QUICK, candidates))
    assert made.chosen == {"tradeoff": 0.0}
    how = recipe("anchored", {**QUICK, "tradeoff": 0.0})
    nets = init_nets(DATA, 0, how)
    rows, valid, law = prepare(nets, DATA, how.batch_size)
    alone = anchored.fit(nets, rows, valid, likelihood=law, config=how.training, runtime=SILENT)
    outputs = torch.stack([net(valid.inputs).detach() for net in made.nets])
    torch.testing.assert_close(outputs, alone.outputs(valid.inputs, 1), rtol=1e-4, atol=1e-5)
    assert law.predictive_nll(outputs, valid.targets).isfinite().all()


@pytest.mark.parametrize(("name", "grid"), [("anchored", GRIDS["anchored"]), ("repulsive", {})])
def test_maxwent_starts_from_the_nets_that_were_chosen(name: str, grid: dict[str, Any]) -> None:
    source = {"method": name, "config": QUICK} | ({"grid": grid} if grid else {})
    asked = cell("maxwent", {"solver": "closed-form", "draws": 4, "risk_draws": 4}, source=source)
    made = fit_cell(asked, DATA)
    centres = fit_cell(cell(name, grid=grid), DATA)
    for member in range(5):
        ours, theirs = made.predictive.mean_weights(member), centres.predictive.mean_weights(member)
        assert all(torch.equal(ours[n], w) for n, w in theirs.items())
    record = Bench().run(asked)
    assert record.status == "ok", record.traceback
    assert record.settings["from"]["steps"] == 40


def test_every_ensemble_gives_a_record() -> None:
    for name in ("negative_correlation", "overall_diversity", "anchored", "repulsive"):
        record = Bench().run(cell(name))
        assert record.status == "ok", record.traceback
        assert record.steps == 40
        assert 0 <= record.metrics["test"]["ece"] <= 1
    record = Bench().run(cell("dare", {"steps": 20, "check_every": 10}, source={"method": "deep_ensemble", "config": QUICK}))
    assert record.status == "ok", record.traceback
    assert record.settings["config"]["tradeoff"] == 1.0


def test_a_plan_names_an_ensemble_and_its_grid() -> None:
    text = """
        name = "small"
        seeds = [0]
        tasks = ["regression"]
        [[method]]
        name = "negative_correlation"
        members = 5
        config = {hidden = [8], steps = 40, check_every = 20, lr = 0.01}
        grid = {tradeoff = [1, 0.001]}
    """
    (asked,) = plan_cells(parse(text, "small.toml"))
    expected = cell("negative_correlation", grid={"tradeoff": [1, 0.001]})
    assert asked == replace(expected, config={**expected.config, "score": "paper"})
    record = Bench().run(asked)
    assert record.chosen["tradeoff"] in (1, 0.001)
    with pytest.raises(ConfigError, match="small.toml: .*`config` of 'negative_correlation' to be .*did you mean 'tradeoff'"):
        parse(text.replace("steps = 40", "tradeof = 1"), "small.toml")


def test_a_plan_names_an_ensemble_to_start_from() -> None:
    text = """
        name = "small"
        seeds = [0]
        tasks = ["regression"]
        defaults = {hidden = [8], steps = 40, check_every = 20, lr = 0.01, maxwent = {solver = "closed-form", risk_draws = 4}}
        [[method]]
        name = "anchored"
        label = "Anchored"
        members = 5
        config = {score = "paper"}
        grid = {tradeoff = [0.1, 10], anchor_scale = [0.1]}
        [[method]]
        name = "maxwent"
        label = "around anchored"
        members = 5
        from = "Anchored"
        [[method]]
        name = "maxwent"
        label = "around repulsive"
        members = 5
        from = "repulsive"
    """
    plan = parse(text, "small.toml")
    assert plan.entries[1].source == {
        "method": "anchored",
        "config": QUICK,
        "grid": {"tradeoff": [0.1, 10], "anchor_scale": [0.1]},
    }
    assert plan.entries[2].source == {"method": "repulsive", "config": QUICK}  # no row of the plan: the defaults
    records = [Bench().run(asked) for asked in plan_cells(plan)]
    assert [record.status for record in records] == ["ok"] * 3
    with pytest.raises(ConfigError, match="`from` of 'around repulsive' to be .*did you mean 'repulsive'.*but got 'repulsion'"):
        parse(text.replace('from = "repulsive"', 'from = "repulsion"'), "small.toml")
    with pytest.raises(ConfigError, match="`from` of 'around anchored' to name nets without a `grid`, but 'Anchored' has one"):
        parse(text.replace("anchor_scale = [0.1]", "steps = [1, 2]"), "small.toml")


def test_settings_are_filled_in_and_impossible_ones_refused() -> None:
    settings = settings_of(cell("anchored", {"tradeoff": 10.0, "score": "paper"}))["config"]
    assert settings == {
        "hidden": [100, 100, 100], "batch_size": 128, "steps": 10000, "lr": 0.001, "adam_epsilon": 1e-7, "check_every": 100,
        "tradeoff": 10.0, "anchor_scale": 1.0, "score": "paper",
    }  # fmt: skip
    with pytest.raises(ConfigError, match="Expected `anchor_scale` to be a number ≥ 0, but got 'wide'."):
        METHODS["anchored"].settings({"anchor_scale": "wide"})


def test_the_digest_knows_the_method_and_its_candidates() -> None:
    x = torch.arange(12.0).view(6, 2)
    exact = Task("exact", (x, x[:, 0]), (x[:2], x[:2, 0]), (x, x[:, 0]), {"far": x}, likelihood="gaussian", outputs=2)
    recipes = [recipe(name, {}, [{"tradeoff": t}]) for name in ("anchored", "negative_correlation") for t in (1, 2)]
    assert len({digest(exact, 0, Recipe()), *(digest(exact, 0, how) for how in recipes)}) == 5
