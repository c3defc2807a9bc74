"""What five members and a grid of six settings cost when all thirty nets are trained together."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

from benchmarks import subject
from benchmarks.race import race
from benchmarks.record import Claim, Measurement, Record
from offmap.batches import Rows
from offmap.core.weights import copy_host
from offmap.likelihoods import Gaussian
from offmap.methods import anchored, negative_correlation
from offmap.methods.protocol import Runtime

MEMBERS, STEPS = 5, 100

ANCHORED = [
    anchored.Config(steps=STEPS, tradeoff=tradeoff, anchor_scale=scale)
    for tradeoff, scale in product((0.1, 1.0, 10.0), (0.1, 1.0))
]
CORRELATED = [negative_correlation.Config(steps=STEPS, tradeoff=10.0**-k) for k in range(6)]

HOW = """Five members and six settings through `fit_grid`, batch 128, 100 steps with the check on 400 validation rows at their
end, against the same fits one after another. Anchored networks can be trained one net at a time, thirty of them; the members of
a negatively correlated ensemble need each other, so there it is six ensembles of five. Times are of one step for all thirty."""


def run(rounds: int = 5) -> Record:
    """Stacked and one after another, in turns."""
    nets = [copy_host(subject.net(seed)) for seed in range(MEMBERS)]
    contestants: dict[str, Callable[[], object]] = {
        "anchored, stacked": lambda: fit(anchored, nets, ANCHORED),
        "anchored, six ensembles": lambda: [fit(anchored, nets, [c]) for c in ANCHORED],
        "anchored, thirty nets": lambda: [fit(anchored, [net], [c]) for c in ANCHORED for net in nets],
        "correlated, stacked": lambda: fit(negative_correlation, nets, CORRELATED),
        "correlated, six ensembles": lambda: [fit(negative_correlation, nets, [c]) for c in CORRELATED],
    }
    timings = race(contestants, rounds=rounds)

    def ratio(one: str, other: str) -> float:
        return timings[one].best / timings[other].best

    return Record(
        "grids",
        "A grid of six settings and five members",
        HOW,
        rounds,
        [
            Measurement.of(
                "anchored networks, thirty nets one after another", timings["anchored, thirty nets"], unit="ms", per=STEPS
            ),
            Measurement.of("six ensembles of five one after another", timings["anchored, six ensembles"], unit="ms", per=STEPS),
            Measurement.of("all stacked", timings["anchored, stacked"], unit="ms", per=STEPS),
            Measurement.of(
                "negative correlation, six ensembles of five one after another",
                timings["correlated, six ensembles"],
                unit="ms",
                per=STEPS,
            ),
            Measurement.of("all stacked", timings["correlated, stacked"], unit="ms", per=STEPS),
        ],
        [
            Claim(
                "anchored networks: times thirty nets one after another",
                ratio("anchored, stacked", "anchored, thirty nets"),
                "at most",
                0.5,
            ),
        ],
    )


def fit(method, nets, configs):
    """One stack."""
    data = subject.table()
    rows = Rows(*data["train"], subject.BATCH, "train")
    held = Rows(*data["valid"], subject.BATCH, "valid")
    return method.fit_grid(nets, rows, held, likelihood=Gaussian(), configs=configs, runtime=Runtime(progress=False))
