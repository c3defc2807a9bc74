"""A plan as figures and as one self-contained page: tables, our numbers beside the printed ones, and what there is to see."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from statistics import fmean

from offmap.report.page import Panel, Section, check_path, gallery, paragraphs, render, table, write
from offmap.table import Table
from offmap_bench.report import paper_figures
from offmap_bench.report.curves import Dots, Line, dots_panel, steps_panel
from offmap_bench.report.panels import series_legend, write_sheet
from offmap_bench.runner import table as tables
from offmap_bench.runner.compare import (
    Comparison,
    Sheet,
    answers,
    comparisons,
    far,
    legend,
    parse_sheet,
    section,
)
from offmap_bench.runner.plan import read_packaged, read_plan
from offmap_bench.runner.store import read_records
from offmap_bench.runner.table import Results, TableSection, complete_seeds
from offmap_bench.runner.watch import load_trace

Say = Callable[[str], None]
Figures = dict[str, list[Panel]]

COLUMNS = {"auroc": 1, "figure-1-introduction": 4, "figure-4-clips": 5, "figure-5-course": 4, "figure-6-amplitudes": 3}
"""Panels side by side in an SVG file; others have three, and courses of fits five."""

CURVES = {"auroc": "AUROC", "fpr95": "FPR@95", "loss": "training loss", "risk": "validation risk", "entropy": "(1/d) Σ log φ²"}


@dataclass(frozen=True)
class Experiment:
    """The results of a plan, the folder for its drawings, and printed tables with the results of all plans that answer them."""

    results: Results
    folder: Path
    printed: Sheet | None = None
    answers: Sequence[Results] = field(default=())

    def comparisons(self) -> list[Comparison]:
        """Ours beside printed."""
        return [] if self.printed is None else comparisons(self.printed, self.answers)


def experiment(name: str, folder: Path, *, quick: bool = False) -> Experiment:
    """The plan of that name with its records, and what the paper prints of it; `folder` holds the records of all plans."""
    plan, text = read_plan(name, quick=quick), read_packaged("plans/printed").get(name)
    printed = None if text is None else parse_sheet(text)
    several = [] if printed is None else answers(printed, folder, quick=quick)
    return Experiment(Results(plan, read_records(folder / f"{plan.name}.jsonl")), folder / plan.name, printed, several)


def figures(experiment: Experiment, say: Say = lambda doing: None) -> Figures:
    """All panels by the name of their figure: dots per method, and those that the plan asks for."""
    drawn: Figures = {"auroc": dots(experiment)}
    for name in experiment.results.plan.figures:
        drawn |= DRAWN[name](experiment.results, experiment.folder, say)
    return {name: panels for name, panels in drawn.items() if panels}


def write_figures(experiment: Experiment, folder: Path, say: Say = lambda doing: None) -> list[Path]:
    """One SVG file for each figure."""
    made = figures(experiment, say)
    return [write_sheet(folder / f"{name}.svg", panels, columns(name)) for name, panels in made.items()]


def columns(name: str) -> int:
    """How many panels of a figure stand side by side."""
    return COLUMNS.get(name, 5 if name.startswith("course-") else 3)


def dots(experiment: Experiment) -> list[Panel]:
    """AUROC of every method on each OOD set: a dot per task, the mean, and the mean that is printed."""
    results, panels = experiment.results, list[Panel]()
    for name, tasks in results.sets().items():
        values = results.values(name, "auroc")
        lines = [
            Dots(label, task_means(results, values[label], tasks), printed_mean(experiment.printed, label, tasks))
            for label in results.plan.labels
        ]
        words = ", ".join(f"{line.label} {sum(line.values) / len(line.values):.1f}" for line in lines if line.values)
        panels.append(Panel(dots_panel(lines, label="AUROC, %"), f"AUROC, {name}", f"Mean AUROC in per cent: {words}."))
    return panels


def task_means(results: Results, values: Mapping[tuple[str, int], float], tasks: Sequence[str]) -> list[float]:
    """Per cent of every task that has been run, mean over seeds."""
    means = [complete_seeds(dict(values), [task], results.plan.seeds) for task in tasks]
    return [100 * fmean(seeds) for seeds in means if seeds]


def printed_mean(printed: Sheet | None, label: str, tasks: Sequence[str]) -> float | None:
    """What the paper prints as the mean AUROC over these tasks for the method that a label answers to."""
    for sheet in () if printed is None else printed.tables:
        for number in sheet.numbers:
            values = [v for (_, labels), v in zip(sheet.methods, number.printed, strict=True) if label in labels]
            matches = ("*" in number.tasks or len(tasks) == 1) and all(fnmatchcase(t, number.tasks) for t in tasks)
            if number.measure == "auroc" and matches and values and not isinstance(values[0], str):
                return float(values[0])
    return None


def tradeoffs(results: Results, folder: Path, say: Say) -> Figures:
    """Figures 9–11: five quantities over the steps for every λ, with τ and the step that was kept; a figure per task."""
    drawn: Figures = {}
    for task in results.plan.tasks:
        traces = {}
        for cell, _ in results.ok:
            if cell.task == task and cell.members == 1 and cell.seed == results.plan.seeds[0] and cell.method == "maxwent":
                say(f"{cell.label} on {task}")
                traces[cell.label] = load_trace(cell, folder)
        if not traces:
            continue
        key = f"course-{task.replace('/', '-')}"
        drawn[key] = []
        for quantity, words in CURVES.items():
            lines = {label: Line(t.step, getattr(t, quantity), t.kept) for label, t in traces.items()}
            bound = next(iter(traces.values())).max_risk if quantity == "risk" else None
            ends = ", ".join(f"{label} kept at step {t.kept}" for label, t in traces.items())
            svg = steps_panel(lines, label=words, bound=bound)
            drawn[key].append(Panel(svg, words, f"{words} over the steps on {task}: {ends}.", task))
    return drawn


DRAWN: Mapping[str, Callable[[Results, Path, Say], Figures]] = {
    "synthetic": paper_figures.figures, "moons": paper_figures.maps, "tradeoff": tradeoffs, "day": paper_figures.day_figures,
}  # fmt: skip


def write_experiment(experiment: Experiment, path: str | Path, say: Say = lambda doing: None) -> Path:
    """One self-contained page."""
    target = check_path(Path(path))
    results = experiment.results
    made = figures(experiment, say)
    sections = [
        *_missing(results),
        *map(_section, tables.detection(results)),
        *_compared(experiment),
        *(_figure(name, panels, results) for name, panels in made.items()),
        *map(_section, tables.quality(results)),
        *(_section(each) for each in tables.each_task(results) if len(each.head) > 2),
    ]
    foot = f"Made by `offmap bench page {tables.words(results)}`."
    return write(render(results.plan.name, f"From {tables.lead(results)}", sections, foot=foot), target)


def _missing(results: Results) -> list[Section]:
    parts = tables.missing(results)
    return [Section("What is missing", paragraphs(parts[0].replace("\n- ", "\n\n- ", 1)))] if parts else []


def _section(each: TableSection) -> Section:
    return Section(each.title, paragraphs(each.text) + _table(each) + paragraphs(_plain(each.notes), "note"))


def _compared(experiment: Experiment) -> list[Section]:
    made = experiment.comparisons()
    if not made or experiment.printed is None:
        return []
    body = paragraphs(f"Ours (printed). {legend()}") + paragraphs(" ".join(experiment.printed.note.split()))
    for comparison in made:
        body += f"<h3>{comparison.title}</h3>" + _table(section(comparison))
    return [Section("Beside the paper", body + paragraphs("\n\n".join(_plain(far(made)).splitlines())))]


def _figure(name: str, panels: Sequence[Panel], results: Results) -> Section:
    title, text = CAPTIONS.get(name.partition("-citycam")[0], (name, ""))
    key = ""
    if name.startswith("course-"):
        title, text = f"The course of the fits, {panels[0].subtitle}", COURSE
        key = series_legend([label for label in results.plan.labels if "×1" in label])
    wide = {"auroc": "32rem", "figure-4-clips": "12rem", "figure-7-day": "26rem"}
    return Section(title, paragraphs(text) + gallery(panels, legend=key, width=wide.get(name, "15rem")))


def _plain(lines: Sequence[str]) -> str:
    return "\n\n".join(lines).replace("\\*", "*").replace("## ", "")


def _table(each: TableSection) -> str:
    return table(Table([dict(zip(each.head, [c.replace("\\*", "*") for c in row], strict=True)) for row in each.rows]))


COURSE = """One net, and λ as named; τ is dashed, and a dotted line marks the step whose state each fit kept. What leaves the
frame goes on beyond it."""

CAPTIONS = {
    "auroc": ("AUROC of every method", "A dot is a task, a bar their mean; a diamond is the mean that the paper prints."),
    "figure-1-introduction": ("Figure 1", "An ensemble, dropout, MaxWEnt, and MaxWEnt with clipped weights."),
    "figure-2-regression": ("Figure 2: 1-D regression", "Mean ± 2 standard deviations; the true curve is dashed."),
    "figure-3-moons": ("Figure 3: two moons", "The entropy of the mean prediction, dark where it is undecided."),
    "figure-4-clips": ("Figure 4: clips", "One fitted distribution, drawn with ever smaller clips."),
    "figure-5-course": ("Figure 5: the course of a fit", "Two moons while MaxWEnt is fitted; H is (1/d) Σ log φ²."),
    "figure-6-amplitudes": ("Figure 6: φ and amplitude", "Every dot is an input of a hidden layer: its amplitude on the training "
                            "data, over drawn nets, and the mean φ of its weights. Dashed: φ proportional to 1/amplitude."),
    "figure-7-day": ("Figure 7: a day", "Vehicles counted (dots), predicted (line) and mean ± one standard deviation (band)."),
}  # fmt: skip
