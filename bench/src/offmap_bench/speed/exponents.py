"""How costs grow with rows, draws, weights and members: fitted exponents, and a picture with log-log axes.

`python -m offmap_bench.speed.exponents` draws the picture again from the record.
"""

from __future__ import annotations

import io
import itertools
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import offmap
from offmap.integrations.mlp import mlp
from offmap.io.atomic import write_whole
from offmap.report import style
from offmap_bench.paths import DOCS
from offmap_bench.speed import subject
from offmap_bench.speed.race import race
from offmap_bench.speed.record import Claim, Measurement, Record, read

FIGURE = DOCS / "figures" / "exponents.svg"

HOW = """Scores with score="paper", a new seed every turn, and fits in closed form; one thing grows at a time, the others stay at
{rows:,} rows, {draws} draws, three layers of {width} and one net. The exponent is the slope of a line through log time over log
size: 1 is in proportion. Where a part is done once whatever the size, it is lower. Weights are those of three layers of 32, 64,
128 and 256.

![Seconds over size, both logarithmic](figures/exponents.svg)"""

ROWS, DRAWS, WIDTH, WIDTHS = 4_000, 20, 100, (32, 64, 128, 256)
Work = Callable[[], object]


def run(rounds: int = 3) -> Record:
    """Every series in turns, then the slopes."""
    found = {name: _seconds(works, rounds) for name, works in series().items()}
    measurements = [
        Measurement(f"{name}: {size:,}", "ms", 1e3 * best, 1e3 * best)
        for name, seconds in found.items()
        for size, best in seconds.items()
    ]
    claims = [Claim(f"exponent, {name}", slope(seconds), "at most", MOST[name]) for name, seconds in found.items()]
    how = HOW.format(rows=ROWS, draws=DRAWS, width=WIDTH)
    record = Record("exponents", "How costs grow", how, rounds, measurements, claims)
    draw(record)
    return record


MOST = {
    "score, rows": 1.1, "score, draws": 1.1, "score, weights": 1.1, "score, members": 1.1,
    "fit, rows": 1.1, "fit, weights": 1.5, "fit, members": 1.1,
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
        "score, weights": {weights(n): scored(_fitted(width=n)) for n in WIDTHS},
        "score, members": {n: scored(_fitted(members=n)) for n in (1, 2, 4, 8)},
        "fit, rows": {n: lambda n=n: _fitted(rows=n) for n in (450, 900, 1_800, 3_600)},
        "fit, weights": {weights(n): lambda n=n: _fitted(width=n) for n in WIDTHS},
        "fit, members": {n: lambda n=n: _fitted(members=n) for n in (1, 2, 4, 8)},
    }


def weights(width: int) -> int:
    """Of three layers so wide, with their biases.

    >>> weights(100)
    21302
    """
    return sum(p.numel() for p in mlp(subject.FEATURES, subject.OUTPUTS, hidden=[width] * 3).parameters())


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


def series_of(record: Record) -> dict[str, dict[int, float]]:
    """{what grows: {size: seconds}}, as a record has them."""
    found: dict[str, dict[int, float]] = {}
    for measured in record.measurements:
        name, size = measured.what.split(": ")
        found.setdefault(name, {})[int(size.replace(",", ""))] = measured.best / 1e3
    return found


def draw(record: Record) -> None:
    """Scores on the left, fits on the right; sizes in multiples of the smallest, lines fitted through them."""
    found = series_of(record)
    with matplotlib.rc_context(style.RC | {"savefig.facecolor": style.colour("paper"), "font.family": "sans-serif"}):
        figure = Figure(figsize=(7.6, 3.2), layout="constrained")
        left, right = figure.subplots(1, 2, sharey=True)
        for axes, kind in ((left, "score"), (right, "fit")):
            for name, seconds in found.items():
                if name.startswith(kind):
                    _line(axes, name.removeprefix(f"{kind}, "), seconds)
            axes.set(xscale="log", yscale="log", xlabel="times the smallest size")
            axes.set_title(f"{kind}, with exponents", loc="left")
            axes.set_xticks([1, 2, 4, 8, 16, 32], ["1", "2", "4", "8", "16", "32"])
            axes.xaxis.minorticks_off()
            axes.legend(frameon=False, handlelength=3)
        left.set_ylabel("seconds")
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    svg = re.sub(r"<metadata>.*?</metadata>", "", buffer.getvalue(), flags=re.DOTALL)
    write_whole(FIGURE, ("\n".join(map(str.rstrip, svg.splitlines())) + "\n").encode())


LOOKS = {"rows": (4, "o"), "draws": (1, "s"), "weights": (5, "^"), "members": (6, "D")}
"""Colour by its place among the series, and marker."""


def _line(axes: Axes, name: str, seconds: Mapping[int, float]) -> None:
    place, marker = LOOKS[name]
    colour, dashes = style.series(place)
    power, grown = slope(seconds), [size / min(seconds) for size in seconds]
    middle = math.exp(sum(map(math.log, seconds.values())) / len(seconds))
    centre = math.exp(sum(map(math.log, grown)) / len(grown))
    axes.plot(grown, [middle * (g / centre) ** power for g in grown], color=colour, dashes=dashes or (None, None), linewidth=1)
    axes.plot(grown, list(seconds.values()), marker, color=colour, markersize=4, label=f"{name}, {power:.2f}")


if __name__ == "__main__":
    kept = read("exponents")
    assert kept is not None
    draw(kept)
