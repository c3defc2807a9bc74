"""Fits that are looked at: the same fit, step by step, and what was seen at each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import offmap
from offmap.errors import ConfigError
from offmap.likelihoods import Prediction
from offmap.maxwent import solve as maxwent
from offmap_bench.methods import deep_ensemble
from offmap_bench.runner.base_models import Recipe, models
from offmap_bench.runner.plan import Cell, cells, parse
from offmap_bench.runner.run import run
from offmap_bench.runner.store import read_records
from offmap_bench.runner.watch import course, detection_of, grid, trace, view_of, views
from offmap_bench.tasks.catalog import task

PLAN = """
name = "tiny"
seeds = [0]
tasks = ["regression"]
[defaults]
draws = 5
[defaults.deep_ensemble]
hidden = [10]
steps = 40
check_every = 20
[[method]]
name = "maxwent"
label = "wide"
config = {entropy_weight = 30, steps = 30, check_every = 10, risk_draws = 5, patience = 100, score = "paper"}
[[method]]
name = "mc_dropout"
label = "dropout"
config = {hidden = [10], steps = 20, check_every = 10}
grid = {dropout = [0.1, 0.4]}
[[method]]
name = "nearest"
"""


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFMAP_CACHE", str(tmp_path_factory.getbasetemp() / "models"))


def tiny(label: str) -> Cell:
    return next(cell for cell in cells(parse(PLAN, "tiny.toml")) if cell.label == label)


@pytest.mark.parametrize("solver", ["refine", "sgd"])
def test_a_watched_fit_is_the_fit_and_is_seen_at_every_check(solver: Any, tmp_path: Path) -> None:
    data = task("regression")
    recipe = Recipe(hidden=(10,), members=2, training=deep_ensemble.Config(steps=40, check_every=20))
    nets = models(data, recipe=recipe, folder=tmp_path)
    options: dict[str, Any] = {"solver": solver, "steps": 30, "check_every": 10, "risk_draws": 5, "patience": None, "lr": 0.05}
    fitted, observed = course(nets, data, maxwent.Config(**options), 3, lambda p: p.q.mean_log_square().tolist())
    plain = offmap.fit(nets, data.train, data.valid, seed=3, progress=False, chunk_size=1, **options).history
    history = fitted.history
    assert [step for step, _ in observed] == history.step == plain.step == [0, 10, 20, 30]
    np.testing.assert_allclose([seen for _, seen in observed], history.entropy, rtol=1e-6)
    np.testing.assert_allclose(history.entropy, plain.entropy, rtol=1e-3)
    np.testing.assert_allclose(history.max_risk, plain.max_risk, rtol=1e-3)


def test_a_trace_is_made_once_and_ends_as_the_fit_does(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cell = tiny("wide")
    made = trace(cell, tmp_path)
    assert made["step"].tolist() == [0, 10, 20, 30]
    assert made["kept"] in made["step"]
    assert all(0 <= value <= 1 for value in (*made["auroc"], *made["fpr95"]))
    (file,) = (tmp_path / "traces").iterdir()
    before = file.stat().st_mtime_ns
    again = trace(cell, tmp_path)
    assert file.stat().st_mtime_ns == before
    assert all(np.array_equal(again[name], values, equal_nan=True) for name, values in made.items())
    whole = file.read_bytes()
    for damaged in (whole[:50], whole[:100] + bytes([whole[100] ^ 1]) + whole[101:]):
        file.write_bytes(damaged)
        caplog.clear()
        assert trace(cell, tmp_path)["auroc"] == pytest.approx(made["auroc"], rel=1e-5)
        assert f"The cache at {file} cannot be read (" in caplog.text
        assert len(file.read_bytes()) == len(whole)


def test_detection_on_the_way_is_that_of_a_guard(tmp_path: Path) -> None:
    data = task("regression")
    recipe = Recipe(hidden=(10,), members=1, training=deep_ensemble.Config(steps=40, check_every=20))
    nets = models(data, recipe=recipe, folder=tmp_path)
    guard = offmap.fit(nets, data.train, data.valid, steps=10, risk_draws=5, score="paper", draws=20, progress=False)
    found = detection_of(guard.predictive, guard.likelihood, data, guard.seed, draws=20)  # type: ignore[arg-type]
    rows = {row["set"]: row for row in offmap.evaluate(guard, data.test, data.ood).rows}
    assert found == pytest.approx((rows["outside"]["auroc"], rows["outside"]["fpr95"]), abs=5e-3)


def test_a_view_is_what_the_chosen_fit_says_and_is_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cell = tiny("dropout")
    run([cell], tmp_path / "tiny.jsonl")
    record = read_records(tmp_path / "tiny.jsonl").records[cell.hash]
    assert record.chosen["dropout"] in (0.1, 0.4)
    (view,) = views(cell, record, tmp_path)
    mean, std = view["mean"], view["std"]
    assert mean.shape == std.shape == (300,)
    assert (std > 0).all()
    (file,) = (tmp_path / "views").iterdir()
    before = file.stat().st_mtime_ns
    np.testing.assert_array_equal(views(cell, record, tmp_path)[0]["std"], std)
    assert file.stat().st_mtime_ns == before
    file.write_bytes(file.read_bytes()[:-100])
    np.testing.assert_allclose(views(cell, record, tmp_path)[0]["std"], std, rtol=1e-6)
    assert f"The cache at {file} cannot be read (" in caplog.text


def test_class_probabilities_are_seen_as_entropy_on_the_square() -> None:
    ones = torch.tensor([1.0, 0.5, 0.5, 0.0])
    seen = view_of(Prediction(probs=torch.stack([ones, 1 - ones], 1), label=ones > 0.5))["entropy"]
    np.testing.assert_allclose(seen, [[0, 0.6931], [0.6931, 0]], atol=1e-4)


def test_a_clip_of_zero_shows_the_plain_net(tmp_path: Path) -> None:
    cell = tiny("wide")
    run([cell], tmp_path / "tiny.jsonl")
    wide, plain = views(cell, read_records(tmp_path / "tiny.jsonl").records[cell.hash], tmp_path, (None, 0.0))
    assert (wide["std"] > plain["std"]).mean() > 0.8  # how wide at one place, rounding of the trained nets decides
    data = task("regression")
    assert cell.source is not None
    recipe = Recipe(hidden=(10,), training=deep_ensemble.Config(steps=40, check_every=20))
    (net, *_) = models(data, recipe=recipe)
    x = grid(1, 300)
    assert x is not None
    with torch.no_grad():
        np.testing.assert_allclose(plain["mean"], net(x)[:, 0].numpy(), rtol=1e-4, atol=1e-5)


def test_what_only_scores_has_no_view(tmp_path: Path) -> None:
    cell = tiny("nearest")
    run([cell], tmp_path / "tiny.jsonl")
    with pytest.raises(ConfigError, match="Expected a method that predicts, but 'nearest' only scores"):
        views(cell, read_records(tmp_path / "tiny.jsonl").records[cell.hash], tmp_path)
