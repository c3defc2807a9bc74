"""Records of image classifiers as Markdown: AUROC on near, far and open-set images, ranks among methods, accuracy and seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean

from offmap_bench.runner.plan import Plan
from offmap_bench.runner.store import Record
from offmap_bench.runner.table import FEWER, NOTHING, SHOW, Results, missing, ood_sets, page, spread, table, words
from offmap_bench.tasks.images import SETTINGS

NEAR, FAR, OPEN = "near", "far", "open set"
percent = SHOW["percent"]


def kind_of(task: str, name: str) -> str:
    """Return whether an OOD set is near or far, or holds classes that were not shown.

    >>> kind_of("images/mnist", "fashion"), kind_of("images/mnist/few", "cifar10"), kind_of("images/mnist/open", "any")
    ('near', 'far', 'open set')
    """
    parts = task.split("/")
    return OPEN if "open" in parts else NEAR if name in SETTINGS[parts[1]].near else FAR


@dataclass(frozen=True)
class Board:
    """All numbers of a plan."""

    results: Results

    @cached_property
    def records(self) -> dict[tuple[str, str], list[Record]]:
        """The records of every seed, by (label, task), of those that have any."""
        records: dict[tuple[str, str], list[Record]] = {}
        for cell, record in self.results.ok:
            records.setdefault((cell.label, cell.task), []).append(record)
        return {(label, t): records[label, t] for label in self.labels for t in self.results.plan.tasks if (label, t) in records}

    @property
    def labels(self) -> list[str]:
        """The methods in the order of the plan."""
        return self.results.plan.labels

    def aurocs(self, label: str, task: str) -> dict[str, list[float]]:
        """Return the AUROC of every set, one number for each seed."""
        records = self.records[label, task]
        return {name: [float(record.metrics[name]["auroc"]) for record in records] for name in ood_sets(records[0])}

    def averages(self, kind: str, tasks: Sequence[str]) -> dict[str, float]:
        """Return the mean over the tasks that have such sets, of the methods that ran on all of them."""
        means: dict[tuple[str, str], float] = {}
        for label, task in (key for key in self.records if key[1] in tasks):
            sets = [values for name, values in self.aurocs(label, task).items() if kind_of(task, name) == kind]
            if sets:
                means[label, task] = fmean(fmean(values) for values in zip(*sets, strict=True))
        having = [task for task in tasks if any(t == task for _, t in means)]
        labels = [label for label in self.labels if having and all((label, task) in means for task in having)]
        return {label: fmean(means[label, task] for task in having) for label in labels}

    def mark(self, label: str, tasks: Sequence[str]) -> str:
        """Return a star if some of its seeds are missing."""
        ran = [task for task in tasks if (label, task) in self.records]
        planned = sum(cell.label == label and cell.task in ran for cell in self.results.cells)
        return FEWER * (sum(len(self.records[label, task]) for task in ran) < planned)

    def costs(self, label: str, tasks: Sequence[str]) -> list[str]:
        """Return accuracy and seconds, means over tasks and seeds."""
        records = [record for task in tasks for record in self.records.get((label, task), ())]
        right = [float(r.metrics["test"]["accuracy"]) for r in records if "accuracy" in r.metrics["test"]]
        spent = [[r.seconds[key] for r in records if key in r.seconds] for key in ("fit", "thousand")]
        return [percent(fmean(right)) if right else NOTHING, *(seconds(fmean(s)) if s else NOTHING for s in spent)]


def ranks(values: dict[str, float]) -> dict[str, int]:
    """Return 1 for the highest; equal numbers share the better rank.

    >>> ranks({"a": 0.9, "b": 0.8, "c": 0.9, "d": 0.1})
    {'a': 1, 'b': 3, 'c': 1, 'd': 4}
    """
    return {label: 1 + sum(other > value for other in values.values()) for label, value in values.items()}


def ranks_markdown(results: Results) -> str:
    """Return the page of a plan of image tasks."""
    plan, board = results.plan, Board(results)
    groups: dict[tuple[str, bool], list[str]] = {}
    for task in plan.tasks:
        groups.setdefault((task.split("/")[1], "open" in task.split("/")), []).append(task)
    lead = (
        f"Written by `offmap bench table {words(results)}` from {len(results.ok)} of {len(results.cells)} records: "
        f"{len(plan.tasks)} tasks, {len(plan.labels)} methods. AUROC of OOD images against test images and accuracy are in "
        "per cent, means over seeds; ranks are among the methods of a table, in parentheses."
    )
    sections = [section(board, "All tasks", plan.tasks, (NEAR, FAR, OPEN), costs=False)] if len(groups) > 1 else []
    for (family, is_open), tasks in groups.items():
        title = f"{family}, {'open sets' if is_open else 'near and far'}"
        sections.append(section(board, title, tasks, (OPEN,) if is_open else (NEAR, FAR)))
    sections += [each_set(board, task) for task in plan.tasks if any(t == task for _, t in board.records)]
    return page(plan.name, lead, plan.note, *missing(results), *sections)


def section(board: Board, title: str, tasks: Sequence[str], kinds: Sequence[str], *, costs: bool = True) -> str:
    """Return methods by their mean over the kinds; those without one of the kinds come last."""
    averages = {kind: means for kind in kinds if (means := board.averages(kind, tasks))}
    if not averages:
        return f"## {title}\n\nNo records yet."
    ranked = {kind: ranks(values) for kind, values in averages.items()}
    complete = [label for label in board.labels if all(label in v for v in averages.values())]
    mean = {label: fmean(values[label] for values in averages.values()) for label in complete}
    others = [label for label in board.labels if label not in mean and any(label in v for v in averages.values())]
    rows: list[list[str]] = []
    for label in [*sorted(complete, key=lambda label: -mean[label]), *others]:
        row = [(f"**{label}**" if label == board.labels[0] else label) + board.mark(label, tasks)]
        for kind, values in averages.items():
            row.append(f"{percent(values[label])} ({ranked[kind][label]})" if label in values else NOTHING)
        if len(averages) > 1:
            row.append(percent(mean[label]) if label in mean else NOTHING)
        rows.append(row + (board.costs(label, tasks) if costs else []))
    head = ["method", *averages, *["mean"][: len(averages) - 1]]
    head += ["accuracy", "s to fit", "s for 1,000 images"] if costs else []
    stars = [f"{FEWER} not all seeds."] if any(row[0].endswith(FEWER) for row in rows) else []
    return "\n\n".join([f"## {title}", table(head, rows), *verdict(board.results.plan, mean), *stars])


def seconds(value: float) -> str:
    """Write two digits below ten, whole ones above.

    >>> seconds(0.0478), seconds(151.4)
    ('0.048', '151')
    """
    return f"{value:.2g}" if value < 10 else f"{value:,.0f}"


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


def each_set(board: Board, task: str) -> str:
    """Return the AUROC of every method on every OOD set of a task, with the standard deviation over seeds."""
    numbers = {label: board.aurocs(label, task) for label in board.labels if (label, task) in board.records}
    sets = list(next(iter(numbers.values())))
    mean = {label: fmean(fmean(values) for values in own.values()) for label, own in numbers.items()}
    head = ["method", *(name if kind_of(task, name) == OPEN else f"{name} ({kind_of(task, name)})" for name in sets)]
    rows: list[list[str]] = []
    for label in sorted(numbers, key=lambda label: -mean[label]):
        cells = [label + board.mark(label, [task]), *(spread(numbers[label][name], percent) for name in sets)]
        rows.append([*cells, *[percent(mean[label])][: len(sets) - 1]])
    return "\n\n".join([f"## {task}", table([*head, *["mean"][: len(sets) - 1]], rows), *verdict(board.results.plan, mean)])
