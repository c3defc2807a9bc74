"""Tasks that are in no benchmark of the paper: two tables of OFFMAP_DATA, scikit-learn's and synthetic ones, cut somehow."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.random import RandomState

from offmap_bench.studies.choice import TABLES, Pair
from offmap_bench.tasks.shifts import read_columns
from offmap_bench.tasks.task import Array, Task, split, table_task
from offmap_bench.tasks.uci import MODES, cut

ROWS = 3_000


def bikes() -> tuple[Array, Array, dict[str, Array]]:
    """Hours of bike rentals: calendar and weather, the logarithm of the count, and columns to cut by."""
    table = read_columns("bike_hour")
    hour, month = 2 * np.pi * table["hr"] / 24, 2 * np.pi * table["mnth"] / 12
    angles = [np.sin(hour), np.cos(hour), np.sin(2 * hour), np.cos(2 * hour), np.sin(month), np.cos(month)]
    x = np.column_stack([*angles, *(table[name] for name in ("holiday", "workingday", "temp", "atemp", "hum", "windspeed"))])
    by = {
        "summer": table["season"] == 3,
        "rain": table["weathersit"] >= 3,
        "night": table["hr"] < 6,
        "second year": table["yr"] == 1,
    }
    return x, np.log1p(table["cnt"]), by


def prices() -> tuple[Array, Array, dict[str, Array]]:
    """Half-hours of electricity since all columns move: time of day, prices and demands; the demand of New South Wales."""
    period, price, demand, *others, _ = (column[17_760:] for column in read_columns("elec2").values())
    logs, angle = [np.log(each + 1e-2) for each in (price, others[0])], 2 * np.pi * period
    x = np.column_stack([np.sin(angle), np.cos(angle), *logs, *others[1:]])
    return x, demand, {"later weeks": np.arange(len(x)) > 0.7 * len(x), "evening": period > 0.75}


def sample(rows: Array, seed: int, count: int = ROWS) -> Array:
    """At most so many of some rows, in random order."""
    return RandomState(seed).permutation(rows)[:count]


def cut_by(make: Callable[[], tuple[Array, Array, dict[str, Array]]], name: str, seed: int) -> Task:
    """A task whose OOD rows are those of a column, or those outside or inside as in `uci`."""
    x, y, by = make()
    if name in MODES:
        rows = sample(np.arange(len(x)), 0, 2 * ROWS)
        return cut(f"schedules/{make.__name__}/{name}", x[rows], y[rows], name, seed)
    parts, ood = split(sample(np.flatnonzero(~by[name]), 0), seed), sample(np.flatnonzero(by[name]), 0, 2_000)
    return table_task(f"schedules/{make.__name__}/{name}", x, y, parts, {name: ood})


def cut_table(name: str, mode: str, seed: int) -> Task:
    """A table of the study `choice`, or of scikit-learn, cut as in `uci`."""
    made: Pair = TABLES[name](RandomState(7))
    rows = sample(np.arange(len(made[1])), 0, 2 * ROWS)
    return cut(f"schedules/{name}/{mode}", made[0][rows], made[1][rows], mode, seed)


TASKS: dict[str, Callable[[int], Task]] = {
    **{f"bike, {name}": partial(cut_by, bikes, name) for name in ("summer", "rain", "night", "second year", *MODES)},
    **{f"elec2, {name}": partial(cut_by, prices, name) for name in ("later weeks", "evening", *MODES)},
    **{f"{name}, {mode}": partial(cut_table, name, mode) for name in ("diabetes", "cancer", "arm", "turbine", "noisy", "skew")
       for mode in MODES},
}  # fmt: skip
