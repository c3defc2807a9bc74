"""Panels of experiments: confidence bands, uncertainty maps, histograms, ROC curves, small images; and sheets of several.

Every panel of a kind has the same size and axes, so that a row of them can be read across.
"""

from __future__ import annotations

import html
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from offmap.atomic import write_whole
from offmap.evaluation import Evaluation
from offmap.extras import require
from offmap.report.curves import DECADES, roc
from offmap.report.page import MAP, SERIES, Array, Panel, colour, draw_svg, gallery, legend, series, themed

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SETS = ("id", "ood", "series1", "series2", "series5")
"""Colours of data sets in histograms: the in-distribution one first."""

CLASSES = ("#ffffff", "#ffc24d")
"""Colours of two classes on a map."""

GAP, CAPTION = 14.0, 30.0
"""Points between the panels of a sheet, and above each for its title."""


def band_panel(
    x: Array, mean: Array, std: Array, *, points: tuple[Array, Array], truth: Array, limits: tuple[float, float]
) -> str:
    """Draw mean ± 2 standard deviations over x, the true curve and the training points; cut at the limits of y."""
    frame = 3 * np.array(limits)
    low, high, middle = (np.clip(mean + side * 2 * std, *frame) for side in (-1, 1, 0))

    def draw(axes: Axes) -> None:
        axes.fill_between(x, low, high, color=colour("band"), linewidth=0)
        axes.plot(x, truth, color=colour("ink"), linewidth=1, linestyle=(0, (4, 2)))
        axes.plot(x, middle, color=colour("series4"), linewidth=1.4)
        axes.plot(*points, "o", markersize=2.6, color=colour("ood"), markeredgewidth=0, alpha=0.75)
        axes.set(xlim=(x[0], x[-1]), ylim=limits, xticks=(-1, 0, 1), yticks=(-2, -1, 0, 1, 2), xlabel="x", ylabel="y")

    return draw_svg(draw, width=3.1, height=2.3, margins=(0.38, 0.36, 0.06, 0.08))


def map_panel(values: Array, *, half: float, points: Sequence[Array], top: float) -> str:
    """Draw uncertainty, (n, n) with y upwards, on the square [−half, half]², from 0 (light) to `top` (dark); points by class."""
    colours = require("matplotlib.colors", "figures")
    cmap = colours.LinearSegmentedColormap.from_list("calm to uncertain", MAP)

    def draw(axes: Axes) -> None:
        extent = (-half, half, -half, half)
        # "none" stores the values as they are, for the browser to scale
        axes.imshow(values, extent=extent, origin="lower", vmin=0, vmax=top, cmap=cmap, interpolation="none")
        for group, fill in zip(points, CLASSES, strict=False):
            axes.plot(*group.T, "o", markersize=2.6, color=fill, markeredgecolor="#10203a", markeredgewidth=0.35)
        axes.set(xlim=(-half, half), ylim=(-half, half), xticks=(-2, 0, 2), yticks=(-2, 0, 2))

    crisp = draw_svg(draw, width=2.6, height=2.6, margins=(0.24, 0.24, 0.04, 0.04))
    return re.sub(r"image-rendering:[\w-]+;?", "", crisp)  # smoothly


def histogram_panel(sets: Mapping[str, Array], *, bins: Array, threshold: float | None = None, label: str = "score") -> str:
    """Draw shares of rows by score, the first set in-distribution and the others OOD; a vertical line marks the threshold."""
    log = bins[0] > 0 and bins[-1] / bins[0] > DECADES
    shades = [colour(name) for name in SETS]

    def draw(axes: Axes) -> None:
        for values, shade in zip(sets.values(), shades, strict=False):
            inside = np.clip(np.nan_to_num(values, nan=np.inf), bins[0], bins[-1])
            shares = np.histogram(inside, bins)[0] / len(inside)
            axes.stairs(shares, bins, fill=True, color=shade, alpha=0.45, linewidth=0)
            axes.stairs(shares, bins, color=shade, linewidth=1)
        if threshold is not None and bins[0] <= threshold <= bins[-1]:
            axes.axvline(threshold, color=colour("ink"), linewidth=0.9, linestyle=(0, (2, 2)))
        if log:
            axes.set_xscale("log")
            axes.minorticks_off()
        axes.set(xlim=(bins[0], bins[-1]), ylim=(0, None), xlabel=label, yticks=())
        axes.spines["left"].set_visible(False)

    return draw_svg(draw, width=3.1, height=1.6, margins=(0.08, 0.36, 0.08, 0.06))


def score_bins(scores: Sequence[Array], *, least: float = 0.0, count: int = 44) -> Array:
    """Return bins that hold all finite scores from `least` on; evenly spaced on a log axis when they span decades.

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


def roc_panel(curves: Sequence[tuple[Array, Array]]) -> str:
    """Draw ROC curves of several scorers in the colours of their order; a thin line marks 5 % false alarms."""

    def draw(axes: Axes) -> None:
        axes.axvline(0.05, color=colour("line"), linewidth=0.8)
        for position, (alarms, catches) in enumerate(curves):
            shade, dashes = series(position)
            axes.plot(alarms, catches, color=shade, linestyle=(0, dashes) if dashes else "-", linewidth=1.6)
        ticks = (0, 0.25, 0.5, 0.75, 1)
        axes.set(xlim=(-0.015, 1.015), ylim=(-0.015, 1.015), xticks=ticks, yticks=ticks)
        axes.set(xlabel="in-distribution data flagged", ylabel="OOD data caught")

    return draw_svg(draw, width=3.6, height=2.9, margins=(0.5, 0.38, 0.08, 0.06))


def image_panel(images: Array, captions: Sequence[str]) -> str:
    """Draw small grey images (n, h, w) in one row, dark on light, a word below each."""
    count, height, width = images.shape
    sheet = np.full((height, count * (width + 1) - 1), np.nan)
    for position, image in enumerate(images):
        sheet[:, position * (width + 1) : position * (width + 1) + width] = image

    def draw(axes: Axes) -> None:
        axes.imshow(sheet, cmap="gray_r", interpolation="none", vmin=0, vmax=1, aspect="auto")
        for position, caption in enumerate(captions):
            middle = (position + 0.5) * (width + 1) - 1
            axes.text(middle, height + 1.2, caption, ha="center", va="center", color=colour("soft"))
        axes.set_axis_off()

    return draw_svg(draw, width=0.45 * count, height=0.7, margins=(0.02, 0.26, 0.02, 0.02))


def score_panels(
    evaluation: Evaluation, *, thresholds: Mapping[str, float] | None = None, alone: Sequence[str] = (), least: float = 0.0
) -> list[Panel]:
    """Draw a histogram per scorer on one common axis from `least` on; scorers in `alone` measure something else, on their own."""
    scores = {name: {k: np.asarray(v) for k, v in sets.items()} for name, sets in evaluation.scores.items()}
    common = score_bins([s for name, sets in scores.items() if name not in alone for s in sets.values()], least=least)
    panels: list[Panel] = []
    for name, sets in scores.items():
        bins = score_bins(list(sets.values()), least=-np.inf) if name in alone else common
        label = "own scale" if name in alone else "score"
        svg = histogram_panel(sets, bins=bins, threshold=(thresholds or {}).get(name), label=label)
        panels.append(Panel(svg, name, f"Histogram of the scores of {name}. {_medians(sets)}"))
    return panels


def _medians(sets: Mapping[str, Array]) -> str:
    return "Median score: " + ", ".join(f"{float(np.median(v)):.2g} on {k}" for k, v in sets.items()) + "."


def roc_gallery(evaluation: Evaluation) -> str:
    """Draw ROC curves of all scorers, one panel per OOD data set, with a legend."""
    names = list(dict.fromkeys(str(row["set"]) for row in evaluation.rows if "auroc" in row))
    panels: list[Panel] = []
    for ood in names:
        areas = {row["scorer"]: row["auroc"] for row in evaluation.rows if row["set"] == ood}
        curves = [roc(np.asarray(s["test"]), np.asarray(s[ood])) for s in evaluation.scores.values()]
        words = ", ".join(f"{name} {100 * area:.1f}" for name, area in areas.items())
        panels.append(Panel(roc_panel(curves), f"OOD data: {ood}", f"ROC curves, AUROC in percent: {words}."))
    return gallery(panels, legend=series_legend(list(evaluation.scores)), width="19rem")


def series_legend(names: Sequence[str]) -> str:
    """Explain colours and dashes of series by their order."""
    looks = [(" ".join(f"{1.3 * d:g}" for d in series(i)[1]), i % SERIES) for i in range(len(names))]
    return legend([(f"line {d}".strip(), f"var(--series{i})", n) for (d, i), n in zip(looks, names, strict=True)])


def render_sheet(panels: Sequence[Panel], columns: int) -> str:
    """Set panels in rows, as far apart as the largest needs, each with its title, in the light colours on paper."""
    sizes = [re.findall(r'(?:width|height)="([\d.]+)pt"', panel.svg)[:2] for panel in panels]
    width, height = (max(float(size[axis]) for size in sizes) for axis in (0, 1))
    rows = -(-len(panels) // columns)
    total = columns * (width + GAP) + GAP, rows * (height + CAPTION + GAP) + GAP
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" role="img" '
        f'width="{total[0]:.0f}pt" height="{total[1]:.0f}pt" viewBox="0 0 {total[0]:.0f} {total[1]:.0f}" '
        f'font-family="system-ui, sans-serif">',
        f'<rect width="100%" height="100%" fill="{colour("paper")}"/>',
    ]
    for place, panel in enumerate(panels):
        x, y = GAP + place % columns * (width + GAP), GAP + place // columns * (height + CAPTION + GAP)
        words = f'<tspan font-weight="bold" fill="{colour("ink")}">{html.escape(panel.title)}</tspan>'
        subtitle = f'<tspan x="{x:.0f}" dy="11" fill="{colour("soft")}">{html.escape(panel.subtitle)}</tspan>'
        parts.append(f'<text x="{x:.0f}" y="{y + 8:.0f}" font-size="9">{words}{subtitle}</text>')
        parts.append(_plain(panel).replace("<svg", f'<svg x="{x:.0f}" y="{y + CAPTION - 6:.0f}"', 1))
    return _shortened("\n".join([*parts, "</svg>"])) + "\n"


def _shortened(svg: str) -> str:
    """State the looks of repeated marks once, as classes."""
    looks = list(dict.fromkeys(re.findall(r'<use [^>]*style="([^"]*)"', svg)))
    for place, look in enumerate(looks):
        svg = re.sub(rf'(<use [^>]*)style="{re.escape(look)}"', rf'\1class="m{place}"', svg)
    rules = "".join(f".m{place} {{ {look} }}" for place, look in enumerate(looks))
    return svg.replace("<rect ", f"<style>{rules}</style>\n<rect ", 1)


def _plain(panel: Panel) -> str:
    """Give a panel unique ids and plain colours."""
    svg = themed(panel.svg, panel.title + panel.subtitle + panel.alt)
    svg = svg.replace("var(--font)", "system-ui, sans-serif")
    svg = re.sub(r"var\(--(\w+)\)", lambda found: colour(found[1]), svg)
    svg = re.sub(r'(width|height)="([\d.]+)pt"', r'\1="\2"', svg, count=2)  # in the sheet's own units
    return "\n".join(line.rstrip() for line in svg.splitlines())


def write_sheet(path: Path, panels: Sequence[Panel], columns: int) -> Path:
    """Write a sheet, and return its path."""
    write_whole(path, render_sheet(panels, columns).encode())
    return path
