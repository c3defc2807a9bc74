"""Our numbers beside the paper's printed ones: plans/printed/NAME.toml says which of our labels answer to which of its rows."""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any, Literal

from offmap.errors import ConfigError, nearest
from offmap_bench.runner.plan import read_packaged, read_plan
from offmap_bench.runner.store import read_records
from offmap_bench.runner.table import NOTHING, Results, TableSection, Values, complete_seeds, missing, percent, plain, spread

OOD_SETS = "OOD"
"""The part of a record that holds its OOD sets, whatever they are called."""


@dataclass(frozen=True)
class Number:
    """One column of a table: a measure, averaged over the tasks that match, and what was printed for each method, in order.

    `better` is "higher", "lower" or the value that is best; `relative` names the label whose number each is divided by. A printed
    text such as "> 50" is shown and not judged.
    """

    title: str
    tasks: str
    measure: str
    printed: tuple[float | str, ...]
    part: str = OOD_SETS
    better: Literal["higher", "lower"] | float = "higher"
    show: Literal["percent", "plain"] = "percent"
    relative: str | None = None


@dataclass(frozen=True)
class Printed:
    """One printed table: `methods` are pairs of the printed name and our labels that answer to it."""

    title: str
    methods: tuple[tuple[str, tuple[str, ...]], ...]
    numbers: tuple[Number, ...]


@dataclass(frozen=True)
class Sheet:
    """What is compared: printed tables, the plans whose records answer, and a note in Markdown."""

    plans: tuple[str, ...]
    tables: tuple[Printed, ...]
    note: str


def sheet(name: str) -> Sheet:
    """The printed tables that a plan reproduces."""
    texts = read_packaged("plans/printed")
    if name not in texts:
        raise ConfigError(f"Expected a plan with printed numbers to compare with, {nearest(name, texts)}, but got {name!r}.")
    return parse_sheet(texts[name])


def parse_sheet(text: str) -> Sheet:
    """The text of such a file; every number states only what differs from the table's `all`."""
    content = tomllib.loads(text)
    return Sheet(tuple(content["plans"]), tuple(map(_table, content["table"])), content.get("note", "").strip())


def _table(content: dict[str, Any]) -> Printed:
    methods = tuple((name, tuple(labels)) for name, *labels in content["methods"])
    shared: dict[str, Any] = content.get("all", {})
    values: list[dict[str, Any]] = [{**shared, **number, "printed": tuple(number["printed"])} for number in content["numbers"]]
    numbers = tuple(Number(**value) for value in values)
    for number in numbers:
        if len(number.printed) != len(methods):
            count = f"{len(methods)} printed numbers, one for each method, in {number.title!r} of {content['title']!r}"
            raise ConfigError(f"Expected {count}, but got {len(number.printed)}.")
    return Printed(content["title"], methods, numbers)


# ------------------------------------------------------------------------------------------------ comparison

MARKS = {"better": "▲", "alike": "≈", "worse": "▼"}
MARGIN = {"percent": 1.0, "plain": 0.05}
"""Differences up to here, or up to our standard deviation over seeds if that is more, are alike."""

FAR = 5.0
"""Means in per cent that differ by more are listed."""

SHOW = {"percent": percent, "plain": plain}


@dataclass(frozen=True)
class Entry:
    """One cell of a comparison: ours by seed (in shares), what was printed (as printed), and how they differ."""

    ours: tuple[float, ...]
    printed: float | str | None
    number: Number

    @property
    def mean(self) -> float | None:
        """Ours, in the unit of the printed number."""
        return self.factor * fmean(self.ours) if self.ours else None

    @property
    def factor(self) -> float:
        """From our unit to the printed one."""
        return 100.0 if self.number.show == "percent" else 1.0

    @property
    def verdict(self) -> str | None:
        """Better, alike or worse; None where there is nothing to compare."""
        if self.mean is None or not isinstance(self.printed, float | int):
            return None
        margin = max(MARGIN[self.number.show], self.factor * pstdev(self.ours))
        target = self.number.better
        gain = self.mean - self.printed if target == "higher" else self.printed - self.mean
        if isinstance(target, float | int):
            gain = abs(self.printed - target) - abs(self.mean - target)
        return "alike" if abs(gain) <= margin else "better" if gain > 0 else "worse"

    def __str__(self) -> str:
        ours = spread(self.ours, SHOW[self.number.show])
        if self.printed is None:
            return ours
        digits = 1 if self.number.show == "percent" else 2
        theirs = self.printed if isinstance(self.printed, str) else f"{self.printed:.{digits}f}"
        return f"{ours} ({theirs}) {MARKS.get(self.verdict or '', '')}".strip()


@dataclass(frozen=True)
class Row:
    """One of our methods, and the printed one that it answers to."""

    label: str
    name: str
    entries: tuple[Entry, ...]


@dataclass(frozen=True)
class Comparison:
    """One printed table with our rows, those that answer to a printed method first."""

    title: str
    numbers: tuple[Number, ...]
    rows: tuple[Row, ...]

    def verdicts(self) -> Counter[str]:
        """How many cells are better, alike and worse."""
        return Counter(entry.verdict for row in self.rows for entry in row.entries if entry.verdict)


def compare_table(printed: Printed, several: Sequence[Results]) -> Comparison:
    """The table with what the records of several plans say."""
    labels = list(dict.fromkeys(label for results in several for label in results.plan.labels))
    owners = {label: (name, index) for index, (name, answers) in enumerate(printed.methods) for label in answers}
    order = [label for _, answers in printed.methods for label in answers]
    means = {number: [_values(number, results) for results in several] for number in printed.numbers}
    rows = [
        Row(label, *_entries(label, owners.get(label), means))
        for label in [*order, *(label for label in labels if label not in owners)]
    ]
    run = {row.label for row in rows if any(entry.ours for entry in row.entries)}
    first = {answers[0] for _, answers in printed.methods if not run & {*answers}}  # a printed method that nobody answers to yet
    return Comparison(printed.title, printed.numbers, tuple(row for row in rows if row.label in run | first))


Means = Mapping[str, tuple[float, ...]]
"""{label: a mean over tasks for every seed}."""


def _entries(
    label: str, owner: tuple[str, int] | None, by_number: Mapping[Number, Sequence[Means]]
) -> tuple[str, tuple[Entry, ...]]:
    name, index = owner or ("", None)
    entries = [
        # the first plan that has the label answers
        Entry(next((m[label] for m in means if m.get(label)), ()), None if index is None else number.printed[index], number)
        for number, means in by_number.items()
    ]
    return name, tuple(entries)


def _values(number: Number, results: Results) -> Means:
    """The mean over the matching tasks, for every label and every seed that has all of them."""
    tasks = [task for task in results.plan.tasks if fnmatchcase(task, number.tasks)]
    values = measured(results, number)
    values = values if number.relative is None else relative(values, number.relative)
    return {label: tuple(complete_seeds(v, tasks, results.plan.seeds)) for label, v in values.items()}


def measured(results: Results, number: Number) -> Values:
    """One number of every record that has it; that of all OOD sets is their mean."""
    if number.part != OOD_SETS:
        return results.values(number.part, number.measure)
    values: Values = {label: {} for label in results.plan.labels}
    for cell, record in results.ok:
        parts = [record.metrics[name].get(number.measure) for name in record.metrics if name not in ("test", "valid")]
        if parts and None not in parts:
            values[cell.label][cell.task, cell.seed] = fmean(float(part) for part in parts if part is not None)
    return values


def relative(values: Mapping[str, Mapping[tuple[str, int], float]], label: str) -> Values:
    """Every number as a multiple of one label's on the same task with the same seed.

    >>> relative({"a": {("t", 0): 2.0}, "b": {("t", 0): 3.0}}, "a")["b"]
    {('t', 0): 1.5}
    """
    unit = values.get(label, {})
    return {name: {key: v / unit[key] for key, v in numbers.items() if unit.get(key)} for name, numbers in values.items()}


def answers(sheet: Sheet, folder: Path, *, quick: bool = False) -> list[Results]:
    """The results of the plans that answer a sheet; `folder` holds their records."""
    plans = [read_plan(name, quick=quick) for name in sheet.plans]
    return [Results(plan, read_records(folder / f"{plan.name}.jsonl")) for plan in plans]


def comparisons(sheet: Sheet, several: Sequence[Results]) -> list[Comparison]:
    """All tables of a sheet."""
    return [compare_table(printed, several) for printed in sheet.tables]


def compare_markdown(name: str, sheet: Sheet, several: Sequence[Results]) -> str:
    """The page that sets our numbers beside the paper's."""
    made = comparisons(sheet, several)
    total = sum((comparison.verdicts() for comparison in made), Counter[str]())
    parts = [
        f"# {name}, beside the paper",
        f"Written by `offmap bench compare {name}`. Ours (printed): mean ± standard deviation over seeds. {legend()} "
        f"Of {total.total()} printed numbers that we have too, {total['better']} are better here, {total['alike']} alike and "
        f"{total['worse']} worse.",
        *([sheet.note] if sheet.note else []),
        *(part for results in several for part in missing(results)),
        *(section(c).markdown() for c in made),
        *far(made),
    ]
    return "\n\n".join(parts) + "\n"


def legend() -> str:
    """What the marks mean."""
    return (
        f"{MARKS['better']} better, {MARKS['worse']} worse, {MARKS['alike']} alike: within a point, 0.05 where not in per cent, "
        f"or within our standard deviation. {NOTHING}: not run, or not all tasks of it."
    )


def section(comparison: Comparison) -> TableSection:
    """One printed table with our numbers."""
    head = ["here", "in the paper", *(number.title for number in comparison.numbers)]
    return TableSection(comparison.title, head, [[row.label, row.name, *map(str, row.entries)] for row in comparison.rows])


def far(made: Sequence[Comparison]) -> list[str]:
    """Means over several tasks that lie further than 5 points from the printed ones, to be explained."""
    lines = [
        f"- {row.label}, {comparison.title}, {entry.number.title}: {entry.mean:.1f} here, {entry.printed:.1f} printed"
        for comparison in made
        for row in comparison.rows
        for entry in row.entries
        if "*" in entry.number.tasks and entry.number.show == "percent"
        and entry.mean is not None and isinstance(entry.printed, float | int) and abs(entry.mean - entry.printed) > FAR
    ]  # fmt: skip
    return ["\n".join(["## Means more than 5 points from the printed ones", "", *lines])] if lines else []
