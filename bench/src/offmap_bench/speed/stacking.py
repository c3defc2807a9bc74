"""What five nets cost when they are fitted together."""

from __future__ import annotations

from collections.abc import Callable

from offmap.data import Rows
from offmap.likelihoods import Gaussian
from offmap.maxwent.objective import maxwent
from offmap.maxwent.train import adam, minimize
from offmap.posterior.construct import centre, svd
from offmap.posterior.protocol import Runtime
from offmap_bench.speed import limit, peer, subject
from offmap_bench.speed.race import race
from offmap_bench.speed.record import Claim, Measurement, Record

MEMBERS, STEPS = 5, 100
EPOCHS = 4  # of the peer: 29 steps each

HOW = """One gradient step of the MaxWEnt objective in the SVD basis, batch 128, one draw a net, through the library's own
loop: the mean over 100 steps. The peer's is the mean of four epochs of its `fit`, five times for five nets."""


def run(rounds: int = 15) -> Record:
    """One net, five stacked nets and the peer's, in turns."""
    theirs, (x, y), five = peer.model(), subject.table()["train"], descent(MEMBERS)
    timings = race(
        {
            "one": descent(1),
            "five": five,
            "peer": lambda: theirs.fit(x.numpy(), y.numpy(), epochs=EPOCHS, batch_size=subject.BATCH, verbose=0),
            "gemm": limit.product(),
        },
        rounds=rounds,
    )
    taken = EPOCHS * -(-len(x) // subject.BATCH)
    return Record(
        "stacking",
        "A gradient step for five stacked nets",
        HOW,
        rounds,
        [
            Measurement.of("one net", timings["one"], unit="ms", per=STEPS),
            Measurement.of("five nets, stacked", timings["five"], unit="ms", per=STEPS),
            Measurement.of("maxwent, five nets in turn", timings["peer"], unit="ms", per=taken / MEMBERS),
            Measurement.of(f"{limit.NAME}, five nets", limit.least(timings["gemm"], limit.flops(five)), unit="ms", per=STEPS),
        ],
        [Claim("times the step of one", timings["five"].best / timings["one"].best, "at most", 3.0)],
    )


def descent(members: int) -> Callable[[], str]:
    """A hundred steps for that many nets."""
    nets = [subject.net(seed) for seed in range(members)]
    rows = Rows(*subject.table()["train"], subject.BATCH, "train")
    at = centre(nets)
    model = Runtime().model(at.net, at.mean | at.fixed, rows.inputs)
    q = svd(nets, (x for x, _ in rows))
    objective = maxwent(q, model, Gaussian(), entropy_weight=30.0)
    optimizer = adam(q.raw_scale.parameters(), lr=1e-4)
    return lambda: minimize(objective, optimizer, rows, steps=STEPS)
