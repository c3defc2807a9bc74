"""Theme `exponents`: how costs grow with rows, draws, weights and members, as fitted exponents and a figure."""

from __future__ import annotations

from collections.abc import Mapping

import matplotlib
import numpy as np
from matplotlib.figure import Figure

import offmap
from offmap.integrations.nets import mlp
from offmap.report import page
from offmap_bench.paths import DOCS
from offmap_bench.speed.measure import Claim, Record, Work, once, race
from offmap_bench.speed.subjects import FEATURES, OUTPUTS, fit_guard, reseed, table
from offmap_bench.studies.study import render_svg

FIGURE = DOCS / "figures" / "exponents.svg"
ROWS, DRAWS, WIDTH, WIDTHS = 4_000, 20, 100, (32, 64, 128, 256)
MOST = {"fit, weights": 1.5}
"""Exponents above 1.1 that are allowed: the eigenvectors of a fit take the third power of a width."""


def exponents(rounds: int = 3) -> Record:
    seconds: dict[str, dict[int, float]] = {}
    for name, works in series().items():
        timings = race({str(size): work for size, work in works.items()}, rounds=rounds)
        seconds[name] = {int(size): timing.best for size, timing in timings.items()}
    measured = [once(f"{name}: {size:,}", "ms", 1e3 * best) for name, sizes in seconds.items() for size, best in sizes.items()]
    claims = [Claim(f"exponent, {name}", slope(sizes), "at most", MOST.get(name, 1.1)) for name, sizes in seconds.items()]
    record = Record("exponents", rounds, measured, claims)
    draw(record)
    return record


def series() -> dict[str, dict[int, Work]]:
    """{what grows: {size: work}}."""
    x, guard = table()["score"][0], fit_guard(score="paper")

    def score(guard: offmap.Guard, rows: int = ROWS, draws: int = DRAWS) -> Work:
        return lambda: reseed(guard, draws=draws).score(x[:rows])

    return {
        "score, rows": {n: score(guard, rows=n) for n in (1_250, 2_500, 5_000, 10_000)},
        "score, draws": {n: score(guard, draws=n) for n in (10, 20, 40, 80)},
        "score, weights": {count_weights(n): score(_fit(width=n)) for n in WIDTHS},
        "score, members": {n: score(_fit(members=n)) for n in (1, 2, 4, 8)},
        "fit, rows": {n: lambda n=n: _fit(rows=n) for n in (450, 900, 1_800, 3_600)},
        "fit, weights": {count_weights(n): lambda n=n: _fit(width=n) for n in WIDTHS},
        "fit, members": {n: lambda n=n: _fit(members=n) for n in (1, 2, 4, 8)},
    }


def count_weights(width: int) -> int:
    """Count the weights of three layers so wide, with their biases.

    >>> count_weights(100)
    21302
    """
    return sum(p.numel() for p in mlp(FEATURES, OUTPUTS, hidden=[width] * 3).parameters())


def _fit(*, rows: int = 3_600, width: int = WIDTH, members: int = 1) -> offmap.Guard:
    (x, y), valid = table()["train"], table()["valid"]
    nets = [mlp(FEATURES, OUTPUTS, hidden=[width] * 3, seed=seed) for seed in range(members)]
    return offmap.fit(nets, (x[:rows], y[:rows]), valid, solver="closed-form", score="paper", draws=DRAWS, progress=False)


def slope(seconds: Mapping[int, float]) -> float:
    """The slope of the least-squares line through (log size, log seconds).

    >>> round(slope({1: 3.0, 10: 300.0, 100: 30000.0}), 3)
    2.0
    """
    return float(np.polyfit(np.log(list(seconds)), np.log(list(seconds.values())), 1)[0])


def series_of(record: Record) -> dict[str, dict[int, float]]:
    """{what grows: {size: seconds}} of a record."""
    found: dict[str, dict[int, float]] = {}
    for measured in record.measurements:
        name, size = measured.what.split(": ")
        found.setdefault(name, {})[int(size.replace(",", ""))] = measured.best / 1e3
    return found


LOOKS = {"rows": (4, "o"), "draws": (1, "s"), "weights": (5, "^"), "members": (6, "D")}
"""Colour by its place among the series, and marker."""


def draw(record: Record) -> None:
    """Draw scores on the left, fits on the right; sizes in multiples of the smallest, with fitted lines."""
    with matplotlib.rc_context(page.RC | {"savefig.facecolor": page.colour("paper"), "font.family": "sans-serif"}):
        figure = Figure(figsize=(7.6, 3.2), layout="constrained")
        panels = dict(zip(("score", "fit"), figure.subplots(1, 2, sharey=True), strict=True))
        for name, seconds in series_of(record).items():
            kind, _, what = name.partition(", ")
            place, marker = LOOKS[what]
            colour, dashes = page.series(place)
            sizes = np.array(list(seconds)) / min(seconds)
            line = np.polyfit(np.log(sizes), np.log(list(seconds.values())), 1)
            fitted = np.exp(np.polyval(line, np.log(sizes)))
            panels[kind].plot(sizes, fitted, color=colour, dashes=dashes or (None, None), linewidth=1)
            panels[kind].plot(sizes, list(seconds.values()), marker, color=colour, markersize=4, label=f"{what}, {line[0]:.2f}")
        for kind, axes in panels.items():
            axes.set(xscale="log", yscale="log", xlabel="times the smallest size")
            axes.set_title(f"{kind}, with exponents", loc="left")
            axes.set_xticks([1, 2, 4, 8, 16, 32], ["1", "2", "4", "8", "16", "32"])
            axes.xaxis.minorticks_off()
            axes.legend(frameon=False, handlelength=3)
        panels["score"].set_ylabel("seconds")
        FIGURE.write_text(render_svg(figure), encoding="utf-8")
