"""How long one row waits for its score."""

from __future__ import annotations

import itertools
from dataclasses import replace

import torch

from offmap_bench.speed import limit, peer, peers, subject
from offmap_bench.speed.race import race
from offmap_bench.speed.record import Measurement, Record

CALLS = 20
OTHERS = ("laplace-torch", "bayesian-torch", "MC-dropout", "deep ensemble", peers.STACKED)

HOW = """One row, 50 draws, the mean over 20 calls in a row. A guard remembers its draws (up to 32 MB of them), so only
the first call draws; `guard(x)` uses unclipped draws for the score and clipped ones for the prediction. Other libraries as
[beside them](#beside-other-libraries), the deep ensemble of five nets. The bare GEMM is of `guard.score(x)`, score="paper"."""


def run(rounds: int = 15) -> Record:
    """Ours, the peer's and the plain net, in turns."""
    x = subject.table()["score"][0][:1]
    guard, theirs, net, numpy = subject.fitted(score="paper"), peer.model(), subject.net(), x.numpy()
    joined = subject.fitted()
    fresh, seeds = (
        subject.fitted(score="paper"),
        itertools.count(1),
    )  # a guard of its own, so as not to push out what the other remembers
    calls = {
        'offmap, `guard.score(x)`, score="paper"': lambda: guard.score(x),
        "offmap, `guard.score(x)`, the default score": lambda: joined.score(x),
        "offmap, `guard(x)`": lambda: guard(x),
        "offmap, `guard.score(x)`, the first call": lambda: replace(fresh, seed=next(seeds)).score(x),
        "maxwent, `predict_std(x)`": lambda: theirs.predict_std(numpy, n_sample=subject.DRAWS),
        "the plain net": torch.no_grad()(lambda: net(x)),
    }
    calls |= {name: work for name, work in peers.scoring(x).items() if name in OTHERS}
    turns = {name: lambda c=call: [c() for _ in range(CALLS)] for name, call in calls.items()}
    timings = race({**turns, "gemm": limit.product()}, rounds=rounds)
    least = limit.least(timings.pop("gemm"), limit.flops(lambda: guard.score(x)))
    measurements = [Measurement.of(name, t, unit="ms", per=CALLS) for name, t in timings.items()]
    measurements.append(Measurement.of(limit.NAME, least, unit="ms"))
    return Record("latency", "Scoring one row", HOW, rounds, measurements)
