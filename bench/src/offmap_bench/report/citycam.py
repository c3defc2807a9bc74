"""Figure 7 of the paper: intervals over the day of the weather shift of CityCam."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from offmap.report.figures import Panel
from offmap_bench.report.curves import day_panel
from offmap_bench.runner.table import Results
from offmap_bench.runner.watch import read_as, refitted
from offmap_bench.tasks.citycam import load

TASK = "citycam/weather"
METHODS = ("Deep ensemble ×5", "MaxWEnt-SVD ×1")


def figures(results: Results, folder: Path, say: Callable[[str], None]) -> dict[str, list[Panel]]:
    """Vehicles counted and predicted on the OOD frames, hour by hour, for an ensemble and for MaxWEnt."""
    panels: list[Panel] = []
    for cell, record in results.ok:
        if cell.task == TASK and cell.label in METHODS and cell.seed == results.plan.seeds[0]:
            say(f"{cell.label} over the day")
            shift = load("weather", cell.seed)
            guard = read_as(cell, refitted(cell, record, shift.task), shift.task)
            found = guard.predict(next(iter(shift.task.ood.values())), clip=None)
            assert found.mean is not None
            assert found.std is not None
            mean, std = (shift.unit * found.mean.flatten().numpy() + shift.centre, shift.unit * found.std.flatten().numpy())
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
