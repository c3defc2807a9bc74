"""Records as Markdown: means over tasks and seeds, every task by itself, and a list of what is missing."""

from __future__ import annotations

import math
import re
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from offmap_bench.paths import RECORDS
from offmap_bench.runner.methods import SIZE
from offmap_bench.runner.plan import METHODS, Cell, Plan, cells, read_packaged, read_plan
from offmap_bench.runner.store import Record, Records, read_records
from offmap_bench.tasks.images import SETTINGS

Values = dict[str, dict[tuple[str, int], float]]
"""{label: {(task, seed): value}}, without the numbers that do not exist."""

NOTHING, FEWER = "–", "\\*"
WORD = re.compile(r"\W*[^\W\d]")  # what begins a cell that is no number
SCORE_LEGEND = """\
Scores:

- `paper`: the mixture variance of a regression, or the entropy of a classifier's mean prediction
- `epistemic`: how far the draws disagree
- `distance`: the distance to training rows, in inputs and layers
- `default`: offmap's own, which joins disagreement, distances and, for classifiers, the logits
- own: what the method itself computes"""


def percent(value: float | None) -> str:
    return NOTHING if value is None else f"{100 * value:.1f}"


def format_seconds(value: float) -> str:
    return NOTHING if math.isnan(value) else f"{value:.2g}" if value < 10 else f"{value:,.0f}"


SHOW: dict[str, Callable[[float], str]] = {"percent": percent, "plain": "{:.3f}".format}
DETECTION = (("AUROC", "auroc", "percent"), ("FPR@95", "fpr95", "percent"), ("flagged", "flagged", "percent"))


@dataclass(frozen=True)
class Results:
    """A plan and its records."""

    plan: Plan
    records: Records

    @staticmethod
    def read(name: str, path: Path = RECORDS, *, quick: bool = False) -> Results:
        """Read a plan, and its records from a file of its own, or from the folder of all."""
        plan = read_plan(name, quick=quick)
        return Results(plan, read_records(path if path.suffix == ".jsonl" else path / f"{plan.name}.jsonl"))

    @cached_property
    def cells(self) -> list[Cell]:
        return cells(self.plan)

    @cached_property
    def states(self) -> dict[str, str]:
        return {cell.hash: self.records.state(cell) for cell in self.cells}

    @cached_property
    def ok(self) -> list[tuple[Cell, Record]]:
        return [(cell, self.records.records[cell.hash]) for cell in self.cells if self.states[cell.hash] == "ok"]

    def sets(self) -> dict[str, list[str]]:
        """Return the OOD sets, each with the tasks that have it; a task without any record has the set that its name says."""
        done = {task: set[str]() for task in self.plan.tasks}
        for cell, record in self.ok:
            done[cell.task] |= ood_sets(record).keys()
        names = dict.fromkeys(name for task in self.plan.tasks for name in sorted(done[task]))
        return {name: [t for t in self.plan.tasks if name in (done[t] or {t.rpartition("/")[2]})] for name in names}

    def absent(self, part: str, measure: str, tasks: Sequence[str]) -> list[str]:
        """Return the tasks for which a number does not exist, whatever the method: it is null in all records that have it."""
        has: dict[str, set[bool]] = {}
        for cell, record in self.ok:
            if measure in (metrics := record.metrics.get(part, {})):
                has.setdefault(cell.task, set()).add(metrics[measure] is not None)
        return [task for task in tasks if has.get(task) == {False}]

    def values(self, part: str, measure: str) -> Values:
        """Return one number of every record that has it: of a set, of what was "chosen", or the mean over its "OOD" sets."""
        values: Values = {label: {} for label in self.plan.labels}
        for cell, record in self.ok:
            one = {**record.metrics, "chosen": record.chosen}.get(part, {})
            parts = list(ood_sets(record).values()) if part == "OOD" else [one]
            numbers = [number for each in parts if isinstance(number := each.get(measure), int | float)]
            if numbers and len(numbers) == len(parts):
                values[cell.label][cell.task, cell.seed] = fmean(numbers) if part == "OOD" else numbers[0]
        return values

    def by_task(self, part: str, measure: str) -> dict[tuple[str, str], list[float]]:
        """Return the same by (label, task), a number for each seed."""
        numbers: dict[tuple[str, str], list[float]] = {}
        for label, by_cell in self.values(part, measure).items():
            for (task, _), value in by_cell.items():
                numbers.setdefault((label, task), []).append(value)
        return numbers

    def means(self, part: str, measure: str) -> dict[tuple[str, str], float]:
        """Return means over seeds."""
        return {key: fmean(numbers) for key, numbers in self.by_task(part, measure).items()}

    @cached_property
    def records_of(self) -> dict[tuple[str, str], list[Record]]:
        """The records of every seed, by (label, task)."""
        records: dict[tuple[str, str], list[Record]] = {}
        for cell, record in self.ok:
            records.setdefault((cell.label, cell.task), []).append(record)
        return records


def ood_sets(record: Record) -> dict[str, dict[str, Any]]:
    """Return the metrics of a record on its OOD sets."""
    return {name: metrics for name, metrics in record.metrics.items() if name not in ("test", "valid")}


@dataclass(frozen=True)
class TableSection:
    """A table with its title, a text above it and notes below."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    text: str = ""
    notes: Sequence[str] = ()

    def markdown(self) -> str:
        return "\n\n".join([f"## {self.title}", *[self.text][: bool(self.text)], format_table(self.head, self.rows), *self.notes])


def markdown(results: Results) -> str:
    lead = f"Written by `offmap bench table {words(results)}` from {describe(results)}"
    sections = [section.markdown() for section in (*detection(results), *quality(results), *each_task(results))]
    return page(results.plan.title, lead, SCORE_LEGEND, results.plan.note, *list_missing(results), *sections)


def page(title: str, *parts: str) -> str:
    """Return a Markdown page of the parts that are not empty."""
    return "\n\n".join([f"# {title}", *filter(None, parts)]) + "\n"


def words(results: Results) -> str:
    name = results.plan.name
    return name.removesuffix("-quick") + " --quick" * name.endswith("-quick")


def describe(results: Results) -> str:
    """Return what the numbers of a page are made of."""
    plan = results.plan
    task, seed = "task" + "s" * (len(plan.tasks) > 1), "seed" + "s" * (len(plan.seeds) > 1)
    return (
        f"{len(results.ok)} of {len(results.cells)} records: {len(plan.tasks)} {task}, {len(plan.labels)} methods, {seed} "
        f"{', '.join(map(str, plan.seeds))}. Numbers are means over tasks ± sample standard deviation over seeds, in per cent "
        "but for NLL, RMSE and width, which are in units of the training targets' standard deviation. ×1 is the mean over the "
        f"nets, each alone; ×5 all of them together.{describe_code(results)}"
    )


def describe_code(results: Results) -> str:
    """Return how many versions of the code made the records."""
    codes = Counter(results.records.code(cell) for cell, _ in results.ok)
    known = ", ".join(f"{count} records of {code}" for code, count in codes.items() if code)
    unnamed = f"; {codes['']} from before records named it" if codes[""] else ""
    return f" Versions of the code: {known}{unnamed}." if known else ""


def list_missing(results: Results) -> list[str]:
    """Return what is not in the tables, by state; labels that lack the same cells in one line. Nothing when all is there."""
    lines: list[str] = []
    for state, words in (
        ("missing", "not run yet"), ("failed", "failed"), ("stale", "made with other defaults, to be run again"),
        ("damaged", "in damaged lines"),
    ):  # fmt: skip
        by_label: dict[str, list[str]] = {}
        for cell in (cell for cell in results.cells if results.states[cell.hash] == state):
            record = results.records.records.get(cell.hash)
            reason = f": {record.reason}" if record and record.reason else ""
            by_label.setdefault(cell.label, []).append(f"{cell.task} (seed {cell.seed}){reason}")
        if by_label:
            lines += [f"**{sum(map(len, by_label.values()))} of {len(results.cells)} cells {words}:**", ""]
        for names in dict.fromkeys(map(tuple, by_label.values())):
            labels = [label for label, cells in by_label.items() if tuple(cells) == names]
            shown = "; ".join(names[:3]) + (f"; and {len(names) - 3} more" if len(names) > 3 else "")
            lines.append(f"- {', '.join(labels)}, {len(names)}{' each' * (len(labels) > 1)}: {shown}")
        lines += [""] if by_label else []
    if results.records.damaged:
        lines.append("Damaged lines: " + ", ".join(results.records.damaged))
    return ["\n".join(lines).strip()] if lines else []


def detection(results: Results) -> list[TableSection]:
    return [summary(results, f"Detection, {name}", name, tasks, DETECTION) for name, tasks in results.sets().items()]


def quality(results: Results) -> list[TableSection]:
    """Return predictions on in-distribution data, mean over all tasks, without the rows and columns that hold nothing."""
    sections: list[TableSection] = []
    for spec in tomllib.loads(read_packaged("templates")["tables"])["table"]:
        section = summary(results, spec["title"], "test", results.plan.tasks, spec["columns"], spec["text"])
        rows = [row for row in section.rows if set(row[1:]) != {NOTHING}]
        shown = [0, *(i for i in range(1, len(section.head)) if any(row[i] != NOTHING for row in rows))]
        if shown[1:2] == [1]:
            head, *rows = ([row[i] for i in shown] for row in (section.head, *rows))
            sections.append(TableSection(section.title, head, rows, section.text, section.notes))
    return sections


def summary(
    results: Results, title: str, part: str, tasks: Sequence[str], columns: Sequence[Sequence[str]], text: str = ""
) -> TableSection:
    """Return a row per method; and notes on the numbers that stand for fewer tasks or seeds than planned."""
    ranked = part != "test"  # by a score
    rows = {label: [label, *[score][:ranked]] for label, score in results.plan.scores.items()}
    notes: dict[str, None] = {}
    for name, measure, show, *source in columns:
        source = source[0] if source else part
        values, absent = results.values(source, measure), results.absent(source, measure, tasks)
        present = [task for task in tasks if task not in absent]
        if absent:
            notes[f"{name}: {len(present)} of {len(tasks)} tasks; it does not exist for {', '.join(absent)}."] = None
        for label in results.plan.labels:
            rows[label].append(entry(values[label], present, results.plan.seeds, show))
            if FEWER in rows[label][-1]:
                notes[f"{FEWER} not all seeds: only those with every task count."] = None
    if any(NOTHING in row[1 + ranked :] for row in rows.values()):
        notes[f"{NOTHING}: no seed with every task, or a number that the method does not give."] = None
    head = ["method", *["score"][:ranked], *(column[0] for column in columns)]
    return TableSection(title, head, list(rows.values()), text, list(notes))


def entry(values: Mapping[tuple[str, int], float], tasks: Sequence[str], seeds: Sequence[int], show: str = "percent") -> str:
    """Return the mean over tasks ± the standard deviation over seeds, marked if there are fewer seeds than planned."""
    means = complete_seeds(values, tasks, seeds)
    return spread(means, SHOW[show]) + FEWER * (0 < len(means) < len(seeds))


def complete_seeds(values: Mapping[tuple[str, int], float], tasks: Sequence[str], seeds: Sequence[int]) -> list[float]:
    """Return the mean over the tasks, for every seed that has all of them: a mean over some tasks compares with nothing.

    >>> complete_seeds({("a", 0): 1.0, ("b", 0): 2.0, ("a", 1): 5.0}, ["a", "b"], [0, 1])
    [1.5]
    """
    complete = [seed for seed in seeds if tasks and all((task, seed) in values for task in tasks)]
    return [fmean(values[task, seed] for task in tasks) for seed in complete]


def each_task(results: Results) -> list[TableSection]:
    """Return the AUROC of every method on every task, mean over the seeds that are there."""
    sections: list[TableSection] = []
    for name, tasks in results.sets().items():
        values, parts = results.values(name, "auroc"), [task.split("/") for task in tasks]
        rows = [
            [label, score, *(entry(values[label], [t], results.plan.seeds) for t in tasks)]
            for label, score in results.plan.scores.items()
        ]
        # what tells tasks of a family apart
        head = ["method", "score", *(part[1] if len(part) > 2 else part[-1] for part in parts)]
        sections.append(TableSection(f"AUROC of each task, {name}", head, rows))
    return sections


def spread(means: Sequence[float], show: Callable[[float], str]) -> str:
    """Return mean ± sample standard deviation (n − 1); the mean alone when there is one, a dash when there is none.

    >>> spread([0.5, 0.7], percent), spread([0.5], SHOW["plain"]), spread([], SHOW["plain"])
    ('60.0 ± 14.1', '0.500', '–')
    """
    finite = [mean for mean in means if math.isfinite(mean)]
    if not finite:
        return NOTHING
    return show(fmean(finite)) + (f" ± {show(stdev(finite))}" if len(finite) > 1 else "")


def format_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table: numbers on the right, and on the left the first column and every other that holds words.

    >>> print(format_table(["method", "AUROC", "score"], [["Nearest row", "**94.7**", "own"]]))
    | method | AUROC | score |
    |---|--:|---|
    | Nearest row | **94.7** | own |
    """
    rows = list(rows)
    rule = ["---" if place == 0 or any(WORD.match(row[place]) for row in rows) else "--:" for place in range(len(header))]
    return "\n".join([f"| {' | '.join(header)} |", f"|{'|'.join(rule)}|", *(f"| {' | '.join(row)} |" for row in rows)])


def methods_markdown() -> str:
    """Tabulate the methods that a plan may name."""
    rows = [
        [
            f"`{name}`", f"`{method.score}`" if method.score != "own" else "own", "" if method.scores_only else f"1, {SIZE}",
            "yes" if method.from_models else "", ", ".join(f"`{key}`" for key in sorted(method.keys)),
        ]
        for name, method in METHODS.items() if ":" not in name
    ]  # fmt: skip
    return format_table(["`name`", "score", "`members`", "`from`", "keys of `config` and `grid`"], rows)


# ------------------------------------------------------------------------------------------------ image classifiers

NEAR, FAR, OPEN = "near", "far", "open set"


def kind_of(task: str, name: str) -> str:
    """Return whether an OOD set is near or far, or holds classes that were not shown.

    >>> kind_of("images/mnist", "fashion"), kind_of("images/mnist/few", "cifar10"), kind_of("images/mnist/open", "any")
    ('near', 'far', 'open set')
    """
    parts = task.split("/")
    return OPEN if "open" in parts else NEAR if name in SETTINGS[parts[1]].near else FAR


def aurocs_of(results: Results, label: str, task: str) -> dict[str, list[float]]:
    """Return the AUROC of every set, one number for each seed."""
    records = results.records_of[label, task]
    return {name: [float(record.metrics[name]["auroc"]) for record in records] for name in ood_sets(records[0])}


def average(results: Results, kind: str, tasks: Sequence[str]) -> dict[str, float]:
    """Return the mean over the tasks that have such sets, of the methods that ran on all of them."""
    means: dict[tuple[str, str], float] = {}
    for label, task in (key for key in results.records_of if key[1] in tasks):
        sets = [values for name, values in aurocs_of(results, label, task).items() if kind_of(task, name) == kind]
        if sets:
            means[label, task] = fmean(fmean(values) for values in zip(*sets, strict=True))
    having = [task for task in tasks if any(t == task for _, t in means)]
    labels = [label for label in results.plan.labels if having and all((label, task) in means for task in having)]
    return {label: fmean(means[label, task] for task in having) for label in labels}


def mark_of(results: Results, label: str, tasks: Sequence[str]) -> str:
    """Return a star where some seeds of a task are missing."""
    ran = [task for task in tasks if (label, task) in results.records_of]
    planned = sum(cell.label == label and cell.task in ran for cell in results.cells)
    return FEWER * (sum(len(results.records_of[label, task]) for task in ran) < planned)


def costs_of(results: Results, label: str, tasks: Sequence[str]) -> list[str]:
    """Return accuracy, seconds of a fit, and seconds for a thousand rows."""
    records = [record for task in tasks for record in results.records_of.get((label, task), ())]
    right = [float(r.metrics["test"]["accuracy"]) for r in records if "accuracy" in r.metrics["test"]]
    spent = [[r.seconds[key] for r in records if key in r.seconds] for key in ("fit", "thousand")]
    return [percent(fmean(right) if right else None), *(format_seconds(fmean(s) if s else math.nan) for s in spent)]


def ranks_markdown(results: Results) -> str:
    plan = results.plan
    groups: dict[tuple[str, bool], list[str]] = {}
    for task in plan.tasks:
        groups.setdefault((task.split("/")[1], "open" in task.split("/")), []).append(task)
    lead = (
        f"Written by `offmap bench table {words(results)}` from {len(results.ok)} of {len(results.cells)} records: "
        f"{len(plan.tasks)} tasks, {len(plan.labels)} methods. AUROC of OOD images against test images and accuracy are in "
        f"per cent, means over seeds; ranks are among the methods of a table, in parentheses."
    )
    sections = [section(results, "All tasks", plan.tasks, (NEAR, FAR, OPEN), costs=False)] if len(groups) > 1 else []
    for (family, is_open), tasks in groups.items():
        title = f"{family}, {'open sets' if is_open else 'near and far'}"
        sections.append(section(results, title, tasks, (OPEN,) if is_open else (NEAR, FAR)))
    sections += [each_set(results, task) for task in plan.tasks if any(t == task for _, t in results.records_of)]
    return page(plan.title, lead, SCORE_LEGEND, plan.note, *list_missing(results), *sections)


def section(results: Results, title: str, tasks: Sequence[str], kinds: Sequence[str], *, costs: bool = True) -> str:
    """Return methods by their mean over the kinds; those without one of the kinds come last."""
    averages = {kind: means for kind in kinds if (means := average(results, kind, tasks))}
    if not averages:
        return f"## {title}\n\nNo records yet."
    complete = [label for label in results.plan.labels if all(label in v for v in averages.values())]
    mean = {label: fmean(values[label] for values in averages.values()) for label in complete}
    others = [label for label in results.plan.labels if label not in mean and any(label in v for v in averages.values())]
    rows: list[list[str]] = []
    for label in [*sorted(complete, key=lambda label: -mean[label]), *others]:
        name = (f"**{label}**" if label == results.plan.labels[0] else label) + mark_of(results, label, tasks)
        row = [name, results.plan.scores[label]]
        for values in averages.values():
            rank = 1 + sum(value > values.get(label, 0.0) for value in values.values())  # equal numbers share the better one
            row.append(f"{percent(values[label])} ({rank})" if label in values else NOTHING)
        if len(averages) > 1:
            row.append(percent(mean.get(label)))
        rows.append(row + (costs_of(results, label, tasks) if costs else []))
    head = ["method", "score", *averages, *["mean"][: len(averages) - 1]]
    head += ["accuracy", "s to fit", "s for 1,000 images"] if costs else []
    stars = [f"{FEWER} not all seeds."] if any(row[0].endswith(FEWER) for row in rows) else []
    return TableSection(title, head, rows, notes=[*verdict(results.plan, mean), *stars]).markdown()


def verdict(plan: Plan, mean: dict[str, float]) -> list[str]:
    """Return how far the first method is from the best detector of the same net, from all others, and from the plain entropy."""
    ours, parts = plan.labels[0], list[str]()
    singles = {e.label for e in plan.entries if e.name == "detector"}
    baselines = {e.label for e in plan.entries if e.name != "image_guard"}
    for name, among in (("the best detector, ", singles), ("the best of all others, ", baselines), ("", {"Entropy"})):
        others = {label: value for label, value in mean.items() if label in among}
        if ours in mean and others:
            best = max(others, key=lambda label: others[label])
            parts.append(f"{100 * (mean[ours] - mean[best]):+.1f} against {name}{best}")
    return [f"Mean of {ours}: {'; '.join(parts)}."] if parts else []


def each_set(results: Results, task: str) -> str:
    """Return the AUROC of every method on every OOD set of a task, with the standard deviation over seeds."""
    numbers = {label: aurocs_of(results, label, task) for label in results.plan.labels if (label, task) in results.records_of}
    sets = list(next(iter(numbers.values())))
    mean = {label: fmean(fmean(values) for values in by_set.values()) for label, by_set in numbers.items()}
    head = ["method", "score", *(name if kind_of(task, name) == OPEN else f"{name} ({kind_of(task, name)})" for name in sets)]
    rows: list[list[str]] = []
    for label in sorted(numbers, key=lambda label: -mean[label]):
        name_of = label + mark_of(results, label, [task])
        cells = [name_of, results.plan.scores[label], *(spread(numbers[label][name], percent) for name in sets)]
        rows.append([*cells, *[percent(mean[label])][: len(sets) - 1]])
    return TableSection(task, [*head, *["mean"][: len(sets) - 1]], rows, notes=verdict(results.plan, mean)).markdown()
