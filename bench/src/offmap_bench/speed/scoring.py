"""How fast 10,000 rows are scored with 50 draws."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

from offmap_bench.speed import limit, peer, subject
from offmap_bench.speed.race import race
from offmap_bench.speed.record import Claim, Measurement, Record

BATCHES = (512, 1024, 2048, 4096)
DEFAULT_BATCH = 32

HOW = """`guard.score` of a fitted SVD guard with a new seed every turn, so that nothing drawn is remembered, against the peer's
`predict_std`, which is the same number (score="paper"), at the quickest of the batch sizes 512, 1024, 2048 and 4096 and at its
default of 32. The bare GEMM is of {gflop:.1f} GFLOP: 2·P·N·Σ in·out = {passes:.1f} of the passes, the rest turns the noise by the
basis. The default score also looks for neighbours among 3,600 training rows, in the inputs and three layers."""


def run(rounds: int = 7) -> Record:
    """Ours, the peer's and a bare matrix product, in turns."""
    x = subject.table()["score"][0]
    guard, joined, theirs, numpy = subject.fitted(score="paper"), subject.fitted(), peer.model(), x.numpy()
    seeds = itertools.count()

    def ours() -> object:
        return replace(guard, seed=next(seeds)).score(x)

    def peers(batch: int) -> Callable[[], object]:
        return lambda: theirs.predict_std(numpy, batch_size=batch, n_sample=subject.DRAWS)

    timings = race(
        {
            "ours": ours,
            "joined": lambda: replace(joined, seed=next(seeds)).score(x),
            "gemm": limit.product(),
            "default": peers(DEFAULT_BATCH),
        }
        | {str(batch): peers(batch) for batch in BATCHES},
        rounds=rounds,
        at_most={"default": 2},
    )
    batch = min(map(str, BATCHES), key=lambda name: timings[name].best)
    flop, passes = limit.flops(ours), 2 * subject.DRAWS * subject.ROWS * subject.products()
    least = limit.least(timings["gemm"], flop)
    spent, tuned, default = (timings[k].best for k in ("ours", batch, "default"))
    return Record(
        "scoring",
        "Scoring 10,000 rows with 50 draws",
        HOW.format(gflop=flop / 1e9, passes=passes / 1e9),
        rounds,
        [
            Measurement.of('offmap, `guard.score`, score="paper"', timings["ours"]),
            Measurement.of("offmap, `guard.score`, the default score", timings["joined"]),
            Measurement.of(f"maxwent, `predict_std`, batch {batch}", timings[batch]),
            Measurement.of(f"maxwent, `predict_std`, batch {DEFAULT_BATCH} (its default)", timings["default"]),
            Measurement.of(limit.NAME, least),
        ],
        [
            Claim("times faster than the peer at its best", tuned / spent, "at least", 3.5),
            Claim("times faster than the peer at its default", default / spent, "at least", 40.0),
            Claim("times the bare GEMM", spent / least.best, "at most", 1.7),
        ],
    )
