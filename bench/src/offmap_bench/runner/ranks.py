"""Records of image classifiers as Markdown: AUROC on near, far and open-set images, ranks among methods, accuracy and seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean, pstdev

from offmap_bench.runner.plan import Plan
from offmap_bench.runner.store import Records
from offmap_bench.runner.table import FEWER, NOTHING, Results, missing, percent, table, words
from offmap_bench.tasks.images import SETTINGS

NEAR, FAR, OPEN = "near", "far", "open set"
Numbers = dict[str, float]


@dataclass(frozen=True)
class TaskNumbers:
    """The records of one method on one task: AUROC of every set, accuracy, and seconds, one number for each seed."""

    sets: dict[str, list[float]]
    accuracy: list[float]
    seconds: dict[str, list[float]]
    complete: bool

    def of(self, kind: str, task: str) -> list[float]:
        """Mean AUROC of the sets of a kind, for every seed."""
        sets = [values for name, values in self.sets.items() if kind_of(task, name) == kind]
        return [fmean(values) for values in zip(*sets, strict=True)]


def kind_of(task: str, name: str) -> str:
    """Whether an OOD set is near or far, or holds classes that were not shown.

    >>> kind_of("images/mnist", "fashion"), kind_of("images/mnist/few", "cifar10"), kind_of("images/mnist/open", "any")
    ('near', 'far', 'open set')
    """
    parts = task.split("/")
    if "open" in parts:
        return OPEN
    return NEAR if name in SETTINGS[parts[1]].near else FAR


@dataclass(frozen=True)
class Board:
    """All numbers of a plan."""

    results: Results

    @cached_property
    def numbers(self) -> dict[tuple[str, str], TaskNumbers]:
        """By (label, task)."""
        numbers: dict[tuple[str, str], TaskNumbers] = {}
        for label in self.results.plan.labels:
            for task in self.results.plan.tasks:
                records = [r for c, r in self.results.ok if (c.label, c.task) == (label, task)]
                planned = sum((c.label, c.task) == (label, task) for c in self.results.cells)
                if records:
                    sets = [name for name in records[0].metrics if name not in ("test", "valid")]
                    numbers[label, task] = TaskNumbers(
                        {name: [float(r.metrics[name]["auroc"]) for r in records] for name in sets},
                        [float(r.metrics["test"]["accuracy"]) for r in records if "accuracy" in r.metrics["test"]],
                        {key: [r.seconds[key] for r in records if key in r.seconds] for key in ("fit", "thousand")},
                        len(records) == planned,
                    )
        return numbers

    def averages(self, kind: str, tasks: Sequence[str]) -> Numbers:
        """Mean over the tasks that have such sets, of the methods that ran on all of them."""
        having = [task for task in tasks if any(s.of(kind, task) for (_, t), s in self.numbers.items() if t == task)]
        labels = [label for label in self.results.plan.labels if all((label, task) in self.numbers for task in having)]
        return {label: fmean(fmean(self.numbers[label, t].of(kind, t)) for t in having) for label in labels} if having else {}

    def fewer(self, label: str, tasks: Sequence[str]) -> bool:
        """Whether some of its seeds are missing."""
        return any(not self.numbers[label, task].complete for task in tasks if (label, task) in self.numbers)


def ranks(values: Mapping[str, float]) -> dict[str, int]:
    """1 for the highest; equal numbers share the better rank.

    >>> ranks({"a": 0.9, "b": 0.8, "c": 0.9, "d": 0.1})
    {'a': 1, 'b': 3, 'c': 1, 'd': 4}
    """
    return {label: 1 + sum(other > value for other in values.values()) for label, value in values.items()}


def ranks_markdown(plan: Plan, records: Records) -> str:
    """The page of a plan of image tasks."""
    results = Results(plan, records)
    board = Board(results)
    open_or_not = {(t.split("/")[1], "open" in t.split("/")): None for t in plan.tasks}
    groups = {key: [t for t in plan.tasks if (t.split("/")[1], "open" in t.split("/")) == key] for key in open_or_not}
    parts = [
        f"# {plan.name}",
        f"Written by `offmap bench table {words(results)}` from {len(results.ok)} of {len(results.cells)} records: "
        f"{len(plan.tasks)} tasks, {len(plan.labels)} methods. AUROC of OOD images against test images and accuracy are in "
        "per cent, means over seeds; ranks are among the methods of a table, in parentheses.",
        *([plan.note] if plan.note else []),
        *missing(results),
        *([section(board, "All tasks", plan.tasks, (NEAR, FAR, OPEN), costs=False)] if len(groups) > 1 else []),
        *(
            section(board, f"{family}, {'open sets' if shown else 'near and far'}", tasks, (OPEN,) if shown else (NEAR, FAR))
            for (family, shown), tasks in groups.items()
        ),
        *(each_set(board, task) for task in plan.tasks if any(t == task for _, t in board.numbers)),
    ]
    return "\n\n".join(parts) + "\n"


def section(board: Board, title: str, tasks: Sequence[str], kinds: Sequence[str], *, costs: bool = True) -> str:
    """Methods by their mean over the kinds; those without one of the kinds come last."""
    averages = {kind: means for kind in kinds if (means := board.averages(kind, tasks))}
    ranked = {kind: ranks(values) for kind, values in averages.items()}
    labels = {label for values in averages.values() for label in values}
    complete = [label for label in board.results.plan.labels if averages and all(label in v for v in averages.values())]
    mean = {label: fmean(values[label] for values in averages.values()) for label in complete}
    order = [
        *sorted(complete, key=lambda label: -mean[label]),
        *(la for la in board.results.plan.labels if la in labels - set(complete)),
    ]
    rows: list[list[str]] = []
    for label in order:
        row = [f"**{label}**" if label == board.results.plan.labels[0] else label]
        row[0] += FEWER * board.fewer(label, tasks)
        for kind, values in averages.items():
            row.append(f"{percent(values[label])} ({ranked[kind][label]})" if label in values else NOTHING)
        if len(averages) > 1:
            row.append(percent(mean[label]) if label in mean else NOTHING)
        rows.append(row + (spent(board, label, tasks) if costs else []))
    head = [
        "method",
        *averages,
        *["mean"][: len(averages) - 1],
        *(("accuracy", "s to fit", "s for 1,000 images") if costs else ()),
    ]
    parts = [f"## {title}", table(head, rows), *verdict(board.results.plan, mean)] if rows else [f"## {title}", "No records yet."]
    if any(row[0].endswith(FEWER) for row in rows):
        parts.append(f"{FEWER} not all seeds.")
    return "\n\n".join(parts)


def spent(board: Board, label: str, tasks: Sequence[str]) -> list[str]:
    """Accuracy and seconds, means over tasks and seeds."""
    numbers = [board.numbers[label, task] for task in tasks if (label, task) in board.numbers]
    right = [value for n in numbers for value in n.accuracy]
    fit, thousand = ([value for n in numbers for value in n.seconds[key]] for key in ("fit", "thousand"))
    return [percent(fmean(right)) if right else NOTHING, *(seconds(fmean(s)) if s else NOTHING for s in (fit, thousand))]


def seconds(value: float) -> str:
    """Two digits below ten, whole ones above.

    >>> seconds(0.0478), seconds(151.4)
    ('0.048', '151')
    """
    return f"{value:.2g}" if value < 10 else f"{value:,.0f}"


def verdict(plan: Plan, mean: Numbers) -> list[str]:
    """How far the first method is from the best detector of the same net, from all others, and from the plain entropy."""
    ours = plan.labels[0]
    singles = {e.label for e in plan.entries if e.name == "detector"}
    baselines = {e.label for e in plan.entries if e.name != "image_guard"}
    parts: list[str] = []
    for name, among in (("the best detector", singles), ("the best of all others", baselines), ("", {"Entropy"})):
        others = {label: value for label, value in mean.items() if label in among}
        if ours in mean and others:
            best = max(others, key=lambda label: others[label])
            parts.append(f"{100 * (mean[ours] - mean[best]):+.1f} against {name + f', {best}' if name else best}")
    return [f"Mean of {ours}: {'; '.join(parts)}."] if parts else []


def each_set(board: Board, task: str) -> str:
    """AUROC of every method on every OOD set of a task, with the standard deviation over seeds."""
    numbers = {label: board.numbers[label, task] for label in board.results.plan.labels if (label, task) in board.numbers}
    sets = list(next(iter(numbers.values())).sets)
    mean = {label: fmean(fmean(values) for values in n.sets.values()) for label, n in numbers.items()}
    several = len(sets) > 1
    rows: list[list[str]] = []
    for label in sorted(numbers, key=lambda label: -mean[label]):
        cells = [label + FEWER * (not numbers[label].complete), *(shown(numbers[label].sets[name]) for name in sets)]
        rows.append([*cells, percent(mean[label])] if several else cells)
    head = ["method", *(name if kind_of(task, name) == OPEN else f"{name} ({kind_of(task, name)})" for name in sets)]
    return "\n\n".join([f"## {task}", table([*head, *["mean"][:several]], rows), *verdict(board.results.plan, mean)])


def shown(values: Sequence[float]) -> str:
    """Mean ± standard deviation over seeds.

    >>> shown([0.5, 0.6]), shown([0.5])
    ('55.0 ± 5.0', '50.0')
    """
    return percent(fmean(values)) + (f" ± {percent(pstdev(values))}" if len(values) > 1 else "")
