"""Our numbers beside the paper's printed ones: plans/printed/NAME.toml says which of our labels answer to which of its rows."""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from statistics import fmean, stdev
from typing import Any, Literal

from offmap.errors import ConfigError
from offmap_bench.runner.plan import read_packaged
from offmap_bench.runner.table import (
    NOTHING,
    SCORE_LEGEND,
    SHOW,
    Results,
    TableSection,
    complete_seeds,
    list_missing,
    page,
    spread,
)
from offmap_bench.tasks.task import check_name

MARKS = {"better": "▲", "alike": "≈", "worse": "▼"}
LEGEND = (
    f"{MARKS['better']} better, {MARKS['worse']} worse, {MARKS['alike']} alike: within a point, 0.05 where not in per cent, "
    f"or within our standard deviation. {NOTHING}: not run, or not all tasks of it."
)
FAR = 5.0  # means in per cent that differ by more are listed


@dataclass(frozen=True)
class Number:
    """One column of a table: a measure, averaged over the tasks that match, and what was printed for each method, in order."""

    title: str
    tasks: str
    measure: str
    printed: tuple[float | str, ...]  # a text such as "> 50" is shown and not judged
    part: str = "OOD"
    better: Literal["higher", "lower"] | float = "higher"  # or the value that is best
    show: Literal["percent", "plain"] = "percent"
    relative: str | None = None  # the label whose number each is divided by


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
        return 100.0 if self.number.show == "percent" else 1.0

    @property
    def gap(self) -> float | None:
        """Ours less the printed number; None where there is nothing to compare."""
        return None if self.mean is None or not isinstance(self.printed, float | int) else self.mean - self.printed

    @property
    def verdict(self) -> str | None:
        """Better, alike or worse; alike up to a point, or up to our standard deviation over seeds if that is more."""
        if self.gap is None or self.mean is None:
            return None
        deviation = stdev(self.ours) if len(self.ours) > 1 else 0.0
        best, margin = self.number.better, max(1.0 if self.number.show == "percent" else 0.05, self.factor * deviation)
        gain = self.gap if best == "higher" else -self.gap
        if isinstance(best, float | int):
            gain = abs(self.mean - self.gap - best) - abs(self.mean - best)
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
    """What one plan has of a label, the printed name that it answers to, and the gradient steps of its fits."""

    label: str
    printed: str
    score: str
    plan: str
    steps: str
    entries: tuple[Entry, ...]


def sheet(name: str) -> Sheet:
    texts = read_packaged("plans/printed")
    return parse_sheet(texts[check_name("a plan with printed numbers to compare with,", name, texts)])


def parse_sheet(text: str) -> Sheet:
    """Read the text of such a file; every number states only what differs from the table's `all`."""
    content = tomllib.loads(text)
    return Sheet(tuple(content["plans"]), tuple(map(_read_table, content["table"])), content.get("note", "").strip())


def _read_table(content: dict[str, Any]) -> Printed:
    title, methods = content["title"], tuple((name, tuple(labels)) for name, *labels in content["methods"])
    values = [content.get("all", {}) | number | {"printed": tuple(number["printed"])} for number in content["numbers"]]
    for number in (numbers := tuple(Number(**value) for value in values)):
        if len(number.printed) != len(methods):
            words = f"{len(methods)} printed numbers, one for each method, in {number.title!r} of {title!r}"
            raise ConfigError(f"Expected {words}, but got {len(number.printed)}.")
    return Printed(title, methods, numbers)


def compare_table(printed: Printed, several: Sequence[Results]) -> list[Row]:
    """Set what the records of several plans say beside a printed table, a row of each; labels that answer come first."""
    owners = {label: (name, index) for index, (name, answers) in enumerate(printed.methods) for label in answers}
    labels = dict.fromkeys([*owners, *(label for results in several for label in results.plan.labels)])
    means = [(results, [means_of(number, results) for number in printed.numbers]) for results in several]
    run = {label for _, numbers in means for by_label in numbers for label, values in by_label.items() if values}
    rows: list[Row] = []
    for label in labels:
        name, index = owners.get(label, ("", None))
        theirs = [None if index is None else number.printed[index] for number in printed.numbers]
        for results, numbers in means:
            ours = [by_label.get(label, ()) for by_label in numbers]
            if any(ours):
                entries = tuple(map(Entry, ours, theirs, printed.numbers))
                steps = format_steps([record.steps for cell, record in results.ok if cell.label == label])
                rows.append(Row(label, name, results.plan.scores[label], results.plan.name, steps, entries))
        if index is not None and label == printed.methods[index][1][0] and not run & {*printed.methods[index][1]}:
            nobody = tuple(Entry((), value, number) for value, number in zip(theirs, printed.numbers, strict=True))
            rows.append(Row(label, name, "", "", "", nobody))
    return rows


def format_steps(steps: Sequence[int]) -> str:
    """Return the gradient steps of some fits; nothing if there were none.

    >>> format_steps([3000, 3000]), format_steps([400, 500]), format_steps([0])
    ('3,000', '≤ 500', '')
    """
    words = "≤ " * (len(set(steps)) > 1)
    return f"{words}{max(steps):,}" if max(steps) else ""


def compare_all(sheet: Sheet, several: Sequence[Results]) -> tuple[list[TableSection], list[Entry], str]:
    """Return all tables as text, their entries, and means over several tasks that lie further than 5 points from the printed.

    Of several rows of one label, the first that has a number counts.
    """
    sections, everything, far = list[TableSection](), list[Entry](), list[str]()
    many = len(several) > 1
    for printed in sheet.tables:
        rows, counted = compare_table(printed, several), set[tuple[str, str]]()
        head = ["here", "in the paper", "score", *["plan"][:many], "steps", *(number.title for number in printed.numbers)]
        cells = [[r.label, r.printed, r.score, *[r.plan][:many], r.steps, *map(str, r.entries)] for r in rows]
        sections.append(TableSection(printed.title, head, cells))
        for row in rows:
            ours = [entry for entry in row.entries if entry.ours and (row.label, entry.number.title) not in counted]
            counted |= {(row.label, entry.number.title) for entry in ours}
            everything += ours
            for entry in (e for e in ours if "*" in e.number.tasks and e.number.show == "percent"):
                if entry.gap is not None and abs(entry.gap) > FAR:
                    words = (
                        f"{entry.mean:.1f} here ({', '.join(filter(None, [row.plan, row.steps]))}), {entry.printed:.1f} printed"
                    )
                    far.append(f"- {row.label}, {printed.title}, {entry.number.title}: {words}")
    title = "## Means more than 5 points from the printed ones"
    return sections, everything, "\n".join([title, "", *far]) if far else ""


def means_of(number: Number, results: Results) -> dict[str, tuple[float, ...]]:
    """Return the mean over the matching tasks, for every label and every seed that has all of them."""
    tasks = [task for task in results.plan.tasks if fnmatchcase(task, number.tasks)]
    values = results.values(number.part, number.measure)
    if number.relative is not None:  # a multiple of one label's number on the same task with the same seed
        unit = values.get(number.relative, {})
        values = {label: {key: v / unit[key] for key, v in by_cell.items() if unit.get(key)} for label, by_cell in values.items()}
    return {label: tuple(complete_seeds(by_cell, tasks, results.plan.seeds)) for label, by_cell in values.items()}


def compare_markdown(name: str, sheet: Sheet, several: Sequence[Results], title: str | None = None) -> str:
    """Return the page of a comparison, under the title of its plan; by default its name."""
    sections, entries, far = compare_all(sheet, several)
    total = Counter(entry.verdict for entry in entries if entry.verdict)
    lead = (
        f"Written by `offmap bench compare {name}`. Ours (printed): mean ± sample standard deviation over seeds. {LEGEND} "
        f"Of {total.total()} printed numbers that we have too, {total['better']} are better here, {total['alike']} alike and "
        f"{total['worse']} worse{'; the first row of a label that has a number counts' * (len(several) > 1)}."
    )
    lacking = [part for results in several for part in list_missing(results)]
    parts = (section.markdown() for section in sections)
    return page(f"{title or name}, beside the paper", lead, SCORE_LEGEND, sheet.note, *lacking, *parts, far)
