"""What five members and a grid of six settings cost when all thirty nets are trained together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

from torch import nn

from offmap.data import Rows
from offmap.likelihoods import Gaussian
from offmap.posterior.protocol import Runtime
from offmap_bench.methods import anchored, negative_correlation
from offmap_bench.speed import limit, subject
from offmap_bench.speed.race import race
from offmap_bench.speed.record import Claim, Measurement, Record

MEMBERS, STEPS = 5, 50

PULLED = [anchored.Config(steps=STEPS, tradeoff=t, anchor_scale=s) for t, s in product((0.1, 1.0, 10.0), (0.1, 1.0))]
CORRELATED = [negative_correlation.Config(steps=STEPS, tradeoff=10.0**-k) for k in range(6)]
THIRTY, STACKED = "anchored networks: thirty nets, one after another", "anchored networks: all stacked"

HOW = """One gradient step for five members and six settings, batch 128, through `fit_grid`: the mean over 50 steps and the
check on 400 validation rows after them, against the same fits one after another. The members of anchored networks can be trained
alone, thirty nets in turn; those of a negatively correlated ensemble need each other: there it is six ensembles in turn."""


def run(rounds: int = 3) -> Record:
    """Stacked and one after another, in turns."""
    nets = [subject.net(seed) for seed in range(MEMBERS)]
    contestants: dict[str, Callable[[], object]] = {
        THIRTY: lambda: [fit(anchored, [net], [config]) for config in PULLED for net in nets],
        "anchored networks: six ensembles of five, one after another": lambda: [fit(anchored, nets, [c]) for c in PULLED],
        STACKED: lambda: fit(anchored, nets, PULLED),
        "negative correlation: six ensembles of five, one after another": lambda: [
            fit(negative_correlation, nets, [config]) for config in CORRELATED
        ],
        "negative correlation: all stacked": lambda: fit(negative_correlation, nets, CORRELATED),
    }
    timings = race({**contestants, "gemm": limit.product()}, rounds=rounds)
    least = limit.least(timings.pop("gemm"), limit.flops(contestants[STACKED]))
    return Record(
        "grids",
        "Five members and a grid of six settings",
        HOW,
        rounds,
        [
            *(Measurement.of(name, timing, unit="ms", per=STEPS) for name, timing in timings.items()),
            Measurement.of(f"{STACKED}, {limit.NAME}", least, unit="ms", per=STEPS),
        ],
        [Claim("stacked, times thirty nets one after another", timings[STACKED].best / timings[THIRTY].best, "at most", 0.5)],
    )


def fit(method: Any, nets: Sequence[nn.Module], configs: Sequence[Any]) -> object:
    """One stack."""
    data = subject.table()
    train, valid = (Rows(*data[part], subject.BATCH, part) for part in ("train", "valid"))
    return method.fit_grid(nets, train, valid, likelihood=Gaussian(), configs=configs, runtime=Runtime(progress=False))
