"""The page of tasks with natural shifts: methods by kinds of data, and the default score beside each of its terms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean

import torch

from offmap.metrics import rank_correlation
from offmap_bench.runner.table import (
    NOTHING,
    SCORE_LEGEND,
    Results,
    TableSection,
    describe_code,
    format_seconds,
    list_missing,
    ood_sets,
    page,
    percent,
    words,
)

KINDS = {"uci": "tables", "tables": "tables", "text": "text", "sound": "sound", "images": "images"}
"""Kinds of data, by the first part of a task's name."""


class ShiftResults:
    """AUROCs of records by (label, task), means over OOD sets and seeds; the default is the plan's first method."""

    def __init__(self, results: Results) -> None:
        self.results, self.default = results, results.plan.labels[0]
        self.by_seed = results.by_task("OOD", "auroc")
        self.aurocs = {key: fmean(numbers) for key, numbers in self.by_seed.items()}
        self.tasks = [task for task in results.plan.tasks if (self.default, task) in self.aurocs]
        self.terms = {task: self._find_terms(task) for task in self.tasks}
        self.baselines = {task: self._select(task, lambda name: name != "shift_guard") for task in self.tasks}

    @property
    def classifications(self) -> list[str]:
        """The tasks on which some post-hoc detector was run as well."""
        return [task for task in self.tasks if self._select(task, lambda name: name == "shift_detector")]

    def _select(self, task: str, wanted: Callable[[str], bool]) -> dict[str, float]:
        """Return the AUROC of all methods that are wanted."""
        labels = [entry.label for entry in self.results.plan.entries if wanted(entry.name)]
        return {label: self.aurocs[label, task] for label in labels if (label, task) in self.aurocs}

    def _find_terms(self, task: str) -> dict[str, float]:
        """Return the AUROC of each term of the default score, alone."""
        records = [list(ood_sets(record).values()) for record in self.results.records_of[self.default, task]]
        names = dict.fromkeys(name for sets in records for metrics in sets for name in metrics.get("terms", {}))
        return {name: fmean(fmean(float(each["terms"][name]) for each in sets) for sets in records) for name in names}

    def mean(self, label: str, tasks: Sequence[str]) -> float | None:
        """Return the mean over the tasks; none unless all of them are there."""
        return fmean(self.aurocs[label, t] for t in tasks) if tasks and all((label, t) in self.aurocs for t in tasks) else None


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
    plan, lines, alarms = numbers.results.plan, list[tuple[float, list[str]]](), numbers.results.means("test", "false_alarms")
    for label, score in plan.scores.items():
        means = [numbers.mean(label, group) for group in groups]
        if any(mean is not None for mean in means):
            mine = [alarms[label, task] for task in tasks if (label, task) in alarms]
            shares = [percent(fmean(mine)), percent(max(mine))] if mine else [NOTHING, NOTHING]
            name = f"**{label}**" if label == numbers.default else label
            lines.append((means[0] or 0.0, [name, score, *map(percent, means), *shares]))
    head = ["method", "score", "mean", *(f"{kind} ({len(group)})" for kind, group in zip(kinds, groups[1:], strict=True))]
    text = (
        f"Means over {len(tasks)} tasks. False alarms are the test rows above the threshold, 5 % by intention: the mean over the "
        f"tasks of a method that have 19 validation rows or more, and the most on one. {NOTHING}: the method does not do all."
    )
    rows = [row for _, row in sorted(lines, key=lambda each: -each[0])]
    return TableSection(title, [*head, "false alarms", "most"], rows, text)


def compare_terms(numbers: ShiftResults) -> TableSection:
    """Return the AUROC of each term alone, and the regret of the default against the best term of every task."""
    terms = numbers.terms
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
        ours, terms, baselines = numbers.aurocs[numbers.default, task], numbers.terms[task], numbers.baselines[task]
        row = [task, percent(ours)]
        for among in (terms, baselines):
            best = max(among, key=lambda name: among[name], default="")
            row += [best, percent(among[best]), f"{100 * (ours - among[best]):+.1f}"] if among else [NOTHING] * 3
        rows.append(row)
    head = ["task", "default", "best term", "AUROC", "default − term", "best baseline", "AUROC ", "default − baseline"]
    text = "Baselines are all methods but guards. Which term or baseline is best on a task is known only afterwards."
    return TableSection("Each task", head, rows, text)


def compare_assessments(numbers: ShiftResults) -> TableSection:
    """Return the AUROC that guards expect of themselves, from in-distribution data alone, beside the real one."""
    assessed: dict[str, float] = {}
    kinds: dict[str, dict[str, float]] = {}
    for task in numbers.tasks:
        assessments = [entry for r in numbers.results.records_of[numbers.default, task] if (entry := r.chosen.get("assessed"))]
        if assessments:
            assessed[task] = fmean(entry["auroc"] / 100 for entry in assessments)
            names = [name for name in assessments[0]["kinds"] if all(name in entry["kinds"] for entry in assessments)]
            kinds[task] = {name: fmean(entry["kinds"][name] / 100 for entry in assessments) for name in names}
    real = {task: numbers.aurocs[numbers.default, task] for task in assessed}
    columns = list(dict.fromkeys(name for each in kinds.values() for name in each))
    rows = [
        [task, percent(real[task]), percent(value), *(percent(kinds[task].get(name)) for name in columns)]
        for task, value in assessed.items()
    ]
    text = "What `guard.assess()` says, from in-distribution data alone: the mean AUROC over kinds of shift, and each kind."
    if len(assessed) > 2:
        pair = [torch.tensor([values[task] for task in assessed], dtype=torch.float64) for values in (assessed, real)]
        gap = fmean(abs(assessed[task] - real[task]) for task in assessed)
        text += f" Rank correlation with the real AUROC over tasks {float(rank_correlation(*pair)):.2f}, mean difference "
        text += f"{100 * gap:.1f} points."
    return TableSection("Assessed before, and measured", ["task", "AUROC", "assessed", *columns], rows, text)


def measure_thresholds(numbers: ShiftResults) -> TableSection:
    """Return what the default's threshold does to test rows, how its score ranks the model's errors, and what it costs."""
    results, rows = numbers.results, list[list[str]]()
    fpr95, alarms = results.means("OOD", "fpr95"), results.means("test", "false_alarms")
    losses = [results.means("test", measure) for measure in ("loss", "loss_unflagged", "aurc")]
    for key in ((numbers.default, task) for task in numbers.tasks):
        seconds = [fmean(record.seconds[part] for record in results.records_of[key]) for part in ("fit", "thousand")]
        shown = [f"{each[key]:.4f}" if key in each else NOTHING for each in losses]
        rows.append([key[1], percent(fpr95[key]), percent(alarms.get(key)), *shown, *map(format_seconds, seconds)])
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
