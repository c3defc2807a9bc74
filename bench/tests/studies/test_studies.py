"""Pages of studies are those of their records, and records are complete."""

import json
from pathlib import Path
from statistics import fmean

import pytest

from offmap_bench.runner.compare import Entry, Number
from offmap_bench.runner.plan import cells, parse
from offmap_bench.runner.store import Record, Records, settings_of
from offmap_bench.runner.table import Results
from offmap_bench.studies import distill, options, promises, reproduction, series, study
from offmap_bench.studies.__main__ import STUDIES, load
from offmap_bench.studies.study import Study


@pytest.mark.parametrize("name", STUDIES)
def test_the_page_of_a_study_is_that_of_its_record(name: str):
    assert load(name).text() == load(name).page.read_text(encoding="utf-8"), "run `python -m offmap_bench.studies pages`"


def test_records_have_all_tasks():
    assert {cell.partition(",")[0] for cell in distill.STUDY.read()["runs"]} == set(distill.TASKS)
    assert set(options.STUDY.read()["runs"]) == set(options.STUDY.cells())


def test_series_keep_their_promise_by_groups_and_on_the_stream():
    runs = series.STUDY.read()["runs"]
    assert set(runs) == {f"{name}, seed {seed}" for name in series.CASES for seed in series.SEEDS} | {"random order"}
    for name, case in series.CASES.items():
        rates = [runs[f"{name}, seed {seed}"]["rates"] for seed in series.SEEDS]
        assert fmean(rate[series.SAME] for rate in rates) > 0.1, name
        assert case.later is not None or max(rate[series.GROUPS] for rate in rates) <= 0.05, name
        assert all(abs(rate[series.MOVING] - 0.05) < 0.015 for rate in rates), name


def test_a_study_measures_the_cells_that_its_record_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(study, "RECORDS", tmp_path)
    (tmp_path / "small.json").write_text(json.dumps({"runs": {"a": 1}, "versions": {}}), encoding="utf-8")
    small = Study("small", lambda: {"a": lambda: 2, "b": lambda: 3}, lambda runs: runs, ("offmap",))
    small.run()
    assert small.read()["runs"] == {"a": 1, "b": 3}
    assert set(small.read()["versions"]) == {"offmap"}


def test_promises_hold_on_record():
    found = promises.collect(promises.STUDY.read()["runs"])
    assert {"regression", "classification", "forest, trees as draws", "post-hoc detectors"} <= {name for name, _, _ in found}
    for shares in found.values():
        seeds, (alarms, error) = shares["seeds"][0], shares["alarms"]
        assert seeds >= 20
        assert alarms - 2 * error <= 5  # four standard errors of the mean over seeds
        if "covered" in shares:
            covered, error = shares["covered"]
            assert covered + 2 * error >= 90
    counts = {promise: (len(names), count) for promise, (count, names) in promises.exceptions(found).items()}
    assert all(wrong <= 0.05 * count for wrong, count in counts.values())  # of 95 % intervals one in forty lies above by chance


def test_hours_left_count_every_fit_once():
    text = """
name = "small"
seeds = [0]
tasks = ["uci/yacht/extrapolation", "uci/yacht/interpolation"]
[[method]]
name = "deep_ensemble"
members = 5
[[method]]
name = "mean_field"
label = "a"
grid = {tradeoff = [1, 2]}
[[method]]
name = "mean_field"
label = "b"
members = 5
grid = {tradeoff = [1, 2]}
"""
    plan = parse(text, "small.toml")
    done = next(cell for cell in cells(plan) if cell.label == "deep_ensemble")
    results = Results(plan, Records({done.hash: Record(done.as_dict(), "ok", settings_of(done))}))
    ensemble, bnn = 10_000 * (2 + 0.4 * 5), 2 * 50_000 * (2 + 0.4 * 10)
    assert reproduction.count_hours(results) == pytest.approx((ensemble + bnn) / 3_600_000)


def test_gaps_are_means_with_a_sign_and_a_count():
    number = Number("x", "*", "auroc", ())
    assert reproduction.describe([Entry((0.8,), 90.0, number), Entry((0.7, 0.72), 70.0, number)]) == ["−4.5", "1"]
    assert reproduction.describe([]) == ["–", "–"]
