"""Tables: means over whole sets of tasks, and what is missing said plainly."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from offmap_bench.runner.plan import Cell, Plan, cells, parse
from offmap_bench.runner.store import Record, Records, settings_of
from offmap_bench.runner.table import Results
from offmap_bench.runner.table import markdown as write_page

PLAN = parse(
    """
    name = "two"
    seeds = [0, 1]
    tasks = ["uci/yacht/extrapolation", "uci/energy/extrapolation"]
    [[method]]
    name = "nearest"
    label = "Near"
    [[method]]
    name = "deep_ensemble"
    label = "Plain"
    """,
    "two.toml",
)


def record(cell: Cell, auroc: float, **changes: Any) -> Record:
    metrics: dict[str, dict[str, Any]] = {"test": {"valid_rows": 7}, "extrapolation": {"auroc": auroc, "fpr95": 0.5}}
    if cell.method == "deep_ensemble":
        width = None if "yacht" in cell.task else 2.0
        metrics["valid"] = {"nll": -2.0}
        metrics["test"] |= {"nll": -1.0, "rmse": 0.1, "ece": 0.05, "conformal_width": width}
    return Record(**{"cell": cell.as_dict(), "status": "ok", "settings": settings_of(cell), "metrics": metrics, **changes})


def make_records(**changes: dict[str, Any] | None) -> Records:
    """Records of all cells: AUROC 0.6 and 0.8 on the tasks, 0.1 more with seed 1; some changed or gone, by label_task_seed."""
    records: dict[str, Record] = {}
    for cell in cells(PLAN):
        name = f"{cell.label}_{cell.task.split('/')[1]}_{cell.seed}"
        change = changes.get(name, {})
        if change is not None:
            records[cell.hash] = record(cell, (0.6 if "yacht" in cell.task else 0.8) + 0.1 * cell.seed, **change)
    return Records(records, {})


def markdown(plan: Plan, records: Records) -> str:
    return write_page(Results(plan, records))


def lines(page: str, start: str) -> list[str]:
    return [line for line in page.splitlines() if line.startswith(start)]


def test_means_are_over_tasks_and_the_spread_over_seeds() -> None:
    page = markdown(PLAN, make_records())
    assert "from 8 of 8 records" in page
    assert lines(page, "| Near") == ["| Near | own | 75.0 ± 7.1 | 50.0 ± 0.0 | – |", "| Near | own | 65.0 ± 7.1 | 85.0 ± 7.1 |"]
    assert "cells" not in page
    assert lines(page, "| method")[-1] == "| method | score | yacht | energy |"


def test_a_number_that_does_not_exist_for_a_task_is_said() -> None:
    page = markdown(PLAN, make_records())
    assert "width: 1 of 2 tasks; it does not exist for uci/yacht/extrapolation." in page
    assert lines(page, "| Plain")[1].removesuffix(" |").split(" | ")[5] == "2.000 ± 0.000"


def test_the_validation_nll_stands_beside_that_of_the_test_data() -> None:
    row = lines(markdown(PLAN, make_records()), "| Plain")[1].split(" | ")
    assert row[1:3] == ["-1.000 ± 0.000", "-2.000 ± 0.000"]


def test_a_page_has_the_title_of_its_plan_or_else_its_name() -> None:
    assert markdown(PLAN, make_records()).startswith("# two\n\n")
    assert markdown(replace(PLAN, title="Two tasks"), make_records()).startswith("# Two tasks\n\n")


def test_the_note_of_a_plan_is_on_its_page() -> None:
    assert "\n\nWhat to look at.\n\n" in markdown(replace(PLAN, note="What to look at."), make_records())


def test_a_seed_that_lacks_a_task_is_no_mean() -> None:
    page = markdown(PLAN, make_records(Near_yacht_1=None))
    assert lines(page, "| Near") == ["| Near | own | 70.0\\* | 50.0\\* | – |", "| Near | own | 60.0\\* | 85.0 ± 7.1 |"]
    assert "\\* not all seeds: only those with every task count." in page
    assert "**1 of 8 cells not run yet:**\n\n- Near, 1: uci/yacht/extrapolation (seed 1)" in page


def test_a_task_without_any_record_leaves_no_mean() -> None:
    gone = {f"{label}_energy_{seed}": None for label in ("Near", "Plain") for seed in (0, 1)}
    page = markdown(PLAN, make_records(**gone))
    assert lines(page, "| Near") == ["| Near | own | – | – | – |", "| Near | own | 65.0 ± 7.1 | – |"]
    assert "**4 of 8 cells not run yet:**" in page


def test_failures_are_listed_with_their_reason() -> None:
    change = {"status": "failed", "metrics": {}, "traceback": "Traceback\nHostError: no luck\n"}
    page = markdown(PLAN, make_records(Plain_energy_0=change))
    assert "**1 of 8 cells failed:**\n\n- Plain, 1: uci/energy/extrapolation (seed 0): HostError: no luck" in page
    assert lines(page, "| Plain")[0] == "| Plain | paper | 80.0\\* | 50.0\\* | – |"


def test_stale_and_damaged_records_are_listed() -> None:
    some = make_records(Near_yacht_0={"settings": {"config": {"k": 9}}})
    page = markdown(PLAN, some)
    assert "**1 of 8 cells made with other defaults, to be run again:**" in page
    cell = cells(PLAN)[0]
    rest = {name: r for name, r in make_records().records.items() if name != cell.hash}
    page = markdown(PLAN, Records(rest, {cell.hash: "broken", "line 7": "broken"}))
    assert "**1 of 8 cells in damaged lines:**" in page
    assert f"Damaged lines: {cell.hash}, line 7" in page


def test_an_empty_folder_is_a_page_that_says_so() -> None:
    page = markdown(PLAN, Records({}, {}))
    assert "from 0 of 8 records" in page
    assert "**8 of 8 cells not run yet:**" in page
    assert "##" not in page
