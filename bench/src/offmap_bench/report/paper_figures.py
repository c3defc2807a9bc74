"""Figures 1–7 of the paper, from the records of plans on its two synthetic tasks and on CityCam."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from offmap.diagnosis import diagnose
from offmap.errors import ConfigError
from offmap.maxwent import config as maxwent
from offmap.posterior.predictive import Stochastic
from offmap.report.diagnosis import amplitude_panels
from offmap.report.page import Panel
from offmap_bench.report.curves import day_panel
from offmap_bench.report.panels import band_panel, map_panel
from offmap_bench.runner.base_models import likelihood_of
from offmap_bench.runner.context import FitContext, config_of
from offmap_bench.runner.plan import Cell
from offmap_bench.runner.store import Record
from offmap_bench.runner.table import Results
from offmap_bench.runner.watch import POINTS, View, course, grid, read_as, refit, view_of
from offmap_bench.runner.watch import views as cached_views
from offmap_bench.tasks.catalog import task as task_of
from offmap_bench.tasks.citycam import load
from offmap_bench.tasks.synthetic import SQUARE, truth
from offmap_bench.tasks.task import Task

TASKS = ("regression", "moons")
PLAIN, WIDE = "MaxWEnt ×1", "MaxWEnt-SVD ×1"
INTRODUCTION = ("Deep ensemble ×5", "MC-dropout ×1", WIDE)
CLIPS: tuple[float | None, ...] = (None, 1.5, 1.0, 0.5, 0.0)
SHARES = (0.05, 0.375, 0.625, 1.0)
"""When a fit is looked at, as shares of its steps: the paper's epochs 10, 75, 125 and 200 of 200."""

TOP = 0.6931
"""Entropy of an even choice."""

CLIPPED = {"regression": 0.5, "moons": 2.0}
EVERY = tuple(dict.fromkeys((*CLIPS, *CLIPPED.values())))
DRAWS = 20
"""Drawn nets over which amplitudes are taken."""

PREDICTIONS = 50

Say = Callable[[str], None]


@dataclass(frozen=True)
class Drawing:
    """The records of the plan, and the folder of cached views."""

    results: Results
    folder: Path
    say: Say

    def cell(self, label: str, task: str) -> tuple[Cell, Record]:
        """The first seed's cell of a method on a task, which must have been run."""
        for cell, record in self.results.ok:
            if (cell.label, cell.task) == (label, task):
                return cell, record
        raise ConfigError(f"Expected a record of {label!r} on {task!r}; run `offmap bench run` of the plan first.")

    def has(self, label: str, task: str) -> bool:
        """Whether it was run."""
        return any((cell.label, cell.task) == (label, task) for cell, _ in self.results.ok)

    def views(self, label: str, task: str, clips: Sequence[float | None] = (None,)) -> list[View]:
        """The views of a method on a task."""
        self.say(f"{label} on {task}")
        cell, record = self.cell(label, task)
        if label != WIDE:
            return cached_views(cell, record, self.folder, clips)
        by_clip = dict(zip(EVERY, cached_views(cell, record, self.folder, EVERY), strict=True))  # one fit for all figures
        return [by_clip[clip] for clip in clips]


def figures(results: Results, folder: Path, say: Say) -> dict[str, list[Panel]]:
    """The paper's figures by name; a method that has not been run is left out."""
    drawing = Drawing(results, folder, say)
    return {
        "figure-1-introduction": introduction(drawing),
        "figure-2-regression": methods(drawing, "regression"),
        "figure-3-moons": methods(drawing, "moons"),
        "figure-4-clips": clips(drawing),
        "figure-5-course": courses(drawing),
        "figure-6-amplitudes": amplitudes(drawing),
    }


def maps(results: Results, folder: Path, say: Say) -> dict[str, list[Panel]]:
    """What every method of a plan says around the two moons, as in the paper's table 8."""
    return {"moons": methods(Drawing(results, folder, say), "moons")}


def methods(drawing: Drawing, task: str) -> list[Panel]:
    """Figures 2 and 3: a panel for every method that has been run."""
    labels = [label for label in drawing.results.plan.labels if drawing.has(label, task)]
    return [draw(task, drawing.views(label, task)[0], label, task) for label in labels]


def draw(task: str, view: View, title: str, subtitle: str = "") -> Panel:
    """A band for the regression, a map for the moons."""
    data = task_of(task)
    x, y = (t.numpy() for t in data.train)
    if task == "regression":
        line = np.linspace(-1.5, 1.5, POINTS[1])
        mean, std = view.band()
        svg = band_panel(line, mean, std, points=(x[:, 0], y), truth=truth(line), limits=(-2, 2))
        edges = f"{std[0]:.2g} at the left edge, {std[len(std) // 2]:.2g} in the middle, {std[-1]:.2g} at the right edge"
        return Panel(svg, title, f"{title}, {subtitle}: mean ± 2 standard deviations over x; one is {edges}.", subtitle)
    values = view.map()
    svg = map_panel(values, half=SQUARE, points=[x[y == c] for c in (0, 1)], top=TOP)
    dark = 100 * float((values > TOP / 2).mean())
    alt = f"{title}, {subtitle}: map of the predictive entropy around two moons, above half its maximum on {dark:.0f} %."
    return Panel(svg, title, alt, subtitle)


def introduction(drawing: Drawing) -> list[Panel]:
    """Figure 1: an ensemble, dropout, MaxWEnt and MaxWEnt with clipped weights on both tasks."""
    panels: list[Panel] = []
    for task in reversed(TASKS):
        if all(drawing.has(label, task) for label in INTRODUCTION):
            panels += [draw(task, drawing.views(label, task)[0], label, task) for label in INTRODUCTION]
            clip = CLIPPED[task]
            panels.append(draw(task, drawing.views(WIDE, task, (clip,))[0], WIDE, f"{task}, clipped at {clip:g}"))
    return [replace(panel, alt=f"Figure 1. {panel.alt}") for panel in panels]  # ids of a page follow from the words


def clips(drawing: Drawing) -> list[Panel]:
    """Figure 4: one distribution with ever smaller clips."""
    names = {clip: "no clip" if clip is None else f"clip {clip:g}" for clip in CLIPS}
    return [
        draw(task, view, names[clip], f"{task}")
        for task in TASKS
        if drawing.has(WIDE, task)
        for clip, view in zip(CLIPS, drawing.views(WIDE, task, CLIPS), strict=True)
    ]


def courses(drawing: Drawing) -> list[Panel]:
    """Figure 5: the uncertainty on the moons while MaxWEnt is fitted, without and with the SVD."""
    panels: list[Panel] = []
    for label in (PLAIN, WIDE):
        if not drawing.has(label, "moons"):
            continue
        drawing.say(f"the course of {label}")
        cell, record = drawing.cell(label, "moons")
        panels += [
            draw("moons", view, f"{label}, step {step}", f"H = {entropy:.1f}")
            for step, entropy, view in views_on_the_way(cell, record)
        ]
    return panels


def views_on_the_way(cell: Cell, record: Record) -> list[tuple[int, float, View]]:
    """Step, entropy and view at the chosen shares of a fit's steps, of its first net and with the λ that its record chose."""
    task = task_of(cell.task, cell.seed)
    net = FitContext(task, cell.seed, cell.source).models().nets[0]
    settings = {**cell.config, "entropy_weight": float(record.chosen["entropy_weight"]), "patience": None}
    config: maxwent.Config = config_of(maxwent, settings, "config", maxwent.CONFIGS)
    config = replace(config, check_every=max(1, config.steps // 40))
    x = grid(task.inputs, POINTS[2])
    assert x is not None

    likelihood, batch = likelihood_of(task, net), cell.config.get("batch_size", 128)

    def look(predictive: Stochastic) -> tuple[float, View]:
        prediction = likelihood.predict(predictive.outputs(x, PREDICTIONS, clip=None, seed=cell.seed))
        return float(predictive.q.mean_log_square().detach().mean()), view_of(prediction)

    observed = course([net], task, config, cell.seed, look, batch_size=batch).observed
    wanted = [min(observed, key=lambda s, share=share: abs(s[0] - share * config.steps)) for share in SHARES]
    return [(step, *pair) for step, pair in wanted]


def amplitudes(drawing: Drawing) -> list[Panel]:
    """Figure 6: mean φ over amplitude in the hidden layers, of MaxWEnt and of a Bayesian net."""
    panels: list[Panel] = []
    for label in (PLAIN, "BNN ×1"):
        if not drawing.has(label, "moons"):
            continue
        drawing.say(f"amplitudes of {label}")
        cell, record = drawing.cell(label, "moons")
        task: Task = task_of("moons", cell.seed)
        fitted = refit(cell, record, task)
        if isinstance(fitted.predictive, Stochastic):
            made = read_as(replace(cell, members=5), fitted, task)
            panels += [
                replace(p, title=f"{label}, {p.title}") for p in amplitude_panels(diagnose(made, task.train, draws=DRAWS))[1:]
            ]
    return panels


# ------------------------------------------------------------------------------------------------ CityCam

DAY_TASK = "citycam/weather"
DAY_METHODS = ("Deep ensemble ×5", "MaxWEnt-SVD ×1")


def day_figures(results: Results, folder: Path, say: Say) -> dict[str, list[Panel]]:
    """Vehicles counted and predicted on the OOD frames, hour by hour, for an ensemble and for MaxWEnt."""
    panels: list[Panel] = []
    for cell, record in results.ok:
        if cell.task == DAY_TASK and cell.label in DAY_METHODS and cell.seed == results.plan.seeds[0]:
            say(f"{cell.label} over the day")
            shift = load("weather", cell.seed)
            guard = read_as(cell, refit(cell, record, shift.task), shift.task)
            prediction = guard.predict(next(iter(shift.task.ood.values())), clip=None)
            assert prediction.mean is not None
            assert prediction.std is not None
            mean, std = (shift.unit * t.flatten().numpy() for t in (prediction.mean, prediction.std))
            mean = mean + shift.centre
            panels.append(day(shift.frames["ood"], mean, std, cell.label))
    return {"figure-7-day": panels} if panels else {}


def day(frames: list[Any], mean: Any, std: Any, title: str) -> Panel:
    """One method's panel; `frames` have a `time` and a number of `vehicles`."""
    hours = np.array([frame.time.hour + frame.time.minute / 60 + frame.time.second / 3600 for frame in frames])
    truth = np.array([float(frame.vehicles) for frame in frames])
    top = 2.0 * max(1.0, float(truth.max()))
    svg = day_panel(hours, truth, mean, std, limits=(-top / 2, top))
    early, late = hours <= np.quantile(hours, 0.1), hours >= np.quantile(hours, 0.9)
    alt = f"{title}: standard deviation {std[early].mean():.2g} vehicles early, {std[late].mean():.2g} late."
    return Panel(svg, title, alt)
