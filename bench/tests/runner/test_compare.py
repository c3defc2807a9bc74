"""Comparisons: our means beside printed numbers, joined from several plans, and every verdict by hand."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from offmap.errors import ConfigError
from offmap_bench.runner.compare import Entry, Number, compare_all, compare_markdown, compare_table, parse_sheet, sheet
from offmap_bench.runner.plan import METHODS, Plan, cells, parse, read_packaged, read_plan
from offmap_bench.runner.store import Record, Records, settings_of
from offmap_bench.runner.table import Results


def plan(name: str, *labels: str, seeds: str = "[0, 1]") -> Plan:
    methods = "".join(f'[[method]]\nname = "deep_ensemble"\nlabel = "{label}"\nconfig = {{steps = {place + 1}}}\n'
                      for place, label in enumerate(labels))  # fmt: skip
    tasks = '["uci/yacht/extrapolation", "uci/wine/extrapolation"]'
    return parse(f'name = "{name}"\nseeds = {seeds}\ntasks = {tasks}\n{methods}', f"{name}.toml")


def results(plan: Plan, values: dict[str, float], only: str = "") -> Results:
    """Records with the AUROC of each label on yacht, 0.2 less on wine, 0.02 more with seed 1; NLL a tenth of it."""
    records = {}
    for cell in cells(plan):
        if cell.label in values and only in cell.task:
            auroc = values[cell.label] - 0.2 * ("wine" in cell.task) + 0.02 * cell.seed
            metrics_of = {"test": {"nll": auroc / 10, "width": auroc}, "extrapolation": {"auroc": auroc}}
            records[cell.hash] = Record(cell.as_dict(), "ok", settings_of(cell), metrics_of, steps=10 * cell.config["steps"])
    return Results(plan, Records(records, {}))


SHEET = parse_sheet("""
plans = ["first", "second"]
note = "What to mind."
[[table]]
title = "AUROC"
all = {tasks = "uci/*/*", measure = "auroc"}
methods = [["A", "ours"], ["B", "absent", "other"], ["C", "missing", "too"]]
numbers = [
    {title = "yacht", tasks = "uci/yacht/*", printed = [91.0, 85.0, 1.0]},
    {title = "mean", printed = [70.0, 75.0, "> 50"]},
    {title = "NLL", part = "test", measure = "nll", show = "plain", better = "lower", printed = [0.2, 0.07, 0.0]},
    {title = "w", part = "test", measure = "width", show = "plain", better = "lower", printed = [1, 0.5, 1], relative = "ours"},
]
""")
SEVERAL = [
    results(plan("first", "ours", "spare"), {"ours": 0.9, "spare": 0.5}),
    results(plan("second", "other", "ours"), {"other": 0.8, "ours": 0.4}),
]


def test_every_row_says_ours_printed_and_the_verdict() -> None:
    page = compare_markdown("first", SHEET, SEVERAL)
    rows = [line for line in page.splitlines() if line.startswith("| ")]
    nll = "0.071 ± 0.001 (0.07) ≈"
    first, second = "91.0 ± 1.4 (91.0) ≈ | 81.0 ± 1.4 (70.0) ▲", "41.0 ± 1.4 (91.0) ▼ | 31.0 ± 1.4 (70.0) ▼"
    assert rows == [
        "| here | in the paper | score | plan | steps | yacht | mean | NLL | w |",
        f"| ours | A | paper | first | 10 | {first} | 0.081 ± 0.001 (0.20) ▲ | 1.000 ± 0.000 (1.00) ≈ |",
        f"| ours | A | paper | second | 20 | {second} | 0.031 ± 0.001 (0.20) ▲ | 1.000 ± 0.000 (1.00) ≈ |",
        f"| other | B | paper | second | 10 | 81.0 ± 1.4 (85.0) ▼ | 71.0 ± 1.4 (75.0) ▼ | {nll} | 2.443 ± 0.081 (0.50) ▼ |",
        "| missing | C |  |  |  | – (1.0) | – (> 50) | – (0.00) | – (1.00) |",
        "| spare |  | paper | first | 20 | 51.0 ± 1.4 | 41.0 ± 1.4 | 0.041 ± 0.001 | 0.498 ± 0.009 |",
    ]
    assert "Of 8 printed numbers that we have too, 2 are better here, 3 alike and 3 worse; the first row of a label" in page
    assert "\n\nWhat to mind.\n\n" in page
    assert (
        "## Means more than 5 points from the printed ones\n\n- ours, AUROC, mean: 81.0 here (first, 10), 70.0 printed\n" in page
    )


def test_of_a_label_in_two_plans_the_first_that_has_a_number_counts() -> None:
    rows = compare_table(SHEET.tables[0], SEVERAL[::-1])
    assert [(row.plan, row.entries[0].mean) for row in rows[:2]] == [
        ("second", pytest.approx(41.0)),
        ("first", pytest.approx(91.0)),
    ]
    judged = compare_all(SHEET, SEVERAL[::-1])[1]
    assert [entry.mean for entry in judged if entry.number.title == "yacht" and entry.printed == 91.0] == [pytest.approx(41.0)]


def test_a_mean_counts_where_all_its_tasks_have_run() -> None:
    partly = [results(plan("long", "ours"), {"ours": 0.9}, only="yacht"), *SEVERAL]
    rows = compare_table(SHEET.tables[0], partly)
    assert [row.plan for row in rows[:2]] == ["long", "first"]
    assert [[str(entry)[:4] for entry in row.entries[:2]] for row in rows[:2]] == [["91.0", "– (7"], ["91.0", "81.0"]]
    assert compare_all(SHEET, partly)[1][:2] == [rows[0].entries[0], rows[1].entries[1]]


@pytest.mark.parametrize(
    ("ours", "printed", "better", "verdict"),
    [
        ((0.9,), 88.9, "higher", "better"), ((0.9,), 89.1, "higher", "alike"), ((0.9,), 91.1, "higher", "worse"),
        ((0.9,), 88.9, "lower", "worse"), ((0.8, 0.9), 92.0, "higher", "alike"), ((0.8, 0.9), 92.1, "higher", "worse"),
        ((0.9,), 80.0, 95.0, "better"), ((0.9,), 94.0, 95.0, "worse"), ((0.99,), 90.0, 95.0, "alike"),
        ((), 50.0, "higher", None), ((0.9,), "> 50", "higher", None), ((0.9,), None, "higher", None),
    ],
)  # fmt: skip
def test_verdicts(ours: tuple[float, ...], printed: Any, better: Any, verdict: str | None) -> None:
    assert Entry(ours, printed, Number("x", "*", "auroc", (), better=better)).verdict == verdict


def test_a_table_with_too_few_numbers_is_refused() -> None:
    with pytest.raises(ConfigError, match="Expected 2 printed numbers, one for each method, in 'x' of 'T', but got 1"):
        parse_sheet('plans=[]\n[[table]]\ntitle="T"\nmethods=[["A","a"],["B","b"]]\n'
                    'numbers=[{title="x", tasks="*", measure="m", printed=[1.0]}]')  # fmt: skip


def test_a_plan_without_printed_numbers_is_named() -> None:
    with pytest.raises(
        ConfigError, match="Expected a plan with printed numbers to compare with, .*did you mean 'uci'.*but got 'ucy'"
    ):
        sheet("ucy")


def test_the_printed_averages_are_the_means_of_the_printed_cells() -> None:
    for table in sheet("uci").tables:
        mean, *tasks = table.numbers
        assert mean.title == "mean"
        assert len(tasks) == 8
        for place in range(len(table.methods)):
            found = sum(float(number.printed[place]) for number in tasks) / 8
            assert found == pytest.approx(float(mean.printed[place]), abs=0.2)


@pytest.mark.parametrize("name", read_packaged("plans/printed"))
def test_every_label_of_a_sheet_is_in_a_plan_that_answers(name: str) -> None:
    found = sheet(name)
    plans = [tomllib.loads(read_packaged()[plan]) for plan in found.plans]
    labels = {method.get("label", method["name"]) for plan in plans for method in plan["method"]}
    for table in found.tables:
        assert {label for _, answers in table.methods for label in answers} <= labels
        assert {number.relative for number in table.numbers} <= labels | {None}
    known = all(method["name"] in METHODS for plan in plans for method in plan["method"])
    if not known:
        pytest.skip("some of its methods are not registered yet")
    tasks = {task for plan in found.plans for task in read_plan(plan).tasks}
    assert tasks
    assert not any(Results.read(plan, Path("nowhere")).ok for plan in found.plans)
