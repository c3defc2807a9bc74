"""An axis for scores of any kind: even steps, decades, or decades to both sides of what is in-distribution."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from offmap.report.figures import DECADES, Array

TAIL = 0.002
"""Of every set this share is drawn at either end of the axis instead of beyond it."""

APART = 0.11
"""Least distance between two labelled places, as a share of the axis."""


@dataclass(frozen=True)
class Axis:
    """From `low` to `high`: f(x) is x ("linear"), log x ("log") or asinh((x − middle) / unit) ("asinh")."""

    kind: str
    low: float
    high: float
    middle: float = 0.0
    unit: float = 1.0

    @staticmethod
    def of(familiar: Array, strange: Sequence[Array], threshold: float | None = None) -> Axis:
        """An axis on which the in-distribution scores and the OOD ones are both seen, and the threshold with them.

        >>> Axis.of(np.array([1.0, 2.0]), [np.array([3.0])]).kind, Axis.of(np.array([1.0, 2.0]), [np.array([3e5])]).kind
        ('linear', 'log')
        """
        sets = [finite for values in (familiar, *strange) if len(finite := values[np.isfinite(values)])]
        if not sets:
            return Axis("linear", 0.0, 1.0)
        ends = [np.quantile(values, (TAIL, 1 - TAIL)) for values in sets]
        marks = [threshold] if threshold is not None and math.isfinite(threshold) else []
        low, high = (float(pick([end[i] for end in ends] + marks)) for i, pick in enumerate((min, max)))
        if not high > low:
            return Axis("linear", low - 0.5, low + 0.5)
        inner, middle, outer = (float(v) for v in np.quantile(sets[0], (0.05, 0.5, 0.95)))
        if low > 0 and high > DECADES * low:
            return Axis("log", low, high)
        if high - low > DECADES * (outer - inner):
            return Axis("asinh", low, high, middle, (outer - inner) / 2 or (high - low) / 1000)
        return Axis("linear", low, high)

    def place(self, x: Array) -> Array:
        """Values as shares of the axis, 0 at its low end and 1 at its high end."""
        ends = self._f(np.array([self.low, self.high]))
        return np.clip((self._f(np.asarray(x, np.float64)) - ends[0]) / (ends[1] - ends[0]), 0.0, 1.0)

    def at(self, share: Array) -> Array:
        """Values at shares of the axis.

        >>> Axis("log", 1.0, 100.0).at(np.array([0.0, 0.5, 1.0])).round(6)
        array([  1.,  10., 100.])
        """
        ends = self._f(np.array([self.low, self.high]))
        f = ends[0] + share * (ends[1] - ends[0])
        if self.kind == "linear":
            return f
        return np.exp(f) if self.kind == "log" else self.middle + self.unit * np.sinh(f)

    def ticks(self) -> list[tuple[float, str]]:
        """Places and labels, far enough apart to be read."""
        if self.kind == "linear":
            values = nice(self.low, self.high)
        else:
            rounded = [float(f"{v:.1g}") for v in self.at(np.linspace(0, 1, 33))]
            tens = [10.0**k for k in range(math.ceil(_log(self.low)), math.floor(_log(self.high)) + 1)]
            # decades where there are some; else what is round at even distances
            values = tens[:: -(-len(tens) // 6)] if self.kind == "log" and len(tens) > 2 else rounded
        chosen: list[tuple[float, float]] = []
        for value in dict.fromkeys(values):
            share = float(self.place(np.array(value)))
            if self.low <= value <= self.high and (not chosen or share - chosen[-1][0] >= APART):
                chosen.append((round(share, 4), value))
        # as many digits as tell them apart
        words = next(w for d in range(3, 18) if len(set(w := [label(v, d) for _, v in chosen])) == len(chosen) or d == 17)
        return [(share, word) for (share, _), word in zip(chosen, words, strict=True)]

    def _f(self, x: Array) -> Array:
        if self.kind == "linear":
            return x
        if self.kind == "log":
            return np.log(np.maximum(x, self.low))
        return np.arcsinh((x - self.middle) / self.unit)


def _log(x: float) -> float:
    return math.log10(x) if x > 0 else 0.0


def nice(low: float, high: float, count: int = 5) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten between two numbers, about so many.

    >>> nice(0.0, 1.03)
    [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    """
    if not (math.isfinite(high - low) and high > low):
        return [low]
    rough = (high - low) / count
    ten = 10.0 ** math.floor(math.log10(rough))
    step = min((m * ten for m in (1, 2, 5, 10)), key=lambda s: abs(math.log(s / rough)))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [float(f"{k * step:.12g}") for k in range(first, last + 1)]


def label(value: float, digits: int = 3) -> str:
    """A number in few signs.

    >>> label(0.0), label(0.25), label(1000), label(1e6), label(-3e-5), label(math.inf)
    ('0', '0.25', '1000', '1e6', '−3e−5', '∞')
    """
    if value == 0 or 1e-3 <= abs(value) < 1e4:
        text = f"{value:.{max(digits, 4) if abs(value) >= 1000 else digits}g}"
    elif math.isfinite(value):
        mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
        text = f"{float(mantissa):.{digits}g}e{int(exponent)}"
    else:
        text = str(value).replace("inf", "∞")
    return text.replace("-", "−")
