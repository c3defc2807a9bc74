"""Figures 1–7 and 9–11 of the paper, from the records of plans on its two synthetic tasks, on tables and on CityCam."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from offmap import Likelihood, diagnose
from offmap.posterior.predictive import Stochastic
from offmap.report.diagnosis import amplitude_panels, draw_trace
from offmap.report.page import Array, Panel
from offmap_bench.report.panels import day_panel, shown_range, view_panel
from offmap_bench.runner.plan import METHODS, Cell
from offmap_bench.runner.store import Record
from offmap_bench.runner.table import Results
from offmap_bench.runner.watch import POINTS, View, grid, read_as, refit, trace, view_of, views, watch
from offmap_bench.tasks.catalog import task as task_of
from offmap_bench.tasks.citycam import load
from offmap_bench.tasks.task import Task

TASKS = ("regression", "moons")
PLAIN, WIDE = "MaxWEnt ×1", "MaxWEnt-SVD ×1"
INTRODUCTION = ("Deep ensemble ×5", "MC-dropout ×1", WIDE)
CLIPS: tuple[float | None, ...] = (None, 1.5, 1.0, 0.5, 0.0)
CLIPPED = {"regression": 0.5, "moons": 2.0}
EVERY = tuple(dict.fromkeys((*CLIPS, *CLIPPED.values())))
CURVES = {"auroc": "AUROC", "fpr95": "FPR@95", "loss": "training loss", "risk": "validation risk", "entropy": "(1/d) Σ log φ²"}

Say = Callable[[str], None]
Figures = dict[str, list[Panel]]


@dataclass(frozen=True)
class Drawing:
    results: Results
    folder: Path
    say: Say

    def cell(self, label: str, task: str, words: str = "{label} on {task}") -> tuple[Cell, Record]:
        """Say what is drawn; return the first seed's cell of a method on a task, which must have been run."""
        self.say(words.format(label=label, task=task))
        return next((cell, record) for cell, record in self.results.ok if (cell.label, cell.task) == (label, task))

    def has(self, label: str, task: str) -> bool:
        return any((cell.label, cell.task) == (label, task) for cell, _ in self.results.ok)

    def view(self, label: str, task: str, clip: float | None = None) -> View:
        """Return a view of a method on a task; all figures share one fit of MaxWEnt-SVD."""
        clips = EVERY if label == WIDE else (clip,)
        return dict(zip(clips, views(*self.cell(label, task), self.folder, clips), strict=True))[clip]


def draw_synthetic(results: Results, folder: Path, say: Say) -> Figures:
    """Draw the paper's figures on its synthetic tasks; a method that has not been run is left out."""
    drawing = Drawing(results, folder, say)
    return {
        "figure-1-introduction": draw_introduction(drawing),
        "figure-2-regression": draw_methods(drawing, "regression"),
        "figure-3-moons": draw_methods(drawing, "moons"),
        "figure-4-clips": draw_clips(drawing),
        "figure-5-course": draw_course(drawing),
        "figure-6-amplitudes": draw_amplitudes(drawing),
    }


def draw_methods(drawing: Drawing, task: str) -> list[Panel]:
    """Draw figures 2 and 3: a panel for every method that has been run."""
    labels = [label for label in drawing.results.plan.labels if drawing.has(label, task)]
    return [draw_view(task, drawing.view(label, task), label, task) for label in labels]


def draw_view(task: str, view: View, title: str, subtitle: str) -> Panel:
    return view_panel(view, task_of(task).train, title, subtitle)


def draw_introduction(drawing: Drawing) -> list[Panel]:
    """Draw figure 1: an ensemble, dropout, MaxWEnt and MaxWEnt with clipped weights on both tasks."""
    panels: list[Panel] = []
    for task in reversed(TASKS):
        if all(drawing.has(label, task) for label in INTRODUCTION):
            panels += [draw_view(task, drawing.view(label, task), label, task) for label in INTRODUCTION]
            clip = CLIPPED[task]
            panels.append(draw_view(task, drawing.view(WIDE, task, clip), WIDE, f"{task}, clipped at {clip:g}"))
    return [replace(panel, alt=f"Figure 1. {panel.alt}") for panel in panels]  # ids of a page follow from the words


def draw_clips(drawing: Drawing) -> list[Panel]:
    """Draw figure 4: one distribution with ever smaller clips."""
    return [
        draw_view(task, drawing.view(WIDE, task, clip), "no clip" if clip is None else f"clip {clip:g}", task)
        for task in TASKS
        if drawing.has(WIDE, task)
        for clip in CLIPS
    ]


def draw_course(drawing: Drawing) -> list[Panel]:
    """Draw figure 5: the uncertainty on the moons while MaxWEnt is fitted, without and with the SVD."""
    panels: list[Panel] = []
    for label in (PLAIN, WIDE):
        if drawing.has(label, "moons"):
            for step, entropy, view in views_on_the_way(*drawing.cell(label, "moons", "the course of {label}")):
                panels.append(draw_view("moons", view, f"{label}, step {step}", f"H = {entropy:.1f}"))
    return panels


def views_on_the_way(cell: Cell, record: Record) -> list[tuple[int, float, View]]:
    """Return step, entropy and view at the paper's epochs 10, 75, 125 and 200 of 200, with the λ that the record chose."""
    changes = {"entropy_weight": float(record.chosen["entropy_weight"]), "patience": None}
    steps = METHODS[cell.method].settings(cell.config)["steps"]

    def look(predictive: Stochastic, likelihood: Likelihood, task: Task) -> tuple[float, View]:
        x = grid(task.inputs, POINTS[2])
        prediction = likelihood.predict(predictive.outputs(x, 50, clip=None, seed=cell.seed))
        return float(predictive.q.mean_log_square().detach().mean()), view_of(prediction)

    _, observed = watch(cell, look, **changes, check_every=max(1, steps // 40))
    wanted = [min(observed, key=lambda s, share=share: abs(s[0] - share * steps)) for share in (0.05, 0.375, 0.625, 1.0)]
    return [(step, *pair) for step, pair in wanted]


def draw_amplitudes(drawing: Drawing) -> list[Panel]:
    """Draw figure 6: mean φ over amplitude, over 20 drawn nets, in the hidden layers of MaxWEnt and of a Bayesian net."""
    panels: list[Panel] = []
    for label in (PLAIN, "BNN ×1"):
        if drawing.has(label, "moons"):
            cell, record = drawing.cell(label, "moons", "amplitudes of {label}")
            task = task_of("moons", cell.seed)
            guard = read_as(replace(cell, members=5), refit(cell, record, task), task)
            drawn = amplitude_panels(diagnose(guard, task.train, draws=20))[1:]
            panels += [replace(panel, title=f"{label}, {panel.title}") for panel in drawn]
    return panels


def draw_moons(results: Results, folder: Path, say: Say) -> Figures:
    """Draw what every method of a plan says around the two moons, as in the paper's table 8."""
    return {"moons": draw_methods(Drawing(results, folder, say), "moons")}


def draw_tradeoffs(results: Results, folder: Path, say: Say) -> Figures:
    """Draw figures 9–11: five quantities over the steps for every λ, with τ and the step that was kept; a figure per task."""
    drawn: Figures = {}
    for task in results.plan.tasks:
        traces: dict[str, dict[str, Array]] = {}
        for cell, _ in results.ok:
            if cell.task == task and cell.members == 1 and cell.seed == results.plan.seeds[0] and cell.method == "maxwent":
                say(f"{cell.label} on {task}")
                traces[cell.label] = trace(cell, folder)
        for quantity, words in CURVES.items() if traces else ():
            bounds = [float(next(iter(traces.values()))["max_risk"])] if quantity == "risk" else []
            ends = ", ".join(f"{label} kept at step {int(t['kept'])}" for label, t in traces.items())
            lines = [(t["step"], t[quantity], float(t["kept"])) for t in traces.values()]
            svg = draw_trace(lines, words, bounds, shown_range(np.concatenate([values for _, values, _ in lines]), bounds))
            panel = Panel(svg, words, f"{words} over the steps on {task}: {ends}.", task)
            drawn.setdefault(f"course-{task.replace('/', '-')}", []).append(panel)
    return drawn


def draw_days(results: Results, folder: Path, say: Say) -> Figures:
    """Draw figure 7: vehicles counted and predicted on CityCam's OOD frames, hour by hour, for an ensemble and for MaxWEnt."""
    panels: list[Panel] = []
    for cell, record in results.ok:
        if (cell.task, cell.seed) == ("citycam/weather", results.plan.seeds[0]) and cell.label in ("Deep ensemble ×5", WIDE):
            say(f"{cell.label} over the day")
            shift = load("weather", cell.seed)
            guard = read_as(cell, refit(cell, record, shift.task), shift.task)
            view = view_of(guard.predict(next(iter(shift.task.ood.values())), clip=None))
            mean, std = (shift.unit * view[kind].flatten() for kind in ("mean", "std"))
            panels.append(draw_day(shift.frames["ood"], mean + shift.centre, std, cell.label))
    return {"figure-7-day": panels}


def draw_day(frames: Sequence[Any], mean: Array, std: Array, title: str) -> Panel:
    """Draw one method's day; `frames` have a `time` and a number of `vehicles`."""
    hours = np.array([frame.time.hour + frame.time.minute / 60 + frame.time.second / 3600 for frame in frames])
    counts = np.array([float(frame.vehicles) for frame in frames])
    top = 2.0 * max(1.0, float(counts.max()))
    early, late = hours <= np.quantile(hours, 0.1), hours >= np.quantile(hours, 0.9)
    alt = f"{title}: standard deviation {std[early].mean():.2g} vehicles early, {std[late].mean():.2g} late."
    return Panel(day_panel(hours, counts, mean, std, limits=(-top / 2, top)), title, alt)


FIGURES: Mapping[str, Callable[[Results, Path, Say], Figures]] = {
    "synthetic": draw_synthetic, "moons": draw_moons, "tradeoff": draw_tradeoffs, "day": draw_days,
}  # fmt: skip
