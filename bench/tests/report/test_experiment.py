"""Plans as pages and figures: everything that records say is there, and the page stands alone."""

from __future__ import annotations

import re
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from offmap.errors import FileError
from offmap.report.diagnosis import draw_trace
from offmap_bench.report.experiment import Experiment, dots, figures, write_figures, write_page
from offmap_bench.report.panels import shown_range
from offmap_bench.report.paper_figures import draw_day
from offmap_bench.runner.compare import parse_sheet
from offmap_bench.runner.plan import cells, parse
from offmap_bench.runner.store import Record, Records, settings_of
from offmap_bench.runner.table import Results
from pages import check_page

PLAN = parse(
    """
    name = "two"
    seeds = [0, 1]
    tasks = ["uci/yacht/extrapolation", "uci/wine/extrapolation"]
    [[method]]
    name = "nearest"
    label = "Near <row>"
    [[method]]
    name = "deep_ensemble"
    label = "Plain"
    """,
    "two.toml",
)
SHEET = parse_sheet("""
plans = ["two"]
note = "What to mind."
[[table]]
title = "AUROC"
all = {measure = "auroc"}
methods = [["A", "Plain"]]
numbers = [
    {title = "yacht", tasks = "uci/yacht/extrapolation", printed = [99.0]},
    {title = "mean", tasks = "uci/*/extrapolation", printed = [61.0]},
]
""")


def experiment(folder: Path, *, whole: bool = True) -> Experiment:
    records: dict[str, Record] = {}
    for cell in cells(PLAN)[: None if whole else 3]:
        auroc = 0.6 + 0.2 * ("wine" in cell.task) + 0.01 * cell.seed
        test = {"nll": -1.0, "ence": 0.25, "wide_ence": 0.5} if cell.method == "deep_ensemble" else {}
        metrics = {"test": test, "extrapolation": {"auroc": auroc, "fpr95": 0.5}}
        records[cell.hash] = Record(cell.as_dict(), "ok", settings_of(cell), metrics)
    results = Results(PLAN, Records(records, {}))
    made = Experiment("two", folder)
    vars(made).update(results=results, sheet=SHEET, answers=[results])
    return made


def test_the_page_stands_alone_and_has_tables_comparison_and_figures(tmp_path: Path) -> None:
    text = write_page(experiment(tmp_path), tmp_path / "page.html", print)[0].read_text(encoding="utf-8")
    page = check_page(text)
    titles = re.findall(r"<h2[^>]*>([^<]*)</h2>", text)
    assert titles == [
        "Detection, extrapolation", "Beside the paper", "AUROC of every method", "In-distribution data", "Calibration, clipped",
        "Calibration, not clipped", "AUROC of each task, extrapolation",
    ]  # fmt: skip
    assert "70.5 ± 0.7 (61.0) ▲" in text
    assert "60.5 ± 0.7 (99.0) ▼" in text
    assert "Near &lt;row&gt;" in text
    assert "What to mind." in text
    assert len(page.labels) == 1
    assert "From 8 of 8 records" in text
    assert "What is missing" not in text


def test_what_is_missing_is_said_first(tmp_path: Path) -> None:
    text = write_page(experiment(tmp_path, whole=False), tmp_path / "page.html", print)[0].read_text(encoding="utf-8")
    check_page(text)
    assert "5 of 8 cells not run yet" in text
    assert text.index("What is missing") < text.index("Detection, extrapolation")


def test_an_impossible_path_is_refused_before_anything_is_drawn(tmp_path: Path) -> None:
    said: list[str] = []
    with pytest.raises(FileError, match="does not exist"):
        write_page(experiment(tmp_path), tmp_path / "no" / "page.html", said.append)
    assert said == []


def test_dots_stand_at_the_values_with_the_printed_mean(tmp_path: Path) -> None:
    (panel,) = dots(experiment(tmp_path))
    assert panel.alt == "Mean AUROC in per cent: Near <row> 70.5, Plain 70.5."
    assert panel.svg.count("Near &lt;row&gt;") >= 1


def test_figures_are_files_of_their_own(tmp_path: Path) -> None:
    folder, (path,) = write_figures(experiment(tmp_path), tmp_path / "figures" / "two", print)
    assert path.parent == folder
    assert path.name == "auroc.svg"
    text = path.read_text(encoding="utf-8")
    assert text.startswith("<svg xmlns")
    assert "var(--" not in text
    assert list(figures(experiment(tmp_path), print)) == ["auroc"]


def test_a_line_leaves_out_what_was_not_looked_at() -> None:
    steps = np.arange(4.0)
    whole = draw_trace([(steps, np.array([0.0, 1.0, 2.0, 3.0]), 2)], "x")
    holes = draw_trace([(steps, np.array([0.0, np.nan, np.inf, 3.0]), 2)], "x")
    assert whole.count("\nL ") > holes.count("\nL ")
    assert "<svg" in draw_trace([(np.zeros(0), np.zeros(0), 0)], "x", [1.0])


def test_the_wildest_values_do_not_set_the_axis() -> None:
    values = np.linspace(0, 1, 99)
    limits = shown_range(np.array([*values, 1e6]))
    assert limits is not None
    assert limits[1] < 1.5
    assert shown_range(values) == pytest.approx((-0.036, 1.036), abs=0.01)
    assert shown_range(values, [3.0]) == pytest.approx((-0.1, 3.1), abs=0.2)
    assert shown_range(np.array([np.nan, np.inf])) is None


def test_a_day_is_drawn_hour_by_hour() -> None:
    frames = [SimpleNamespace(time=datetime(2016, 2, 23, 14 + n // 60, n % 60), vehicles=n % 7) for n in range(0, 200, 5)]
    std = np.linspace(1, 9, len(frames))
    panel = draw_day(frames, np.full(len(frames), 3.0), std, "Wide")
    assert panel.alt == "Wide: standard deviation 1.3 vehicles early, 8.7 late."
    assert "<svg" in panel.svg
