"""Panels of experiments: a dot per task for every method, quantities over the steps of a fit, and intervals over a day."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING

import numpy as np

from offmap.report.page import Array, colour, draw_svg, series

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ROW = 0.2
"""Height of a method's line of dots, in inches."""

LETTER = 0.062
"""Width of a letter of a method's name, in inches."""


@dataclass(frozen=True)
class Dots:
    """One line of a dot panel: a value per task, and the printed mean if there is one."""

    label: str
    values: Sequence[float]
    printed: float | None = None


def dots_panel(lines: Sequence[Dots], *, label: str) -> str:
    """A small dot per task, a bar at their mean, and a diamond where the paper's printed mean is; methods from top to bottom."""
    left = 0.15 + LETTER * max((len(line.label) for line in lines), default=0)

    def draw(axes: Axes) -> None:
        for place, line in enumerate(lines):
            axes.plot([0, 100], [place, place], color=colour("line"), linewidth=0.5, zorder=0)
            if line.values:
                shade, level = colour("id"), [place] * len(line.values)
                axes.plot(line.values, level, "o", markersize=3, alpha=0.55, color=shade, markeredgewidth=0)
                mean = fmean(line.values)
                axes.plot([mean, mean], [place - 0.34, place + 0.34], color=colour("ink"), linewidth=1.8)
            if line.printed is not None:
                axes.plot(line.printed, place, "D", markersize=4, color="none", markeredgecolor=colour("ood"))
        values = [v for line in lines for v in (*line.values, *([] if line.printed is None else [line.printed]))]
        low = 10 * math.floor(min(values, default=0) / 10)
        axes.set(xlim=(low - 1, 101), ylim=(len(lines) - 0.4, -0.6), xlabel=label)
        axes.set_yticks(range(len(lines)), [line.label for line in lines])
        axes.tick_params(axis="y", length=0, labelcolor=colour("ink"))
        axes.spines["left"].set_visible(False)

    return draw_svg(draw, width=left + 4.2, height=0.5 + ROW * max(1, len(lines)), margins=(left, 0.38, 0.1, 0.06))


@dataclass(frozen=True)
class Line:
    """One fit over its steps: values, None where nothing was looked at, and the step whose state was kept."""

    steps: Sequence[int]
    values: Sequence[float | None]
    kept: int | None = None


def steps_panel(lines: Mapping[str, Line], *, label: str, bound: float | None = None) -> str:
    """One quantity over the steps, a line per series; τ dashed, and a dotted line at every step that was kept."""

    def draw(axes: Axes) -> None:
        for place, line in enumerate(lines.values()):
            seen = [(s, v) for s, v in zip(line.steps, line.values, strict=True) if v is not None and math.isfinite(v)]
            shade, dashes = series(place)
            if seen:
                axes.plot(*zip(*seen, strict=True), color=shade, linestyle=(0, dashes) if dashes else "-", linewidth=1.2)
            if line.kept is not None:
                axes.axvline(line.kept, color=shade, linewidth=0.8, linestyle=(0, (1, 2)))
        axes.set(xlabel="step", ylabel=label)
        if bound is not None:
            axes.axhline(bound, color=colour("ink"), linewidth=0.9, linestyle=(0, (4, 2)))
        limits = shown_range([v for line in lines.values() for v in line.values], bound)
        if limits is not None:
            axes.set_ylim(*limits)

    return draw_svg(draw, width=3.0, height=2.1, margins=(0.6, 0.38, 0.1, 0.08))


def shown_range(values: Sequence[float | None], bound: float | None = None) -> tuple[float, float] | None:
    """Ends of an axis that leave out the wildest twentieth on either side, with a little room; None for nothing.

    >>> low, high = shown_range([0.0, 1.0, None, math.inf])
    >>> round(low, 3), round(high, 3)
    (-0.036, 1.036)
    """
    finite = np.array([v for v in values if v is not None and math.isfinite(v)])
    if not len(finite):
        return None
    low, high = (float(v) for v in np.quantile(finite, (0.05, 0.95)))
    low, high = (min(low, bound), max(high, bound)) if bound is not None else (low, high)
    room = 0.05 * (high - low) if high > low else 0.5
    # where the rest is not far off, all of it is shown
    least, most = min(low, float(finite.min())), max(high, float(finite.max()))
    low, high = least if low - least < 4 * room else low, most if most - high < 4 * room else high
    return low - 0.8 * room if low == least else low, high + 0.8 * room if high == most else high


def day_panel(hours: Array, truth: Array, mean: Array, std: Array, *, limits: tuple[float, float]) -> str:
    """Counts over the hours of a day: the truth as dots, the prediction as a line and mean ± std as a band."""
    order = np.argsort(hours)
    x, y, middle, radius = (values[order] for values in (hours, truth, mean, std))

    def draw(axes: Axes) -> None:
        low, high = np.clip(middle - radius, *limits), np.clip(middle + radius, *limits)
        axes.fill_between(x, low, high, color=colour("band"), linewidth=0)
        axes.plot(x, np.clip(middle, *limits), color=colour("series4"), linewidth=1)
        axes.plot(x, y, "o", markersize=1.8, color=colour("ood"), markeredgewidth=0, alpha=0.7)
        axes.set(ylim=limits, xlabel="hour", ylabel="vehicles")

    return draw_svg(draw, width=4.6, height=2.1, margins=(0.45, 0.36, 0.08, 0.08))
