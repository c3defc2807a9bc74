"""Panels of experiments, each the SVG of one drawing, and sheets of several.

Every panel of a kind has the same size and axes, so that a row of them can be read across.
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

import numpy as np

from offmap.atomic import write_whole
from offmap.checks import require
from offmap.evaluation import Evaluation
from offmap.report.curves import DECADES, roc
from offmap.report.page import MAP, SERIES, Array, Panel, apply_theme, colour, draw_svg, gallery, legend, series
from offmap_bench.tasks.synthetic import SQUARE, truth
from offmap_bench.tasks.task import Pair

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SETS = ("id", "ood", "series1", "series2", "series5")  # colours of data sets in histograms: the in-distribution one first
CLASSES = ("#ffffff", "#ffc24d")  # colours of two classes on a map
TOP = math.log(2)  # entropy of an even choice
GAP, CAPTION = 14.0, 30.0  # points between the panels of a sheet, and above each for its title


def band_panel(x: Array, mean: Array, std: Array, train: Pair) -> str:
    """Draw mean ± 2 standard deviations over x, the true curve of the regression and its training points."""
    low, high, middle = (np.clip(mean + side * 2 * std, -6, 6) for side in (-1, 1, 0))

    def draw(axes: Axes) -> None:
        axes.fill_between(x, low, high, color=colour("band"), linewidth=0)
        axes.plot(x, truth(np.asarray(x, np.float64)), color=colour("ink"), linewidth=1, linestyle=(0, (4, 2)))
        axes.plot(x, middle, color=colour("series4"), linewidth=1.4)
        axes.plot(*(t.flatten() for t in train), "o", markersize=2.6, color=colour("ink"), markeredgewidth=0, alpha=0.6)
        axes.set(xlim=(x[0], x[-1]), ylim=(-2, 2), xticks=(-1, 0, 1), yticks=(-2, -1, 0, 1, 2), xlabel="input", ylabel="output")

    return draw_svg(draw, width=3.1, height=2.3, margins=(0.38, 0.36, 0.06, 0.08))


def map_panel(entropy: Array, train: Pair) -> str:
    """Draw the entropy around the two moons, (n, n) with y upwards, from 0 (light) to log 2 (dark), and the training points."""
    cmap = require("matplotlib.colors", "figures").LinearSegmentedColormap.from_list("certain to uncertain", MAP)

    def draw(axes: Axes) -> None:
        side = (-SQUARE, SQUARE)
        # "none" stores the values as they are, for the browser to scale
        axes.imshow(entropy, extent=(*side, *side), origin="lower", vmin=0, vmax=TOP, cmap=cmap, interpolation="none")
        for label, fill in enumerate(CLASSES):
            points = train[0][train[1] == label].T
            axes.plot(*points, "o", markersize=2.6, color=fill, markeredgecolor="#10203a", markeredgewidth=0.35)
        axes.set(xlim=side, ylim=side, xticks=(-2, 0, 2), yticks=(-2, 0, 2), xlabel="first input", ylabel="second input")

    crisp = draw_svg(draw, width=2.76, height=2.72, margins=(0.4, 0.36, 0.04, 0.04))
    return re.sub(r"image-rendering:[\w-]+;?", "", crisp)  # smoothly


def view_panel(view: Mapping[str, Array], train: Pair, title: str, subtitle: str = "") -> Panel:
    """Draw what a guard says on the grid of a task of one or two inputs: a band, or a map."""
    if "mean" in view:
        std = view["std"]
        svg = band_panel(np.linspace(-1.5, 1.5, len(std)), view["mean"], std, train)
        edges = f"{std[0]:.2g} at the left edge, {std[len(std) // 2]:.2g} in the middle, {std[-1]:.2g} at the right edge"
        words = f"mean ± 2 standard deviations over x; one is {edges}"
    else:
        svg, dark = map_panel(view["entropy"], train), 100 * float((view["entropy"] > TOP / 2).mean())
        words = f"map of the predictive entropy around two moons, above half its maximum on {dark:.0f} %"
    return Panel(svg, title, f"{', '.join(filter(None, [title, subtitle]))}: {words}.", subtitle)


def histogram_panel(sets: Mapping[str, Array], *, bins: Array, threshold: float | None = None, label: str = "score") -> str:
    """Draw shares of rows by score, the first set in-distribution and the others OOD; a vertical line marks the threshold."""

    def draw(axes: Axes) -> None:
        for values, shade in zip(sets.values(), map(colour, SETS), strict=False):
            inside = np.clip(np.nan_to_num(values, nan=np.inf), bins[0], bins[-1])
            shares = np.histogram(inside, bins)[0] / len(inside)
            axes.stairs(shares, bins, fill=True, color=shade, alpha=0.45, linewidth=0)
            axes.stairs(shares, bins, color=shade, linewidth=1)
        if threshold is not None and bins[0] <= threshold <= bins[-1]:
            axes.axvline(threshold, color=colour("ink"), linewidth=0.9, linestyle=(0, (2, 2)))
        if bins[0] > 0 and bins[-1] / bins[0] > DECADES:
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
    low, high = (max(float(values.min()), least), float(values.max())) if len(values) else (0.0, 1.0)
    if high <= low:
        low, high = low - 0.5, low + 0.5
    space = np.linspace if low <= 0 or high / low <= DECADES else np.geomspace
    return space(low, high, count + 1)


def roc_panel(curves: Sequence[tuple[Array, Array]]) -> str:
    """Draw ROC curves of several scorers in the colours of their order; a thin line marks 5 % false alarms."""

    def draw(axes: Axes) -> None:
        axes.axvline(5, color=colour("line"), linewidth=0.8)
        for position, (flagged, caught) in enumerate(curves):
            _plot_series(axes, position, 100 * flagged, 100 * caught, linewidth=1.6)
        ticks = (0, 25, 50, 75, 100)
        axes.set(xlim=(-1.5, 101.5), ylim=(-1.5, 101.5), xticks=ticks, yticks=ticks)
        axes.set(xlabel="in-distribution rows flagged, %", ylabel="OOD rows caught, %")

    return draw_svg(draw, width=3.6, height=2.9, margins=(0.5, 0.38, 0.08, 0.06))


def _plot_series(axes: Axes, position: int, x: Array, y: Array, linewidth: float) -> None:
    shade, dashes = series(position)
    axes.plot(x, y, color=shade, linestyle=(0, dashes) if dashes else "-", linewidth=linewidth)


def image_panel(images: Array, captions: Sequence[str]) -> str:
    """Draw small grey images (n, h, w) in one row, dark on light, a word below each."""
    count, height, width = images.shape
    sheet = np.pad(images, ((0, 0), (0, 0), (0, 1)), constant_values=np.nan).swapaxes(0, 1).reshape(height, -1)[:, :-1]

    def draw(axes: Axes) -> None:
        axes.imshow(sheet, cmap="gray_r", interpolation="none", vmin=0, vmax=1, aspect="auto")
        for position, caption in enumerate(captions):
            middle = (position + 0.5) * (width + 1) - 1
            axes.text(middle, height + 1.2, caption, ha="center", va="center", color=colour("soft"))
        axes.set_axis_off()

    return draw_svg(draw, width=0.45 * count, height=0.7, margins=(0.02, 0.26, 0.02, 0.02))


def dots_panel(lines: Mapping[str, tuple[Sequence[float], float | None]], *, label: str) -> str:
    """Draw {method: (a value per task, the printed mean or None)}: dots, a bar at their mean, a diamond at the printed mean."""
    left = 0.15 + 0.062 * max(map(len, lines), default=0)  # inches of a letter

    def draw(axes: Axes) -> None:
        for place, (values, printed) in enumerate(lines.values()):
            axes.plot([0, 100], [place, place], color=colour("line"), linewidth=0.5, zorder=0)
            if values:
                level, mean = [place] * len(values), fmean(values)
                axes.plot(values, level, "o", markersize=3, alpha=0.55, color=colour("id"), markeredgewidth=0)
                axes.plot([mean, mean], [place - 0.34, place + 0.34], color=colour("ink"), linewidth=1.8)
            if printed is not None:
                axes.plot(printed, place, "D", markersize=4, color="none", markeredgecolor=colour("ood"))
        all_values = [v for values, printed in lines.values() for v in (*values, *([] if printed is None else [printed]))]
        low = 10 * math.floor(min(all_values, default=0) / 10)
        axes.set(xlim=(low - 1, 101), ylim=(len(lines) - 0.4, -0.6), xlabel=label)
        axes.set_yticks(range(len(lines)), list(lines))
        axes.tick_params(axis="y", length=0, labelcolor=colour("ink"))
        axes.spines["left"].set_visible(False)

    return draw_svg(draw, width=left + 4.2, height=0.5 + 0.2 * max(1, len(lines)), margins=(left, 0.38, 0.1, 0.06))


def shown_range(values: Array, marks: Sequence[float] = ()) -> tuple[float, float] | None:
    """Return ends of an axis that leave out the wildest twentieth on either side, with a little room; None for nothing.

    >>> low, high = shown_range(np.array([0.0, 1.0, math.nan, math.inf]))
    >>> round(low, 3), round(high, 3)
    (-0.036, 1.036)
    """
    finite = values[np.isfinite(values)]
    if not len(finite):
        return None
    low, high = (float(pick([end, *marks])) for pick, end in zip((min, max), np.quantile(finite, (0.05, 0.95)), strict=True))
    room = 0.05 * (high - low) if high > low else 0.5
    # where the rest is not far off, all of it is shown
    least, most = min(low, float(finite.min())), max(high, float(finite.max()))
    low, high = least if low - least < 4 * room else low, most if most - high < 4 * room else high
    return low - 0.8 * room if low == least else low, high + 0.8 * room if high == most else high


def day_panel(hours: Array, truth: Array, mean: Array, std: Array, *, limits: tuple[float, float]) -> str:
    """Draw counts over the hours of a day: the truth as dots, the prediction as a line and mean ± std as a band."""
    order = np.argsort(hours)
    x, low, middle, high = hours[order], *(np.clip(mean + side * std, *limits)[order] for side in (-1, 0, 1))

    def draw(axes: Axes) -> None:
        axes.fill_between(x, low, high, color=colour("band"), linewidth=0)
        axes.plot(x, middle, color=colour("series4"), linewidth=1)
        axes.plot(x, truth[order], "o", markersize=1.8, color=colour("ood"), markeredgewidth=0, alpha=0.7)
        axes.set(ylim=limits, xlabel="hour", ylabel="vehicles")

    return draw_svg(draw, width=4.6, height=2.1, margins=(0.45, 0.36, 0.08, 0.08))


def score_panels(
    evaluation: Evaluation, *, thresholds: Mapping[str, float] | None = None, alone: Sequence[str] = (), least: float = 0.0
) -> list[Panel]:
    """Draw a histogram per scorer on one common axis from `least` on; scorers in `alone` measure something else, on their own."""
    scores = {name: {k: np.asarray(v) for k, v in sets.items()} for name, sets in evaluation.scores.items()}
    common = score_bins([s for name, sets in scores.items() if name not in alone for s in sets.values()], least=least)
    panels: list[Panel] = []
    for name, sets in scores.items():
        bins, label = (score_bins(list(sets.values()), least=-np.inf), "score, own scale") if name in alone else (common, "score")
        svg = histogram_panel(sets, bins=bins, threshold=(thresholds or {}).get(name), label=label)
        medians = ", ".join(f"{float(np.median(v)):.2g} on {k}" for k, v in sets.items())
        panels.append(Panel(svg, name, f"Histogram of the scores of {name}. Median score: {medians}."))
    return panels


def roc_gallery(evaluation: Evaluation) -> str:
    """Draw ROC curves of all scorers, one panel per OOD data set, with a legend."""
    panels: list[Panel] = []
    for ood in dict.fromkeys(str(row["set"]) for row in evaluation.rows if "auroc" in row):
        curves = [roc(np.asarray(s["test"]), np.asarray(s[ood])) for s in evaluation.scores.values()]
        areas = ", ".join(f"{row['scorer']} {100 * row['auroc']:.1f}" for row in evaluation.rows if row["set"] == ood)
        panels.append(Panel(roc_panel(curves), f"OOD data: {ood}", f"ROC curves, AUROC in percent: {areas}."))
    return gallery(panels, legend=series_legend(list(evaluation.scores)), width="19rem")


def series_legend(names: Sequence[str]) -> str:
    """Explain colours and dashes of series by their order."""
    dashes = [" ".join(f"{1.3 * d:g}" for d in series(i)[1]) for i in range(len(names))]
    return legend([(f"line {dashes[i]}".strip(), f"var(--series{i % SERIES})", name) for i, name in enumerate(names)])


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
        svg = apply_theme(panel.svg, panel.title + panel.subtitle + panel.alt).replace("var(--font)", "system-ui, sans-serif")
        svg = re.sub(r"var\(--(\w+)\)", lambda match: colour(match[1]), svg)
        svg = re.sub(r'(width|height)="([\d.]+)pt"', r'\1="\2"', svg, count=2)  # in the sheet's own units
        svg = "\n".join(line.rstrip() for line in svg.splitlines())
        parts.append(svg.replace("<svg", f'<svg x="{x:.0f}" y="{y + CAPTION - 6:.0f}"', 1))
    sheet = "\n".join([*parts, "</svg>"])
    looks = list(dict.fromkeys(re.findall(r'<use [^>]*style="([^"]*)"', sheet)))  # of repeated marks, stated once as classes
    for place, look in enumerate(looks):
        sheet = re.sub(rf'(<use [^>]*)style="{re.escape(look)}"', rf'\1class="m{place}"', sheet)
    rules = "".join(f".m{place} {{ {look} }}" for place, look in enumerate(looks))
    return sheet.replace("<rect ", f"<style>{rules}</style>\n<rect ", 1) + "\n"


def write_sheet(path: Path, panels: Sequence[Panel], columns: int) -> Path:
    write_whole(path, render_sheet(panels, columns).encode())
    return path
