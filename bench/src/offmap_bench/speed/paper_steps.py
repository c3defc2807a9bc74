"""How long a fit of five nets takes, against the paper's settings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import offmap
from offmap_bench.runner.base_models import models
from offmap_bench.speed.race import Timing, race
from offmap_bench.speed.record import Claim, Measurement, Record
from offmap_bench.tasks.catalog import task

TASKS = ("uci/concrete/extrapolation", "uci/power/extrapolation", "uci/protein/extrapolation")
STEPS, FEW, MORE = 50_000, 100, 500

HOW = """Five nets of 100-100-100 around which a guard is fitted by `offmap.fit`, everything included: basis, φ, clip, the rows
that the score compares with, threshold; the closed form also with the paper's score, which compares with no rows. The paper's
settings (`config="paper"`) take 50,000 gradient steps with a look at the validation risk every 100: fits of {few} and of {more}
steps are timed, and the difference is what {between} steps cost. *Sum* adds the three data sets up. What the fits are
worth is in the tables of the `uci` and `uci-paper` plans.
What a closed form of many rows takes are products: two to four looks at all validation rows with 250 nets, nine with fifty to
choose the clip, two to set threshold and intervals; and for the default score the draws' disagreement on 1,000 training rows and
the neighbours of 4,096 in four spaces."""


def run(rounds: int = 3) -> Record:
    """The default solver, the closed form, and a part of the paper's steps, on data of three sizes."""
    timings: dict[str, dict[str, Timing]] = {}
    names: dict[str, str] = {}
    for name in TASKS:
        data = task(name, 0)
        names[name] = f"{name.split('/')[1]}, {len(data.train[1]):,} + {len(data.valid[1]):,} rows"
        timings[name] = race(contestants(name), rounds=rounds, at_most=dict.fromkeys(("default", "few", "more"), 2))
    measured = [row for name in TASKS for row in measurements(names[name], timings[name])]
    claims = [
        Claim(f"times faster than the paper's settings, {solver}, {words}", value, "at least", target)
        for solver, target in (("default", 50.0), ("closed form", 300.0), ("closed form, paper's score", 300.0))
        for words, value in ratios(timings, solver)
    ]
    how = HOW.format(few=FEW, more=MORE, between=MORE - FEW)
    return Record("paper_steps", "A fit of five nets against the paper's settings", how, rounds, measured, claims)


def contestants(name: str) -> dict[str, Callable[[], offmap.Guard]]:
    """Whole fits, and two parts of the paper's; models are those of the benchmark, trained if they are not there yet."""
    data, nets = task(name, 0), models(task(name, 0))

    def fit(**settings: Any) -> Callable[[], offmap.Guard]:
        return lambda: offmap.fit(nets, data.train, data.valid, progress=False, **settings)

    return {
        "closed form": fit(solver="closed-form"),
        "closed form, paper's score": fit(solver="closed-form", score="paper"),
        "default": fit(),
        "few": fit(config="paper", steps=FEW),
        "more": fit(config="paper", steps=MORE),
    }


def paper(timing: dict[str, Timing]) -> Timing:
    """Seconds of 50,000 steps: the best turns compared, and the worst; a turn with its neighbour would pick slow short ones."""
    part, few, more = STEPS / (MORE - FEW), timing["few"], timing["more"]
    return Timing(
        [part * (b - a) for a, b in zip(sorted(few.cpu), sorted(more.cpu), strict=True)],
        [part * (b - a) for a, b in zip(sorted(few.wall), sorted(more.wall), strict=True)],
    )


def measurements(words: str, timing: dict[str, Timing]) -> list[Measurement]:
    """One data set."""
    return [
        *(Measurement.of(f"{words}: {name}", timing[name]) for name in ("closed form", "closed form, paper's score")),
        Measurement.of(f"{words}: default solver", timing["default"]),
        Measurement.of(f"{words}: paper's settings (extrapolated)", paper(timing)),
    ]


def ratios(timings: dict[str, dict[str, Timing]], solver: str) -> list[tuple[str, float]]:
    """Every data set, and their sum; of the best turns."""
    whole = {name: paper(timing).cpu[0] for name, timing in timings.items()}
    own = {name: timing[solver].best for name, timing in timings.items()}
    each = [(name.split("/")[1], whole[name] / own[name]) for name in timings]
    return [*each, ("sum", sum(whole.values()) / sum(own.values()))]
