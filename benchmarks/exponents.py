"""How costs grow with rows, draws, weights and members: fitted exponents, and a picture with log-log axes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import matplotlib.pyplot as plt

import offmap
from benchmarks import subject
from benchmarks.race import race
from benchmarks.record import Claim, Measurement, Record
from offmap.nets.mlp import mlp

FIGURE = Path(__file__).parents[1] / "docs" / "figures" / "exponents.svg"

HOW = """Scores with score="paper", a new seed every turn, and fits in closed form; one thing grows at a time, the others stay at
{rows:,} rows, {draws} draws, three layers of {width} and one net. The exponent is the slope of a line through log time over log
size: 1 is in proportion, 2 for a width is in proportion to its weights. Where a part is done once whatever the size, it is lower.

![Seconds over size, both logarithmic](figures/exponents.svg)"""

ROWS, DRAWS, WIDTH = 4_000, 20, 100
Work = Callable[[], object]


def run(rounds: int = 3) -> Record:
    """Every series in turns, then the slopes."""
    found = {name: _seconds(works, rounds) for name, works in series().items()}
    draw(found)
    measurements = [
        Measurement(f"{name}: {size:,}", "ms", 1e3 * best, 1e3 * best)
        for name, seconds in found.items()
        for size, best in (min(seconds.items()), max(seconds.items()))
    ]
    claims = [Claim(f"exponent, {name}", slope(seconds), "at most", MOST[name]) for name, seconds in found.items()]
    how = HOW.format(rows=ROWS, draws=DRAWS, width=WIDTH)
    return Record("exponents", "How costs grow", how, rounds, measurements, claims)


MOST = {
    "score, rows": 1.1, "score, draws": 1.1, "score, width": 2.1, "score, members": 1.1,
    "fit, rows": 1.1, "fit, width": 3.0, "fit, members": 1.1,
}  # fmt: skip
"""Beyond these a cost grows faster than its work; the eigenvectors of a fit take the third power of a width."""


def series() -> dict[str, dict[int, Work]]:
    """{what grows: {size: work}}."""
    x, seeds = subject.table()["score"][0], itertools.count()
    guard = subject.fitted(score="paper")

    def scored(guard: offmap.Guard, rows: int = ROWS, draws: int = DRAWS) -> Work:
        return lambda: replace(guard, seed=next(seeds), draws=draws).score(x[:rows])

    return {
        "score, rows": {n: scored(guard, rows=n) for n in (1_250, 2_500, 5_000, 10_000)},
        "score, draws": {n: scored(guard, draws=n) for n in (10, 20, 40, 80)},
        "score, width": {n: scored(_fitted(width=n)) for n in (32, 64, 128, 256)},
        "score, members": {n: scored(_fitted(members=n)) for n in (1, 2, 4, 8)},
        "fit, rows": {n: lambda n=n: _fitted(rows=n) for n in (450, 900, 1_800, 3_600)},
        "fit, width": {n: lambda n=n: _fitted(width=n) for n in (32, 64, 128, 256)},
        "fit, members": {n: lambda n=n: _fitted(members=n) for n in (1, 2, 4, 8)},
    }


def _fitted(*, rows: int = 3_600, width: int = WIDTH, members: int = 1) -> offmap.Guard:
    data = subject.table()
    nets = [mlp(subject.FEATURES, subject.OUTPUTS, hidden=[width] * 3, seed=seed) for seed in range(members)]
    train = data["train"][0][:rows], data["train"][1][:rows]
    return offmap.fit(nets, train, data["valid"], solver="closed-form", score="paper", draws=DRAWS, progress=False)


def _seconds(works: Mapping[int, Work], rounds: int) -> dict[int, float]:
    timings = race({str(size): work for size, work in works.items()}, rounds=rounds)
    return {int(size): timing.best for size, timing in timings.items()}


def slope(seconds: Mapping[int, float]) -> float:
    """Of the least-squares line through (log size, log seconds).

    >>> round(slope({1: 3.0, 10: 300.0, 100: 30000.0}), 3)
    2.0
    """
    x, y = ([math.log(v) for v in values] for values in (seconds.keys(), seconds.values()))
    middle = sum(x) / len(x), sum(y) / len(y)
    return sum((a - middle[0]) * (b - middle[1]) for a, b in zip(x, y, strict=True)) / sum((a - middle[0]) ** 2 for a in x)


def draw(found: Mapping[str, Mapping[int, float]]) -> None:
    """Scores on the left, fits on the right; sizes in multiples of the smallest."""
    plt.rcParams["svg.hashsalt"] = "offmap"
    figure, both = plt.subplots(1, 2, figsize=(9, 3.6), sharey=True, layout="constrained")
    for axes, kind in zip(both, ("score", "fit"), strict=True):
        for name, seconds in found.items():
            if name.startswith(kind):
                _line(axes, name.removeprefix(f"{kind}, "), list(seconds), list(seconds.values()))
        axes.set(xscale="log", yscale="log", xlabel="times the smallest size", title=kind)
        axes.set_xticks([1, 2, 4, 8], ["1", "2", "4", "8"])
        axes.xaxis.minorticks_off()
        axes.legend(frameon=False)
    both[0].set_ylabel("seconds")
    FIGURE.parent.mkdir(exist_ok=True)
    figure.savefig(FIGURE, metadata={"Date": None})
    plt.close(figure)


def _line(axes: plt.Axes, name: str, sizes: Sequence[int], seconds: Sequence[float]) -> None:
    grown = [size / min(sizes) for size in sizes]
    axes.plot(grown, seconds, marker="o", label=f"{name}, {slope(dict(zip(sizes, seconds, strict=True))):.2f}")
