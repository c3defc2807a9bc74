"""Runs: what a store lacks and nothing else, whatever fails and whenever it is stopped."""

from __future__ import annotations

import hashlib
import logging
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch

import offmap
from offmap.errors import ConfigError
from offmap.metrics import auroc
from offmap.posterior.predictive import Sampled
from offmap_bench.runner.base_models import as_predictive
from offmap_bench.runner.methods import SCORING, FitContext, without
from offmap_bench.runner.plan import METHODS, Cell, cells, narrow_plan, parse, read_plan
from offmap_bench.runner.run import Bench, Event, run
from offmap_bench.runner.store import Record, Records, code_digest, read_records, write_records
from offmap_bench.tasks.catalog import task

TEXT = """
name = "tiny"
seeds = [0]
tasks = ["regression"]

[defaults]
draws = 5
steps = 10
check_every = 5
risk_draws = 5

[defaults.deep_ensemble]
hidden = [10]
steps = 30
check_every = 10

[[method]]
name = "deep_ensemble"
label = "plain"
members = 1
config = {score = "paper"}

[[method]]
name = "deep_ensemble"
label = "ensemble"
members = 5
config = {score = "paper"}

[[method]]
name = "maxwent"
label = "wide, alone"
config = {score = "epistemic"}

[[method]]
name = "maxwent"
label = "wide"
members = 5

[[method]]
name = "bnn"
label = "posterior"
config = {setting = "nosvd_unfrozen_small"}
members = 5

[[method]]
name = "mc_dropout"
label = "dropout"
config = {hidden = [10], steps = 20, check_every = 10, score = "paper"}
members = 5

[[method]]
name = "nearest"

[[method]]
name = "mahalanobis"
"""


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFMAP_CACHE", str(tmp_path_factory.getbasetemp() / "models"))


def tiny(label: str | None = None, text: str = TEXT) -> list[Cell]:
    return cells(narrow_plan(parse(text, "tiny.toml"), label=label))


def of(found: Records, label: str) -> Any:
    (cell,) = (c for c in tiny() if c.label == label)
    return found.records[cell.hash]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The records of the whole tiny plan."""
    path = tmp_path_factory.mktemp("records") / "tiny.jsonl"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OFFMAP_CACHE", str(tmp_path_factory.getbasetemp() / "models"))
        assert run(tiny(), path).done == 8
    return path


def test_every_method_leaves_a_record_with_its_metrics(done: Path) -> None:
    found = read_records(done)
    assert {found.state(cell) for cell in tiny()} == {"ok"}
    for label in ("plain", "ensemble", "wide, alone", "wide", "posterior", "dropout"):
        record = of(found, label)
        assert {"nll", "rmse", "ece", "conformal_coverage", "conformal_width", "false_alarms"} <= record.metrics["test"].keys()
        assert {"auroc", "fpr95", "flagged"} <= record.metrics["gap"].keys()
        assert record.metrics["test"]["valid_rows"] == 20
        assert set(record.metrics["valid"]) == {"nll"}
        assert len(record.chosen["clip"]) == record.cell["members"] % 5 * 4 + 1  # of each net alone, or of all
        assert record.threads == 1
    for label in ("nearest", "mahalanobis"):
        assert set(of(found, label).metrics) == {"test", "outside", "gap"}
        assert set(of(found, label).metrics["test"]) == {"valid_rows"}


def test_what_a_fit_chose_is_kept(done: Path) -> None:
    record = of(read_records(done), "wide")
    assert record.chosen["entropy_weight"] == 30
    assert len(record.chosen["kept"]) == 5
    assert record.chosen["entropy"] < 0
    assert record.steps == 10
    assert record.versions == {"offmap": offmap.__version__, "torch": str(torch.__version__), "code": code_digest()}


def test_a_posterior_is_recorded_with_its_setting_filled_in(done: Path) -> None:
    record = of(read_records(done), "posterior")
    config = record.settings["config"]
    assert (config["mean"], config["prior_variance"], config["basis"], config["steps"]) == ("trained", 0.1, "identity", 10)
    assert (record.steps, len(record.chosen["kept"]), record.chosen["tradeoff"]) == (10, 5, 10)


def test_the_validation_nll_is_that_of_the_chosen_clip(done: Path) -> None:
    (cell,) = tiny("ensemble")
    data = task("regression")
    nets = METHODS["deep_ensemble"].fit(FitContext(data, 0, {}), without(cell.config, *SCORING)).predictive
    assert isinstance(nets, Sampled)
    made = offmap.guard(as_predictive(nets.nets(), data), data.valid, likelihood="gaussian")
    expected = offmap.evaluate(made, data.valid, data.ood).rows[0]["nll"]
    assert of(read_records(done), "ensemble").metrics["valid"]["nll"] == pytest.approx(expected, abs=1e-5)


def test_a_second_run_does_nothing(done: Path) -> None:
    before, events = done.read_bytes(), list[Event]()
    outcome = run(tiny(), done, report=events.append)
    assert (outcome.before, outcome.done, outcome.failed) == (8, 0, 0)
    assert done.read_bytes() == before
    assert events == [Event("before", cell) for cell in tiny()]


def test_the_same_cell_gives_the_same_metrics(done: Path, tmp_path: Path) -> None:
    run(tiny("wide*"), tmp_path / "again.jsonl")
    for cell in tiny("wide*"):
        again, record = (read_records(path).records[cell.hash] for path in (tmp_path / "again.jsonl", done))
        assert again.metrics.keys() == record.metrics.keys()
        for part, metrics in record.metrics.items():
            assert again.metrics[part] == pytest.approx(metrics, rel=1e-3, abs=1e-3)


def test_each_net_alone_is_the_mean_over_the_members(done: Path) -> None:
    (cell,) = tiny("plain")
    data = task("regression")
    nets = METHODS["deep_ensemble"].fit(FitContext(data, 0, {}), without(cell.config, *SCORING)).predictive
    assert isinstance(nets, Sampled)
    areas = []
    for net in nets.nets():
        alone = offmap.guard(as_predictive([net], data), data.valid, likelihood="gaussian", score="paper")
        rows = offmap.evaluate(alone, data.test, data.ood).rows
        areas.append(next(row["auroc"] for row in rows if row["set"] == "gap"))
    assert of(read_records(done), "plain").metrics["gap"]["auroc"] == pytest.approx(fmean(areas), abs=1e-5)


def test_cells_that_share_a_fit_fit_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fits: list[Any] = []
    method = METHODS["maxwent"]
    monkeypatch.setitem(METHODS, "maxwent", replace(method, fit=lambda g, s: fits.append(s) or method.fit(g, s)))
    run(tiny("wide*"), tmp_path / "tiny.jsonl")
    assert len(fits) == 1
    assert {record.seconds["fit"] for record in read_records(tmp_path / "tiny.jsonl").records.values()} == {
        next(iter(read_records(tmp_path / "tiny.jsonl").records.values())).seconds["fit"]
    }


def test_a_failed_cell_loses_no_other_and_is_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = [*tiny("nearest"), *tiny("mahalanobis")]
    with monkeypatch.context() as patch:
        patch.setitem(METHODS, "nearest", replace(METHODS["nearest"], fit=lambda g, s: 1 / 0))
        outcome = run(wanted, tmp_path / "tiny.jsonl")
    assert (outcome.done, outcome.failures) == (1, {"ZeroDivisionError: division by zero": 1})
    record = read_records(tmp_path / "tiny.jsonl").records[wanted[0].hash]
    assert record.status == "failed"
    assert record.metrics == {}
    assert "ZeroDivisionError: division by zero" in record.traceback
    outcome = run(wanted, tmp_path / "tiny.jsonl")
    assert (outcome.before, outcome.done, outcome.failed) == (1, 1, 0)
    assert read_records(tmp_path / "tiny.jsonl").records[wanted[0].hash].traceback is None


def test_a_fit_that_fails_is_not_tried_again_for_every_score(monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[Any] = []
    monkeypatch.setitem(METHODS, "maxwent", replace(METHODS["maxwent"], fit=lambda g, s: tries.append(s) or 1 / 0))
    bench = Bench()
    assert [bench.run(cell).status for cell in tiny("wide*")] == ["failed", "failed"]
    assert len(tries) == 1


def test_damaged_lines_are_set_aside_and_run_again(tmp_path: Path) -> None:
    path, wanted = tmp_path / "tiny.jsonl", [*tiny("nearest"), *tiny("mahalanobis")]
    run(wanted, path)
    good, damaged = path.read_bytes().splitlines()[0], path.read_bytes().splitlines()[1][:-9]
    path.write_bytes(b"{\n" + good + b"\n" + damaged)
    outcome = run(wanted, path)
    assert list(outcome.damaged) == ["line 1", wanted[1].hash]
    assert outcome.damaged["line 1"].endswith(" The line is now in tiny.jsonl.damaged.")
    assert (tmp_path / "tiny.jsonl.damaged").read_bytes() == b"{\n" + damaged + b"\n"
    assert (outcome.before, outcome.done) == (1, 1)
    assert path.read_bytes().splitlines()[0] == good
    with path.open("ab") as file:
        file.write(b"[\n")
    assert run(wanted, path).before == 2
    assert (tmp_path / "tiny.jsonl.damaged").read_bytes() == b"{\n" + damaged + b"\n[\n"


def test_stale_records_are_run_again(tmp_path: Path) -> None:
    (cell,), path = tiny("nearest"), tmp_path / "tiny.jsonl"
    run([cell], path)
    write_records(path, replace(read_records(path).records[cell.hash], settings={"config": {"k": 5}}))
    assert run([cell], path).done == 1
    assert run([cell], path).before == 1


def test_records_of_other_code_are_run_again_when_asked(tmp_path: Path) -> None:
    path, (first,), (second,) = tmp_path / "tiny.jsonl", tiny("nearest"), tiny("mahalanobis")
    run([first, second], path)
    records = read_records(path).records
    assert all(len(record.versions["code"]) == 16 for record in records.values())
    other = records[first.hash]
    write_records(path, replace(other, versions={k: v for k, v in other.versions.items() if k != "code"}, chosen={"old": True}))
    assert run([first, second], path).done == 0
    assert run([first, second], path, again=True).done == 1
    renewed = read_records(path).records
    assert renewed[first.hash].metrics == other.metrics
    assert not renewed[first.hash].chosen
    assert run([first, second], path, again=True).done == 0


def test_a_grid_is_decided_by_the_validation_risk(tmp_path: Path) -> None:
    text = TEXT.replace('label = "ensemble"', 'label = "ensemble"\ngrid = {steps = [1, 200, 2]}')
    (cell,) = tiny("ensemble", text)
    run([cell], tmp_path / "tiny.jsonl")
    record = read_records(tmp_path / "tiny.jsonl").records[cell.hash]
    assert record.chosen["steps"] == 200
    assert record.steps == 200


def test_warnings_go_into_the_record(tmp_path: Path) -> None:
    (cell,) = tiny("ensemble")
    data = task("regression")
    few = replace(data, valid=(data.valid[0][:10], data.valid[1][:10]))
    bench = Bench(_task=((cell.task, cell.seed), few))
    record = bench.run(cell)
    assert record.warnings == [
        "The threshold is infinite, so nothing will be flagged: 10 calibration rows are too few for a false alarm rate of 0.05. "
        "Pass at least 19."
    ]
    assert record.metrics["test"]["conformal_width"] is None
    assert record.metrics["test"]["conformal_coverage"] is None
    assert record.metrics["test"]["false_alarms"] is None
    lost = ("conformal_coverage", "conformal_width", "wide_conformal_coverage", "wide_conformal_width", "false_alarms")
    assert record.metrics["test"]["not_finite"] == dict.fromkeys(lost, 1)


def test_what_a_fit_warns_of_is_events_to_all_that_share_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def warn(context: FitContext, settings: Any) -> Any:
        logging.getLogger("offmap").warning("Mind the %s.", "gap")
        return 1 / 0

    monkeypatch.setitem(METHODS, "maxwent", replace(METHODS["maxwent"], fit=warn))
    bench = Bench()
    assert [bench.run(cell).warnings for cell in tiny("wide*")] == [["Mind the gap."]] * 2


def test_two_processes_do_the_same_work(tmp_path: Path) -> None:
    wanted, events = tiny("nearest", TEXT.replace("seeds = [0]", "seeds = [0, 1]")), list[Event]()
    outcome = run(wanted, tmp_path / "tiny.jsonl", jobs=2, report=events.append)
    assert (outcome.done, outcome.failed) == (2, 0)
    assert sorted(event.kind for event in events) == ["begin", "begin", "done", "done"]
    assert {event.cell.hash for event in events} == {cell.hash for cell in wanted}
    assert len(read_records(tmp_path / "tiny.jsonl").records) == 2


def test_a_run_that_is_killed_goes_on_and_ends_with_the_records_of_an_undisturbed_one(tmp_path: Path) -> None:
    text = TEXT.replace("seeds = [0]", "seeds = [0, 1, 2]").replace("steps = 30", "steps = 150")
    plan, path, undisturbed = tmp_path / "plan.toml", tmp_path / "killed.jsonl", tmp_path / "undisturbed.jsonl"
    plan.write_text(text, encoding="utf-8")
    words = [sys.executable, "-m", "offmap", "bench", "run", str(plan), "--only", "?[li][ad]*", "--jobs", "2"]
    environment = {**os.environ, "OFFMAP_CACHE": str(tmp_path / "cache")}
    process = subprocess.Popen([*words, "--records", str(path)], env=environment)
    try:
        while not path.exists():
            assert process.poll() is None, "it ended before it wrote a record"
            time.sleep(0.01)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    wanted = tiny("?[li][ad]*", text)
    before = read_records(path).records
    assert 0 < len(before) < len(wanted)
    outcome = run(wanted, path)
    assert (outcome.before + outcome.done, outcome.failed, outcome.damaged) == (len(wanted), 0, {})
    assert outcome.before >= len(before)
    after = read_records(path).records
    assert {name: after[name] for name in before} == before
    run(wanted, undisturbed)
    assert without_seconds(after) == without_seconds(read_records(undisturbed).records)


def without_seconds(records: dict[str, Record]) -> dict[str, Record]:
    return {name: replace(record, seconds={}) for name, record in records.items()}


OWN = """
import torch


class Middle:
    def __init__(self, context, power=2.0):
        self.mean, self.power = context.task.train[0].mean(0), power

    def score(self, x):
        return (x - self.mean).abs().pow(self.power).sum(1)


class Nets:
    members = 5

    def __init__(self, nets):
        self.nets = nets

    @torch.no_grad()
    def outputs(self, x, draws, *, clip=None, seed=0):
        return torch.stack([net(x) for net in self.nets]).repeat_interleave(draws, 0)


def nets(context):
    return Nets(context.models())


def nothing(context):
    return 3
"""

OWN_PLAN = """
name = "own"
seeds = [0]
tasks = ["regression"]
[defaults.deep_ensemble]
hidden = [8]
steps = 20
check_every = 10
[[method]]
name = "deep_ensemble"
members = 5
[[method]]
name = "own_methods:Middle"
label = "middle"
config = {power = 1.0}
[[method]]
name = "own_methods:nets"
label = "nets"
members = 5
"""


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_method_of_ones_own_is_named_by_module_and_callable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jobs: int) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("OFFMAP_CACHE", str(tmp_path))
    (tmp_path / "own_methods.py").write_text(OWN, encoding="utf-8")
    path = tmp_path / "own.toml"
    path.write_text(OWN_PLAN + ('[[method]]\nname = "own_methods:nothing"\n' if jobs == 1 else ""), encoding="utf-8")
    plan = read_plan(path)
    assert plan.scores["middle"] == plan.scores["nets"] == "own"
    wanted = cells(plan)
    outcome = run(wanted, tmp_path / "own.jsonl", jobs=jobs)
    assert outcome.done == 3
    records = {r.cell["method"]: r for r in read_records(tmp_path / "own.jsonl").records.values()}
    ensemble, middle, nets = (records[name] for name in ("deep_ensemble", "own_methods:Middle", "own_methods:nets"))
    assert middle.settings["config"] == {"power": 1.0, "file": hashlib.sha256(OWN.encode()).hexdigest()[:16]}
    x = task("regression", 0)
    scores = [(part - x.train[0].mean(0)).abs().sum(1) for part in (x.test[0], next(iter(x.ood.values())))]
    name = next(iter(x.ood))
    assert middle.metrics[name]["auroc"] == pytest.approx(float(auroc(*scores)), rel=1e-5)
    assert nets.metrics[name]["auroc"] == pytest.approx(
        ensemble.metrics[name]["auroc"], abs=1e-4
    )  # the same nets, the paper's score
    if jobs == 1:
        assert outcome.failed == 1
        assert "to return an object with `score(x)`" in records["own_methods:nothing"].reason
    for old, new, message in (
        (":Middle", ":Midle", "own_methods:Midle' gives AttributeError"),
        ("own_methods:M", "no_such_module:M", "can be imported from the folder of the plan.*gives ModuleNotFoundError"),
        ("power = 1.0", "powr = 1.0", "a key of `config` of 'own_methods:Middle' to be .*did you mean 'power'"),
    ):
        with pytest.raises(ConfigError, match=message):
            parse(OWN_PLAN.replace(old, new), "own.toml")
    grid = parse(OWN_PLAN.replace("config = {power = 1.0}", "grid = {power = [1.0, 2.0]}"), "own.toml")
    assert "neither `grid` nor `score`" in Bench().run(cells(grid)[1]).reason
