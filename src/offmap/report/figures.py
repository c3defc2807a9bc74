"""Single panels as inline SVG: confidence bands, uncertainty maps, score histograms, ROC curves, small pictures.

Every panel of a kind has the same size and axes, so that a row of them can be read across.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from offmap.extras import require
from offmap.report import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Array = NDArray[np.floating[Any]]
Draw = Callable[["Axes"], None]

DECADES = 50
"""Scores that span more than this factor are drawn on a log axis."""


@dataclass(frozen=True)
class Panel:
    """One drawing: SVG for a page, a title above it, and what it shows in words for those who cannot see it."""

    svg: str
    title: str
    alt: str
    subtitle: str = ""


def drawn(draw: Draw, *, width: float, height: float, margins: tuple[float, float, float, float]) -> str:
    """The SVG of what `draw(axes)` does; sizes and margins (left, bottom, right, top) in inches, so that panels align."""
    matplotlib, figures = require("matplotlib"), require("matplotlib.figure")
    left, bottom, right, top = margins
    box = (left / width, bottom / height, 1 - (left + right) / width, 1 - (bottom + top) / height)
    with matplotlib.rc_context(style.RC):
        figure = figures.Figure(figsize=(width, height))
        draw(figure.add_axes(box))
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()


def band_panel(
    x: Array, mean: Array, std: Array, *, points: tuple[Array, Array], truth: Array, limits: tuple[float, float]
) -> str:
    """Mean ± 2 standard deviations over x, the true curve and the training points; cut at the limits of y."""
    frame = 3 * np.array(limits)
    low, high, middle = (np.clip(mean + side * 2 * std, *frame) for side in (-1, 1, 0))

    def draw(axes: Axes) -> None:
        axes.fill_between(x, low, high, color=style.colour("band"), linewidth=0)
        axes.plot(x, truth, color=style.colour("ink"), linewidth=1, linestyle=(0, (4, 2)))
        axes.plot(x, middle, color=style.colour("series4"), linewidth=1.4)
        axes.plot(*points, "o", markersize=2.6, color=style.colour("OOD"), markeredgewidth=0, alpha=0.75)
        axes.set(xlim=(x[0], x[-1]), ylim=limits, xticks=(-1, 0, 1), yticks=(-2, -1, 0, 1, 2), xlabel="x", ylabel="y")

    return drawn(draw, width=3.1, height=2.3, margins=(0.38, 0.36, 0.06, 0.08))


def map_panel(values: Array, *, half: float, points: Sequence[Array], top: float) -> str:
    """Uncertainty on the square [−half, half]², (n, n) with y upwards, from 0 (light) to `top` (dark), and points by class."""
    colours = require("matplotlib.colors")
    cmap = colours.LinearSegmentedColormap.from_list("calm to uncertain", style.MAP)

    def draw(axes: Axes) -> None:
        extent = (-half, half, -half, half)
        # "none" stores the values as they are, for the browser to scale
        axes.imshow(values, extent=extent, origin="lower", vmin=0, vmax=top, cmap=cmap, interpolation="none")
        for group, fill in zip(points, style.CLASSES, strict=False):
            axes.plot(*group.T, "o", markersize=2.6, color=fill, markeredgecolor="#10203a", markeredgewidth=0.35)
        axes.set(xlim=(-half, half), ylim=(-half, half), xticks=(-2, 0, 2), yticks=(-2, 0, 2))

    crisp = drawn(draw, width=2.6, height=2.6, margins=(0.24, 0.24, 0.04, 0.04))
    return re.sub(r"image-rendering:[\w-]+;?", "", crisp)  # smoothly


def histogram_panel(sets: Mapping[str, Array], *, bins: Array, threshold: float | None = None, label: str = "score") -> str:
    """Shares of examples by score, the first set in-distribution and the others OOD; a vertical line marks the alarm threshold."""
    log = bins[0] > 0 and bins[-1] / bins[0] > DECADES
    shades = [style.colour(name) for name in style.SETS]

    def draw(axes: Axes) -> None:
        for values, shade in zip(sets.values(), shades, strict=False):
            inside = np.clip(np.nan_to_num(values, nan=np.inf), bins[0], bins[-1])
            shares = np.histogram(inside, bins)[0] / len(inside)
            axes.stairs(shares, bins, fill=True, color=shade, alpha=0.45, linewidth=0)
            axes.stairs(shares, bins, color=shade, linewidth=1)
        if threshold is not None and bins[0] <= threshold <= bins[-1]:
            axes.axvline(threshold, color=style.colour("ink"), linewidth=0.9, linestyle=(0, (2, 2)))
        if log:
            axes.set_xscale("log")
            axes.minorticks_off()
        axes.set(xlim=(bins[0], bins[-1]), ylim=(0, None), xlabel=label, yticks=())
        axes.spines["left"].set_visible(False)

    return drawn(draw, width=3.1, height=1.6, margins=(0.08, 0.36, 0.08, 0.06))


def score_bins(scores: Sequence[Array], *, least: float = 0.0, count: int = 44) -> Array:
    """Bins that hold all finite scores from `least` on; evenly spaced on a log axis when they span decades.

    >>> score_bins([np.array([1.0, 2.0]), np.array([4.0])], count=3)
    array([1., 2., 3., 4.])
    """
    values = np.concatenate([np.ravel(s) for s in scores]).astype(np.float64)
    values = values[np.isfinite(values)]
    if not len(values):
        return np.linspace(0, 1, count + 1)
    low, high = max(float(values.min()), least), float(values.max())
    if high <= low:
        return np.linspace(low - 0.5, low + 0.5, count + 1)
    if low <= 0 or high / low <= DECADES:
        return np.linspace(low, high, count + 1)
    return np.geomspace(low, high, count + 1)


def roc(familiar: Array, strange: Array) -> tuple[Array, Array]:
    """False alarms (share of in-distribution data) and catches (share of OOD data) as the threshold falls.

    >>> [curve.tolist() for curve in roc(np.array([0.1, 0.6]), np.array([0.5, 0.9]))]
    [[0.0, 0.0, 0.5, 0.5, 1.0], [0.0, 0.5, 0.5, 1.0, 1.0]]
    """
    thresholds = np.unique(np.concatenate([familiar, strange]))
    alarms, catches = (1 - np.searchsorted(np.sort(s), thresholds) / len(s) for s in (familiar, strange))
    return np.append(alarms, 0.0)[::-1], np.append(catches, 0.0)[::-1]


def roc_panel(curves: Sequence[tuple[Array, Array]]) -> str:
    """ROC curves of several scorers in the colours of their order; a thin line marks 5 % false alarms."""

    def draw(axes: Axes) -> None:
        axes.axvline(0.05, color=style.colour("line"), linewidth=0.8)
        for position, (alarms, catches) in enumerate(curves):
            shade, dashes = style.series(position)
            axes.plot(alarms, catches, color=shade, linestyle=(0, dashes) if dashes else "-", linewidth=1.6)
        ticks = (0, 0.25, 0.5, 0.75, 1)
        axes.set(xlim=(-0.015, 1.015), ylim=(-0.015, 1.015), xticks=ticks, yticks=ticks)
        axes.set(xlabel="in-distribution data flagged", ylabel="OOD data caught")

    return drawn(draw, width=3.6, height=2.9, margins=(0.5, 0.38, 0.08, 0.06))


def picture_panel(images: Array, captions: Sequence[str]) -> str:
    """Small grey pictures (n, h, w) in one row, dark on light, a word below each."""
    count, height, width = images.shape
    sheet = np.full((height, count * (width + 1) - 1), np.nan)
    for position, image in enumerate(images):
        sheet[:, position * (width + 1) : position * (width + 1) + width] = image

    def draw(axes: Axes) -> None:
        axes.imshow(sheet, cmap="gray_r", interpolation="none", vmin=0, vmax=1, aspect="auto")
        for position, caption in enumerate(captions):
            middle = (position + 0.5) * (width + 1) - 1
            axes.text(middle, height + 1.2, caption, ha="center", va="center", color=style.colour("soft"))
        axes.set_axis_off()

    return drawn(draw, width=0.45 * count, height=0.7, margins=(0.02, 0.26, 0.02, 0.02))
