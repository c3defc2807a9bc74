"""A plan as tables, comparison and figures, and as one self-contained page of them all."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

from offmap.atomic import write_whole
from offmap.report.page import Panel, Section, check_path, gallery, paragraphs, render, write
from offmap.report.page import table as html_table
from offmap.table import Table
from offmap_bench.report.panels import dots_panel, series_legend, write_sheet
from offmap_bench.report.paper_figures import FIGURES, Say
from offmap_bench.runner import table as tables
from offmap_bench.runner.compare import LEGEND, Sheet, compare_all, compare_markdown, sheet
from offmap_bench.runner.plan import read_packaged
from offmap_bench.runner.shift_table import shifts_markdown
from offmap_bench.runner.table import Results, TableSection, complete_seeds, ranks_markdown

CAPTIONS: dict[str, dict[str, Any]] = tomllib.loads(read_packaged("templates")["figures"])
Written = tuple[Path, list[Path]]
"""Where something was written, and its files."""


@dataclass(frozen=True)
class Experiment:
    """A plan by its name or file, and the folder of the records of all plans, or the file of its own."""

    name: str
    records: Path
    quick: bool = False

    @cached_property
    def results(self) -> Results:
        return Results.read(self.name, self.records, quick=self.quick)

    @cached_property
    def sheet(self) -> Sheet | None:
        return sheet(self.name) if self.name in read_packaged("plans/printed") else None

    @cached_property
    def answers(self) -> Sequence[Results]:
        return [] if self.sheet is None else [Results.read(name, self.records, quick=self.quick) for name in self.sheet.plans]


def write_table(experiment: Experiment, out: Path | None, say: Say) -> Written:
    plan, writers = experiment.results.plan, {"means": tables.markdown, "ranks": ranks_markdown, "shifts": shifts_markdown}
    return _write_text(out or Path("docs/results") / f"{plan.name}.md", writers[plan.page](experiment.results))


def write_comparison(experiment: Experiment, out: Path | None, say: Say) -> Written:
    name, printed = experiment.name, sheet(experiment.name)
    text = compare_markdown(f"{name}{' --quick' * experiment.quick}", printed, experiment.answers, experiment.results.plan.title)
    return _write_text(out or Path("docs/results") / f"{name}{'-quick' * experiment.quick}-compare.md", text)


def _write_text(path: Path, text: str) -> Written:
    write_whole(path, text.encode())
    return path, [path]


def write_figures(experiment: Experiment, out: Path | None, say: Say) -> Written:
    folder = out or Path("docs/figures") / experiment.results.plan.name
    drawings = figures(experiment, say)
    return folder, [write_sheet(folder / f"{n}.svg", panels, _caption(n).get("columns", 3)) for n, panels in drawings.items()]


def write_page(experiment: Experiment, out: Path | None, say: Say) -> Written:
    results = experiment.results
    target = check_path(out or Path(f"{results.plan.name}.html"))
    drawings = figures(experiment, say)
    lacking = [Section("What is missing", paragraphs(part.replace("\n- ", "\n\n- ", 1))) for part in tables.list_missing(results)]
    sections = [
        *lacking,
        *map(_section, tables.detection(results)),
        *_render_comparison(experiment),
        *(_figure(name, panels, results) for name, panels in drawings.items()),
        *map(_section, tables.quality(results)),
        *(_section(each) for each in tables.each_task(results) if len(each.head) > 2),
    ]
    foot = f"Made by `offmap bench page {tables.words(results)}`."
    page = write(render(results.plan.name, f"From {tables.describe(results)}", sections, foot=foot), target)
    return page, [page]


WRITERS: Mapping[str, Callable[[Experiment, Path | None, Say], Written]] = {
    "table": write_table, "compare": write_comparison, "figures": write_figures, "page": write_page,
}  # fmt: skip


def figures(experiment: Experiment, say: Say) -> dict[str, list[Panel]]:
    """Draw all panels by the name of their figure: dots per method, and those that the plan asks for."""
    drawn, results = {"auroc": dots(experiment)}, experiment.results
    for name in results.plan.figures:
        folder = experiment.records.parent if experiment.records.suffix == ".jsonl" else experiment.records
        drawn |= FIGURES[name](results, folder / results.plan.name, say)
    return {name: panels for name, panels in drawn.items() if panels}


def dots(experiment: Experiment) -> list[Panel]:
    """Draw the AUROC of every method on each OOD set: a dot per task, the mean, and the mean that is printed."""
    results, panels = experiment.results, list[Panel]()
    for name, tasks in results.sets().items():
        lines: dict[str, tuple[list[float], float | None]] = {}
        for label, values in results.values(name, "auroc").items():
            means = [complete_seeds(values, [task], results.plan.seeds) for task in tasks]
            printed = None if experiment.sheet is None else printed_mean(experiment.sheet, label, tasks)
            lines[label] = [100 * fmean(seeds) for seeds in means if seeds], printed
        words = ", ".join(f"{label} {sum(values) / len(values):.1f}" for label, (values, _) in lines.items() if values)
        panels.append(Panel(dots_panel(lines, label="AUROC, %"), f"AUROC, {name}", f"Mean AUROC in per cent: {words}."))
    return panels


def printed_mean(printed: Sheet, label: str, tasks: Sequence[str]) -> float | None:
    """Return what the paper prints as the mean AUROC over these tasks for the method that a label answers to."""
    for table in printed.tables:
        for number in table.numbers:
            values = [v for (_, labels), v in zip(table.methods, number.printed, strict=True) if label in labels]
            matches = ("*" in number.tasks or len(tasks) == 1) and all(fnmatchcase(t, number.tasks) for t in tasks)
            if number.measure == "auroc" and matches and values and not isinstance(values[0], str):
                return float(values[0])
    return None


def _section(each: TableSection) -> Section:
    return Section(each.title, paragraphs(each.text) + _html_table(each) + paragraphs(_plain("\n\n".join(each.notes)), "note"))


def _render_comparison(experiment: Experiment) -> list[Section]:
    if experiment.sheet is None:
        return []
    sections, _, far = compare_all(experiment.sheet, experiment.answers)
    body = paragraphs(f"Ours (printed). {LEGEND}") + paragraphs(" ".join(experiment.sheet.note.split()))
    body += "".join(f"<h3>{section.title}</h3>" + _html_table(section) for section in sections)
    return [Section("Beside the paper", body + paragraphs("\n\n".join(_plain(far).splitlines())))]


def _figure(name: str, panels: Sequence[Panel], results: Results) -> Section:
    caption, key = _caption(name), ""
    title = caption.get("title", name)
    if name.startswith("course-"):
        title = f"The course of the fits, {panels[0].subtitle}"
        key = series_legend([label for label in results.plan.labels if "×1" in label])
    return Section(title, paragraphs(caption.get("text", "")) + gallery(panels, legend=key, width=caption.get("width", "15rem")))


def _caption(name: str) -> dict[str, Any]:
    return CAPTIONS.get("course" if name.startswith("course-") else name, {})


def _plain(text: str) -> str:
    return text.replace("\\*", "*").replace("## ", "")


def _html_table(each: TableSection) -> str:
    return html_table(Table([dict(zip(each.head, map(_plain, row), strict=True)) for row in each.rows]))
