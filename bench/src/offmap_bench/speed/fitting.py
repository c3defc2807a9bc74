"""How long a fit takes."""

from __future__ import annotations

from offmap_bench.speed import limit, peer, subject
from offmap_bench.speed.race import race
from offmap_bench.speed.record import Claim, Measurement, Record

EPOCHS = 7
STEPS = 20_000

HOW = """`offmap.fit` with 3,600 rows to train on and 400 to validate, everything included: basis, φ, clip, threshold, and
for the default score the neighbours of every training row in four spaces, which is half of the closed form's time.
The peer's `fit` is timed over {timed} steps of its own (batch 128, its SVD basis ready) and extrapolated to 20,000;
the paper takes 50,000. The products of the closed form are {closed:.1f} GFLOP, those of the default {refined:.1f}."""


def run(rounds: int = 7) -> Record:
    """Ours against the peer's gradient steps."""
    theirs, (x, y) = peer.model(), subject.table()["train"]
    timed = EPOCHS * -(-len(x) // subject.BATCH)
    ours = {
        "closed form": lambda: subject.fitted(),
        "paper's": lambda: subject.fitted(score="paper"),
        "refine": lambda: subject.fitted(solver="refine"),
    }
    timings = race(
        {
            **ours,
            "steps": lambda: theirs.fit(x.numpy(), y.numpy(), epochs=EPOCHS, batch_size=subject.BATCH, verbose=0),
            "gemm": limit.product(),
        },
        rounds=rounds,
        at_most={"refine": 3},
    )
    whole = timings["steps"].best / timed * STEPS
    flop = {name: limit.flops(fit) for name, fit in ours.items()}
    least = {name: limit.least(timings["gemm"], count) for name, count in flop.items()}
    return Record(
        "fitting",
        "Fitting on 4,000 rows",
        HOW.format(timed=timed, closed=flop["closed form"] / 1e9, refined=flop["refine"] / 1e9),
        rounds,
        [
            Measurement.of('offmap, solver="closed-form"', timings["closed form"]),
            Measurement.of('offmap, solver="closed-form", score="paper"', timings["paper's"]),
            Measurement.of('offmap, solver="refine", 500 steps (the default)', timings["refine"]),
            Measurement.of("maxwent, one gradient step", timings["steps"], unit="ms", per=timed),
            Measurement.of("maxwent, 20,000 steps (extrapolated)", timings["steps"], per=timed / STEPS),
            Measurement.of(f"{limit.NAME} as the closed form", least["closed form"]),
            Measurement.of(f"{limit.NAME} as the default", least["refine"]),
        ],
        [
            Claim("times faster, closed form against 20,000 steps", whole / timings["closed form"].best, "at least", 100.0),
            Claim("times faster, the same with the paper's score", whole / timings["paper's"].best, "at least", 100.0),
        ],
    )
