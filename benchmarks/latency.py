"""How long one row waits for its score."""

from __future__ import annotations

import torch

from benchmarks import peer, subject
from benchmarks.race import race
from benchmarks.record import Measurement, Record

CALLS = 20

HOW = """One row, 50 draws, the mean over 20 calls in a row. `guard(x)` draws twice: unclipped for the score, clipped for the
prediction."""


def run(rounds: int = 15) -> Record:
    """Ours, the peer's and the plain net, in turns."""
    x = subject.table()["score"][0][:1]
    guard, theirs, net, numpy = subject.fitted(), peer.model(), subject.net(), x.numpy()
    calls = {
        "offmap, `guard.score(x)`": lambda: guard.score(x),
        "offmap, `guard(x)`": lambda: guard(x),
        "maxwent, `predict_std(x)`": lambda: theirs.predict_std(numpy, n_sample=subject.DRAWS),
        "the plain net": torch.no_grad()(lambda: net(x)),
    }
    timings = race({name: lambda c=call: [c() for _ in range(CALLS)] for name, call in calls.items()}, rounds=rounds)
    measurements = [Measurement.of(name, t, unit="ms", per=CALLS) for name, t in timings.items()]
    return Record("latency", "Scoring one row", HOW, rounds, measurements)
