"""What all figures share: colours, axes, number formats, and single panels drawn by matplotlib as inline SVG.

Figures are drawn in the light colours; `themed` swaps each for the page's variable of that name, so that one drawing follows the
reader's screen. The series colours are Okabe and Ito's, which colour-blind readers can tell apart.
"""

from __future__ import annotations

import hashlib
import io
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from offmap.extras import require

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Array = NDArray[np.floating[Any]]

COLOURS = {
    # name: (on light, on dark); every light colour occurs once, it is the key by which `themed` finds it
    "ink": ("#1f2430", "#e7e9ee"),
    "soft": ("#5d6675", "#a3abb9"),
    "line": ("#d5dae1", "#3a4250"),
    "paper": ("#fdfdfc", "#14171c"),
    "card": ("#f5f6f8", "#1c2027"),
    "link": ("#0b62a8", "#7cc0ff"),
    "id": ("#2f6fb5", "#6aa9e9"),
    "ood": ("#d1541b", "#f08a4b"),
    "band": ("#b9d7ef", "#2b4d6d"),
    "series0": ("#7b8491", "#97a1af"),
    "series1": ("#e69f00", "#f0b429"),
    "series2": ("#cc79a7", "#dd93bb"),
    "series3": ("#56b4e9", "#8fd0f7"),
    "series4": ("#0072b2", "#3f9fe0"),
    "series5": ("#009e73", "#2cc295"),
    "series6": ("#d55e00", "#ff8a3d"),
    "series7": ("#8a7a00", "#d6c64a"),
}
DASHES = ((5, 2), (3, 1.5), (1, 1.2), (6, 1.5, 1, 1.5), (), (), (1, 2), (4, 1, 1, 1, 1, 1))
"""Of each series, in points; colour is never the only difference."""

SERIES = len(DASHES)
MAP = ("#f7fafd", "#d3e3f3", "#94bfe0", "#4a90c6", "#1c5f9f", "#0a2f63")
"""Colours of an uncertainty map, from certain to uncertain; the same on every screen."""

RC = {
    "svg.fonttype": "none", "svg.hashsalt": "offmap", "font.size": 8, "axes.titlesize": 8, "axes.labelsize": 8,
    "xtick.labelsize": 7, "ytick.labelsize": 7, "axes.linewidth": 0.6, "xtick.major.width": 0.6, "ytick.major.width": 0.6,
    "axes.edgecolor": COLOURS["line"][0], "text.color": COLOURS["ink"][0], "axes.labelcolor": COLOURS["soft"][0],
    "xtick.color": COLOURS["line"][0], "ytick.color": COLOURS["line"][0],
    "xtick.labelcolor": COLOURS["soft"][0], "ytick.labelcolor": COLOURS["soft"][0],
    "axes.spines.top": False, "axes.spines.right": False, "figure.facecolor": "none", "axes.facecolor": "none",
    "savefig.facecolor": "none", "axes.labelpad": 2,
}  # fmt: skip

TAIL, TICK_DISTANCE, DECADES = 0.002, 0.11, 50
"""The share of every set drawn at either end of an axis instead of beyond it; the least distance between two ticks, as a share of
the axis; the ratio from which scores get a log axis."""


def colour(name: str) -> str:
    """Return the light colour of that name."""
    return COLOURS[name][0]


def series(position: int) -> tuple[str, tuple[float, ...]]:
    """Return colour and dashes of a series by its position."""
    return colour(f"series{position % SERIES}"), DASHES[position % SERIES]


@dataclass(frozen=True)
class Panel:
    """One drawing: its SVG, a title above it, and a description for those who cannot see it."""

    svg: str
    title: str
    alt: str
    subtitle: str = ""


def draw_svg(draw: Callable[[Axes], None], *, width: float, height: float, margins: tuple[float, float, float, float]) -> str:
    """Return the SVG that `draw(axes)` makes; sizes and margins (left, bottom, right, top) in inches, so that panels align."""
    matplotlib, figures = require("matplotlib", "figures"), require("matplotlib.figure", "figures")
    left, bottom, right, top = margins
    box = (left / width, bottom / height, 1 - (left + right) / width, 1 - (bottom + top) / height)
    with matplotlib.rc_context(RC):
        figure = figures.Figure(figsize=(width, height))
        draw(figure.add_axes(box))
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()


def themed(svg: str, name: str) -> str:
    """Make a matplotlib SVG fit for a page: no prolog, the page's colours and font, ids that depend on `name`."""
    prefix = "f" + hashlib.blake2b(name.encode(), digest_size=4).hexdigest()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r' xmlns(:\w+)?="[^"]*"| version="[^"]*"', "", svg, count=3)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)  # matplotlib's names of parts: nothing refers to them
    svg = re.sub(r'\b(id="|xlink:href="#|url\(#)', rf"\g<1>{prefix}-", svg)
    svg = re.sub(r"font-family: [^;\"]+", "font-family: var(--font)", svg)
    # round coordinates, which stand inside tags, but no text between them
    svg = re.sub(r"<[^>]*>", lambda tag: re.sub(r"(\d\.\d\d)\d+", r"\1", tag[0]), svg)
    for variable, (light, _) in COLOURS.items():
        svg = svg.replace(light, f"var(--{variable})")
    return svg


@dataclass(frozen=True)
class Axis:
    """An axis from `low` to `high`: f(x) is x ("linear"), log x ("log") or asinh((x − centre) / unit) ("asinh")."""

    kind: str
    low: float
    high: float
    centre: float = 0.0
    unit: float = 1.0

    @staticmethod
    def of(id_scores: Array, ood_scores: Sequence[Array], threshold: float | None = None) -> Axis:
        """Choose an axis on which ID scores, OOD scores and the threshold can all be seen.

        >>> Axis.of(np.array([1.0, 2.0]), [np.array([3.0])]).kind, Axis.of(np.array([1.0, 2.0]), [np.array([3e5])]).kind
        ('linear', 'log')
        """
        sets = [finite for values in (id_scores, *ood_scores) if len(finite := values[np.isfinite(values)])]
        if not sets:
            return Axis("linear", 0.0, 1.0)
        ends = [np.quantile(values, (TAIL, 1 - TAIL)) for values in sets]
        marks = [threshold] if threshold is not None and math.isfinite(threshold) else []
        low, high = (float(pick([end[i] for end in ends] + marks)) for i, pick in enumerate((min, max)))
        if not high > low:
            return Axis("linear", low - 0.5, low + 0.5)
        inner, centre, outer = (float(v) for v in np.quantile(sets[0], (0.05, 0.5, 0.95)))
        if low > 0 and high > DECADES * low:
            return Axis("log", low, high)
        if high - low > DECADES * (outer - inner):
            return Axis("asinh", low, high, centre, (outer - inner) / 2 or (high - low) / 1000)
        return Axis("linear", low, high)

    def place(self, x: Array) -> Array:
        """Map values to shares of the axis, from 0 at its low end to 1 at its high end."""
        low, high = self._f(np.array([self.low, self.high]))
        return np.clip((self._f(np.asarray(x, np.float64)) - low) / (high - low), 0.0, 1.0)

    def at(self, share: Array) -> Array:
        """Map shares of the axis to values.

        >>> Axis("log", 1.0, 100.0).at(np.array([0.0, 0.5, 1.0])).round(6)
        array([  1.,  10., 100.])
        """
        low, high = self._f(np.array([self.low, self.high]))
        f = low + share * (high - low)
        if self.kind == "linear":
            return f
        return np.exp(f) if self.kind == "log" else self.centre + self.unit * np.sinh(f)

    def ticks(self) -> list[tuple[float, str]]:
        """Return shares and labels of ticks, far enough apart to be read."""
        if self.kind == "linear":
            values = round_numbers(self.low, self.high)
        else:
            decades = [10.0**k for k in range(math.ceil(_log10(self.low)), math.floor(_log10(self.high)) + 1)]
            few = self.kind != "log" or len(decades) < 3
            values = [float(f"{v:.1g}") for v in self.at(np.linspace(0, 1, 33))] if few else decades[:: -(-len(decades) // 6)]
        chosen: list[tuple[float, float]] = []
        for value in dict.fromkeys(values):
            share = float(self.place(np.array(value)))
            if self.low <= value <= self.high and (not chosen or share - chosen[-1][0] >= TICK_DISTANCE):
                chosen.append((round(share, 4), value))
        labels = [[format_number(v, digits) for _, v in chosen] for digits in range(3, 18)]
        distinct = next((words for words in labels if len(set(words)) == len(chosen)), labels[-1])
        return [(share, label) for (share, _), label in zip(chosen, distinct, strict=True)]

    def _f(self, x: Array) -> Array:
        if self.kind == "linear":
            return x
        return np.log(np.maximum(x, self.low)) if self.kind == "log" else np.arcsinh((x - self.centre) / self.unit)


def _log10(x: float) -> float:
    return math.log10(x) if x > 0 else 0.0


def round_numbers(low: float, high: float, count: int = 5) -> list[float]:
    """Return about `count` multiples of 1, 2 or 5 times a power of ten between two numbers.

    >>> round_numbers(0.0, 1.03)
    [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    """
    if not (math.isfinite(high - low) and high > low):
        return [low]
    rough = (high - low) / count
    ten = 10.0 ** math.floor(math.log10(rough))
    step = min((m * ten for m in (1, 2, 5, 10)), key=lambda s: abs(math.log(s / rough)))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [float(f"{k * step:.12g}") for k in range(first, last + 1)]


def format_number(value: float, digits: int = 3) -> str:
    """Format a number in few characters.

    >>> format_number(0.0), format_number(0.25), format_number(1000), format_number(1e6), format_number(-3e-5)
    ('0', '0.25', '1000', '1e6', '−3e−5')
    """
    if value == 0 or 1e-3 <= abs(value) < 1e4:
        text = f"{value:.{max(digits, 4) if abs(value) >= 1000 else digits}g}"
    elif math.isfinite(value):
        mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
        text = f"{float(mantissa):.{digits}g}e{int(exponent)}"
    else:
        text = str(value).replace("inf", "∞")
    return text.replace("-", "−")


def to_json(value: float, digits: int = 4) -> float | None:
    """Round a number to some digits, or return None for what JSON cannot hold.

    >>> to_json(1 / 3), to_json(math.inf)
    (0.3333, None)
    """
    return float(f"{float(value):.{digits}g}") if math.isfinite(value) else None
