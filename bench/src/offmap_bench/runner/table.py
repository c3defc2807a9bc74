"""Records as Markdown: means over tasks and seeds, every task by itself, and a list of what is missing."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean, pstdev

from offmap_bench.runner.plan import Cell, Plan, cells
from offmap_bench.runner.store import Record, Records

Values = dict[str, dict[tuple[str, int], float]]
"""{label: {(task, seed): value}}, without the numbers that do not exist."""

NOTHING, FEWER = "–", "\\*"
CHOSEN = "chosen"
"""The part of a record that holds what the fit chose and reached."""


@dataclass(frozen=True)
class Column:
    """One number of a record, and how it is shown."""

    title: str
    measure: str
    show: Callable[[float], str]
    part: str | None = None  # the set it stands under; None: the table's


def percent(value: float) -> str:
    """A share in per cent.

    >>> percent(0.91234)
    '91.2'
    """
    return f"{100 * value:.1f}"


def plain(value: float) -> str:
    """Three decimals."""
    return f"{value:.3f}"


DETECTION = (Column("AUROC", "auroc", percent), Column("FPR@95", "fpr95", percent), Column("flagged", "flagged", percent))
QUALITY = (
    Column("NLL", "nll", plain), Column("validation NLL", "nll", plain, "valid"), Column("RMSE", "rmse", plain),
    Column("ECE", "ece", percent), Column("coverage", "conformal_coverage", percent), Column("width", "conformal_width", plain),
    Column("false alarms", "false_alarms", percent), Column("entropy", "entropy", plain, CHOSEN),
)  # fmt: skip
CALIBRATION = (
    Column("ENCE", "ence", plain), Column("quantile ECE", "ece", plain), Column("reference ECE", "reference_ece", plain),
    Column("coverage", "coverage", percent), Column("width", "width", plain), Column("NLL", "nll", plain),
    Column("coverage, conformal", "conformal_coverage", percent), Column("width, conformal", "conformal_width", plain),
    Column("coverage, calibrated", "calibrated_coverage", percent), Column("width, calibrated", "calibrated_width", plain),
)  # fmt: skip
WIDE = tuple(replace(column, measure=f"wide_{column.measure}") for column in CALIBRATION)


@dataclass(frozen=True)
class Results:
    """A plan with its records."""

    plan: Plan
    records: Records

    @cached_property
    def cells(self) -> list[Cell]:
        """All cells of the plan."""
        return cells(self.plan)

    @cached_property
    def ok(self) -> list[tuple[Cell, Record]]:
        """The cells that are done, with their records."""
        return [(cell, self.records.records[cell.hash]) for cell in self.cells if self.states[cell.hash] == "ok"]

    @cached_property
    def states(self) -> dict[str, str]:
        """The state of every cell, by its hash."""
        return {cell.hash: self.records.state(cell) for cell in self.cells}

    def sets(self) -> dict[str, list[str]]:
        """The OOD sets, each with the tasks that have it; a task without any record yet has the set that its name says."""
        tasks = {task: {task.rpartition("/")[2]} for task in self.plan.tasks}
        done = {task: set[str]() for task in self.plan.tasks}
        for cell, record in self.ok:
            done[cell.task] |= record.metrics.keys() - {"test", "valid"}
        tasks |= {task: names for task, names in done.items() if names}
        names = dict.fromkeys(name for task in self.plan.tasks for name in sorted(done[task]))
        return {name: [task for task in self.plan.tasks if name in tasks[task]] for name in names}

    def absent(self, part: str, measure: str, tasks: Sequence[str]) -> list[str]:
        """The tasks for which a number does not exist, whatever the method: it is null in all records that have it."""
        has: dict[str, set[bool]] = {}
        for cell, record in self.ok:
            if measure in (metrics := record.metrics.get(part, {})):
                has.setdefault(cell.task, set()).add(metrics[measure] is not None)
        return [task for task in tasks if has.get(task) == {False}]

    def values(self, part: str, measure: str) -> Values:
        """One number of every record that has it."""
        values: Values = {label: {} for label in self.plan.labels}
        for cell, record in self.ok:
            value = (record.chosen if part == CHOSEN else record.metrics.get(part, {})).get(measure)
            if isinstance(value, int | float):
                values[cell.label][cell.task, cell.seed] = value
        return values


@dataclass(frozen=True)
class TableSection:
    """A table with its title, a text above it and notes below."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    text: str = ""
    notes: Sequence[str] = ()

    def markdown(self) -> str:
        """The section as Markdown."""
        return "\n\n".join([f"## {self.title}", *[self.text][: bool(self.text)], table(self.head, self.rows), *self.notes])


def markdown(plan: Plan, records: Records) -> str:
    """The page of one plan."""
    results = Results(plan, records)
    parts = [
        f"# {plan.name}",
        f"Written by `offmap bench table {words(results)}` from {lead(results)}",
        *([plan.note] if plan.note else []),
        *missing(results),
        *(section.markdown() for section in (*detection(results), *quality(results), *each_task(results))),
    ]
    return "\n\n".join(parts) + "\n"


def words(results: Results) -> str:
    """The plan as it is asked for."""
    name = results.plan.name
    return name.removesuffix("-quick") + " --quick" * name.endswith("-quick")


def lead(results: Results) -> str:
    """What the numbers of a page are made of."""
    plan, done = results.plan, len(results.ok)
    return (
        f"{done} of {len(results.cells)} records: {len(plan.tasks)} tasks, {len(plan.labels)} methods, seeds "
        f"{', '.join(map(str, plan.seeds))}. Numbers are means over tasks ± standard deviation over seeds, in per cent but for "
        "NLL, RMSE and width, which are in units of the training targets' standard deviation. ×1 is the mean over the nets, each "
        "alone; ×5 all of them together."
    )


def missing(results: Results) -> list[str]:
    """What is not in the tables, by state; labels that lack the same cells in one line. Nothing when all is there."""
    lines: list[str] = []
    for state, words in (
        ("missing", "not run yet"), ("failed", "failed"), ("stale", "made with other defaults, to be run again"),
        ("damaged", "in damaged lines"),
    ):  # fmt: skip
        concerned = [cell for cell in results.cells if results.states[cell.hash] == state]
        if not concerned:
            continue
        by_cells: dict[tuple[str, ...], list[str]] = {}
        for label in dict.fromkeys(cell.label for cell in concerned):
            names = (f"{cell.task} (seed {cell.seed}){_reason(results, cell)}" for cell in concerned if cell.label == label)
            by_cells.setdefault(tuple(names), []).append(label)
        lines += [f"**{len(concerned)} of {len(results.cells)} cells {words}:**", ""]
        for names, labels in by_cells.items():
            shown = "; ".join(names[:3]) + (f"; and {len(names) - 3} more" if len(names) > 3 else "")
            lines.append(f"- {', '.join(labels)}, {len(names)}{' each' * (len(labels) > 1)}: {shown}")
        lines.append("")
    if results.records.damaged:
        lines.append("Damaged lines: " + ", ".join(results.records.damaged))
    return ["\n".join(lines).strip()] if lines else []


def _reason(results: Results, cell: Cell) -> str:
    record = results.records.records.get(cell.hash)
    return f": {record.reason}" if record and record.reason else ""


def detection(results: Results) -> list[TableSection]:
    """Detection on every OOD set, mean over its tasks."""
    sections: list[TableSection] = []
    for name, tasks in results.sets().items():
        rows, notes = summary(results, name, tasks, DETECTION)
        sections.append(TableSection(f"Detection, {name}", ["method", *(c.title for c in DETECTION)], rows, notes=notes))
    return sections


QUALITY_TABLES = (
    ("In-distribution data", QUALITY,
     "Clipped predictions on test data; intervals are conformal, at 95 %; false alarms are test rows above the threshold. "
     "Entropy is (1/d) Σ log φ² of the fit."),
    ("Calibration, clipped", CALIBRATION,
     "On test data: Levi's ENCE; the mean gap between nominal and empirical coverage at ten levels, with the standard deviation "
     "(quantile ECE) and, as in the paper's authors' code, with the variance for the scale (reference ECE); mean ± 1.96 standard "
     "deviations; the same scaled to be conformal at 95 %, and by the empirical 95 % quantile of the validation rows, which "
     "exists for any number of them."),
    ("Calibration, not clipped", WIDE, "The same without the clip, as the draws are that detect."),
)  # fmt: skip
"""Tables of predictions on in-distribution data: title, columns, and what they are. A table with an empty first column is left
out."""


def quality(results: Results) -> list[TableSection]:
    """Predictions on in-distribution data, mean over all tasks, without the rows and columns that hold nothing."""
    sections: list[TableSection] = []
    for title, columns, text in QUALITY_TABLES:
        rows, notes = summary(results, "test", results.plan.tasks, columns)
        rows = [row for row in rows if set(row[1:]) != {NOTHING}]
        shown = [0, *(i for i in range(1, len(columns) + 1) if any(row[i] != NOTHING for row in rows))]
        if shown[1:2] == [1]:
            head = ["method", *(column.title for column in columns)]
            sections.append(TableSection(title, [head[i] for i in shown], [[row[i] for i in shown] for row in rows], text, notes))
    return sections


def summary(results: Results, part: str, tasks: Sequence[str], columns: Sequence[Column]) -> tuple[list[list[str]], list[str]]:
    """A row per method; and notes on the numbers that stand for fewer tasks or seeds than planned."""
    rows: dict[str, list[str]] = {label: [label] for label in results.plan.labels}
    notes: dict[str, None] = {}
    for column in columns:
        source = column.part or part
        values, absent = results.values(source, column.measure), results.absent(source, column.measure, tasks)
        present = [task for task in tasks if task not in absent]
        if absent:
            notes[f"{column.title}: {len(present)} of {len(tasks)} tasks; it does not exist for {', '.join(absent)}."] = None
        for label in results.plan.labels:
            means = complete_seeds(values[label], present, results.plan.seeds)
            fewer = 0 < len(means) < len(results.plan.seeds)
            rows[label].append(spread(means, column.show) + FEWER * fewer)
            if fewer:
                notes[f"{FEWER} not all seeds: only those with every task count."] = None
    if any(NOTHING in row[1:] for row in rows.values()):
        notes[f"{NOTHING}: no seed with every task, or a number that the method does not give."] = None
    return list(rows.values()), list(notes)


def complete_seeds(values: dict[tuple[str, int], float], tasks: Sequence[str], seeds: Sequence[int]) -> list[float]:
    """Mean over the tasks, for every seed that has all of them: a mean over some tasks compares with nothing.

    >>> complete_seeds({("a", 0): 1.0, ("b", 0): 2.0, ("a", 1): 5.0}, ["a", "b"], [0, 1])
    [1.5]
    """
    complete = [seed for seed in seeds if tasks and all((task, seed) in values for task in tasks)]
    return [fmean(values[task, seed] for task in tasks) for seed in complete]


def each_task(results: Results) -> list[TableSection]:
    """AUROC of every method on every task, mean over the seeds that are there."""
    sections: list[TableSection] = []
    for name, tasks in results.sets().items():
        values, seeds, rows = results.values(name, "auroc"), results.plan.seeds, list[list[str]]()
        for label in results.plan.labels:
            means = [complete_seeds(values[label], [task], seeds) for task in tasks]
            rows.append([label, *(spread(mean, percent) + FEWER * (0 < len(mean) < len(seeds)) for mean in means)])
        sections.append(TableSection(f"AUROC of each task, {name}", ["method", *map(brief, tasks)], rows))
    return sections


def brief(task: str) -> str:
    """The part of a task's name that tells it from the others of its family.

    >>> brief("uci/yacht/extrapolation"), brief("moons")
    ('yacht', 'moons')
    """
    parts = task.split("/")
    return parts[1] if len(parts) > 2 else parts[-1]


def spread(means: Sequence[float], show: Callable[[float], str]) -> str:
    """Mean ± standard deviation; the mean alone when there is one, a dash when there is none.

    >>> spread([0.5, 0.7], percent), spread([0.5], percent), spread([], percent)
    ('60.0 ± 10.0', '50.0', '–')
    """
    finite = [mean for mean in means if math.isfinite(mean)]
    if not finite:
        return NOTHING
    return show(fmean(finite)) + (f" ± {show(pstdev(finite))}" if len(finite) > 1 else "")


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table: names on the left, numbers on the right.

    >>> print(table(["method", "AUROC"], [["Nearest row", "94.7"]]))
    | method | AUROC |
    |---|--:|
    | Nearest row | 94.7 |
    """
    rule = "|---|" + "--:|" * (len(header) - 1)
    lines = [f"| {' | '.join(header)} |", rule, *(f"| {' | '.join(row)} |" for row in rows)]
    return "\n".join(lines)
