"""The page of tasks with natural shifts: methods by kinds of data, and the default score beside each of its terms."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean

import torch

from offmap.metrics import rank_correlation
from offmap_bench.runner.store import Record
from offmap_bench.runner.table import (
    NOTHING,
    SCORE_LEGEND,
    Results,
    TableSection,
    describe_code,
    list_missing,
    ood_sets,
    page,
    percent,
    spread,
    table,
    words,
)

KINDS = {"uci": "tables", "tables": "tables", "text": "text", "sound": "sound", "images": "images"}
"""Kinds of data, by the first part of a task's name."""


@dataclass(frozen=True)
class ShiftResults:
    """Numbers of records by (label, task), means over OOD sets and seeds."""

    results: Results

    @cached_property
    def records(self) -> dict[tuple[str, str], list[Record]]:
        records: dict[tuple[str, str], list[Record]] = {}
        for cell, record in self.results.ok:
            records.setdefault((cell.label, cell.task), []).append(record)
        return records

    @property
    def tasks(self) -> list[str]:
        """The tasks on which the first method, the default, was run."""
        return [task for task in self.results.plan.tasks if (self.default, task) in self.records]

    @property
    def classifications(self) -> list[str]:
        """Those on which some post-hoc detector was run as well."""
        detectors = {entry.label for entry in self.results.plan.entries if entry.name == "shift_detector"}
        return [task for task in self.tasks if any((label, task) in self.records for label in detectors)]

    @property
    def default(self) -> str:
        return self.results.plan.labels[0]

    @cached_property
    def aurocs(self) -> dict[tuple[str, str], float]:
        return {key: fmean(_mean_over_sets(record, "auroc") for record in records) for key, records in self.records.items()}

    def test(self, label: str, task: str, measure: str) -> float | None:
        """Return a number of the in-distribution test rows, where records have it."""
        values = [record.metrics["test"].get(measure) for record in self.records.get((label, task), ())]
        numbers = [float(value) for value in values if isinstance(value, int | float)]
        return fmean(numbers) if numbers else None

    def terms(self, task: str) -> dict[str, float]:
        """Return the AUROC of each term of the default score, alone."""
        records = self.records.get((self.default, task), [])
        names = dict.fromkeys(name for record in records for sets in ood_sets(record).values() for name in sets.get("terms", {}))
        return {name: fmean(_mean_over_terms(record, name) for record in records) for name in names}

    def baselines(self, task: str) -> dict[str, float]:
        """Return the AUROC of all methods but guards."""
        labels = [entry.label for entry in self.results.plan.entries if entry.name != "shift_guard"]
        return {label: self.aurocs[label, task] for label in labels if (label, task) in self.aurocs}

    def spread(self, label: str, task: str) -> str:
        """Return the mean over seeds ± the sample standard deviation."""
        return spread([_mean_over_sets(record, "auroc") for record in self.records[label, task]], percent)

    def mean(self, label: str, tasks: Sequence[str]) -> float | None:
        """Return the mean over the tasks; none unless all of them are there."""
        return fmean(self.aurocs[label, t] for t in tasks) if tasks and all((label, t) in self.aurocs for t in tasks) else None


def _mean_over_sets(record: Record, measure: str) -> float:
    return fmean(float(metrics[measure]) for metrics in ood_sets(record).values())


def _mean_over_terms(record: Record, term: str) -> float:
    return fmean(float(metrics["terms"][term]) for metrics in ood_sets(record).values())


def shifts_markdown(results: Results) -> str:
    """Write the page."""
    plan, numbers = results.plan, ShiftResults(results)
    lead = (
        f"Written by `offmap bench table {words(results)}` from {len(results.ok)} of {len(results.cells)} records: "
        f"{len(plan.tasks)} tasks, {len(plan.labels)} methods, seeds {', '.join(map(str, plan.seeds))}. AUROC of OOD rows "
        f"against test rows in per cent, means over the OOD sets and the seeds of a task, then over tasks."
        f"{describe_code(results)}"
    )
    sections = [
        compare_methods(numbers, "All tasks", numbers.tasks),
        compare_methods(numbers, "Classifiers", numbers.classifications),
        compare_terms(numbers),
        compare_each_task(numbers),
        compare_assessments(numbers),
        measure_thresholds(numbers),
    ]
    shown = [section.markdown() for section in sections if section.rows]
    return page(plan.title, lead, SCORE_LEGEND, plan.note, *list_missing(results), *shown)


def compare_methods(numbers: ShiftResults, title: str, tasks: Sequence[str]) -> TableSection:
    """Return the mean AUROC of every method over the tasks and over those of each kind, the best on top."""
    kinds = list(dict.fromkeys(kind_of(task) for task in tasks))
    groups = [list(tasks), *([task for task in tasks if kind_of(task) == kind] for kind in kinds)]
    plan, found = numbers.results.plan, list[tuple[float, list[str]]]()
    for label, score in plan.scores.items():
        means = [numbers.mean(label, group) for group in groups]
        if any(mean is not None for mean in means):
            alarms = [share for task in tasks if (share := numbers.test(label, task, "false_alarms")) is not None]
            shares = [percent(fmean(alarms)), percent(max(alarms))] if alarms else [NOTHING, NOTHING]
            name = f"**{label}**" if label == numbers.default else label
            found.append((means[0] or 0.0, [name, score, *map(_percent, means), *shares]))
    head = ["method", "score", "mean", *(f"{kind} ({len(group)})" for kind, group in zip(kinds, groups[1:], strict=True))]
    text = (
        f"Means over {len(tasks)} tasks. False alarms are the test rows above the threshold, 5 % by intention: the mean over the "
        f"tasks of a method that have 19 validation rows or more, and the most on one. {NOTHING}: the method does not do all."
    )
    rows = [row for _, row in sorted(found, key=lambda each: -each[0])]
    return TableSection(title, [*head, "false alarms", "most"], rows, text)


def compare_terms(numbers: ShiftResults) -> TableSection:
    """Return the AUROC of each term alone, and the regret of the default against the best term of every task."""
    terms = {task: numbers.terms(task) for task in numbers.tasks}
    regret = {task: max(each.values()) - numbers.aurocs[numbers.default, task] for task, each in terms.items() if each}
    rows: list[list[str]] = []
    for name in dict.fromkeys(name for each in terms.values() for name in each):
        having = [task for task in terms if name in terms[task]]
        alone = fmean(terms[task][name] for task in having)
        gain = fmean(numbers.aurocs[numbers.default, task] - terms[task][name] for task in having)
        best = sum(terms[task][name] == max(terms[task].values()) for task in having)
        rows.append([name, str(len(having)), percent(alone), f"{100 * gain:+.1f}", str(best)])
    worst = max(regret, key=lambda task: regret[task], default="")
    text = "Each term of the default score alone, on the tasks that have it. " + (
        f"Regret of the default against the best term of each task: {100 * fmean(regret.values()):.1f} on average, "
        f"{100 * regret[worst]:.1f} at most ({worst})."
        if regret
        else ""
    )
    return TableSection("Terms", ["term", "tasks", "AUROC", "default − term", "best of its task"], rows, text.strip())


def compare_each_task(numbers: ShiftResults) -> TableSection:
    """Return the default beside the best term and the best baseline of every task."""
    rows: list[list[str]] = []
    for task in numbers.tasks:
        ours, terms, baselines = numbers.aurocs[numbers.default, task], numbers.terms(task), numbers.baselines(task)
        row = [task, percent(ours)]
        for among in (terms, baselines):
            best = max(among, key=lambda name: among[name], default="")
            row += [best, percent(among[best]), f"{100 * (ours - among[best]):+.1f}"] if among else [NOTHING] * 3
        rows.append(row)
    head = ["task", "default", "best term", "AUROC", "default − term", "best baseline", "AUROC ", "default − baseline"]
    text = "Baselines are all methods but guards. Which term or baseline is best on a task is known only afterwards."
    return TableSection("Each task", head, rows, text)


def summarize_shifts(results: Results, names: Mapping[str, str]) -> dict[str, str]:
    """Return what short pages quote: two small tables of the default beside the baseline that does best, and counts.

    `first` has the first task of each kind, UCI aside; `worst` the three tasks on which the default is furthest behind.

    Args:
        names: What to call tasks.
    """
    numbers = ShiftResults(results)
    compared = [task for task in numbers.tasks if numbers.baselines(task)]
    best = {task: max(numbers.baselines(task).items(), key=lambda each: each[1]) for task in compared}
    lead = {task: numbers.aurocs[numbers.default, task] - best[task][1] for task in compared}
    ahead = sum(value > 0 for value in lead.values())
    firsts = {kind_of(task): task for task in reversed(compared) if task.partition("/")[0] in KINDS.values()}

    def tabulate(tasks: Iterable[str]) -> str:
        rows = [
            [names.get(t, t), *(numbers.spread(label, t) for label in (numbers.default, best[t][0])), best[t][0]] for t in tasks
        ]
        return table(["task", "offmap", "best baseline", "which"], rows)

    return {
        "first": tabulate(task for task in compared if task in firsts.values()),
        "worst": tabulate(sorted(compared, key=lambda task: lead[task])[:3]),
        "seeds": str(len(results.plan.seeds)),
        "baselines": str(sum(entry.name != "shift_guard" for entry in results.plan.entries)),
        "tasks": str(len(compared)),
        "ahead": str(ahead),
        "behind": str(len(compared) - ahead),
    }


def compare_assessments(numbers: ShiftResults) -> TableSection:
    """Return the AUROC that guards expect of themselves, from in-distribution data alone, beside the real one."""
    assessed: dict[str, float] = {}
    kinds: dict[str, dict[str, float]] = {}
    for task in numbers.tasks:
        said = [found for r in numbers.records[numbers.default, task] if (found := r.chosen.get("assessed"))]
        if said:
            assessed[task] = fmean(found["auroc"] / 100 for found in said)
            names = [name for name in said[0]["kinds"] if all(name in found["kinds"] for found in said)]
            kinds[task] = {name: fmean(found["kinds"][name] / 100 for found in said) for name in names}
    real = {task: numbers.aurocs[numbers.default, task] for task in assessed}
    columns = list(dict.fromkeys(name for each in kinds.values() for name in each))
    rows = [
        [task, percent(real[task]), percent(value), *(_percent(kinds[task].get(name)) for name in columns)]
        for task, value in assessed.items()
    ]
    text = "What `guard.assess()` says, from in-distribution data alone: the mean AUROC over kinds of shift, and each kind."
    if len(assessed) > 2:
        pair = [torch.tensor([values[task] for task in assessed], dtype=torch.float64) for values in (assessed, real)]
        apart = fmean(abs(assessed[task] - real[task]) for task in assessed)
        text += f" Rank correlation with the real AUROC over tasks {float(rank_correlation(*pair)):.2f}, mean difference "
        text += f"{100 * apart:.1f} points."
    return TableSection("Assessed before, and measured", ["task", "AUROC", "assessed", *columns], rows, text)


def measure_thresholds(numbers: ShiftResults) -> TableSection:
    """Return what the default's threshold does to test rows, how its score ranks the model's errors, and what it costs."""
    rows: list[list[str]] = []
    for task in numbers.tasks:
        records = numbers.records[numbers.default, task]
        test = {m: numbers.test(numbers.default, task, m) for m in ("false_alarms", "loss", "loss_unflagged", "aurc")}
        alarms, *losses = test.values()
        seconds = [fmean(record.seconds[key] for record in records) for key in ("fit", "thousand")]
        fpr95 = fmean(_mean_over_sets(record, "fpr95") for record in records)
        row = [task, percent(fpr95), _percent(alarms), *(NOTHING if loss is None else f"{loss:.4f}" for loss in losses)]
        rows.append([*row, *(f"{s:.2g}" if s < 10 else f"{s:,.0f}" for s in seconds)])
    head = ["task", "FPR@95", "false alarms", "loss", "loss, not flagged", "AURC", "s to fit", "s for 1,000 rows"]
    text = (
        "The default score. A loss is 1 for a wrong class of the model, else 0; in a regression, the squared error in units of "
        "the targets' variance. AURC is the area under the curve of the loss over the share of rows that are answered."
    )
    return TableSection("Thresholds, errors and seconds", head, rows, text)


def kind_of(task: str) -> str:
    """Return the kind of data of a task.

    >>> kind_of("uci/yacht/extrapolation"), kind_of("sound/digits/unseen-digits")
    ('tables', 'sound')
    """
    return KINDS.get(task.partition("/")[0], "others")


def _percent(value: float | None) -> str:
    return NOTHING if value is None else percent(value)
