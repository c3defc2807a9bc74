"""What the SVD basis adds to a gradient step: the paper says it doubles it."""

from __future__ import annotations

from collections.abc import Callable

from offmap.data import Rows
from offmap.likelihoods import Gaussian
from offmap.maxwent.objective import maxwent
from offmap.maxwent.train import adam, minimize
from offmap.posterior.construct import centre, scaling, svd
from offmap.posterior.protocol import Runtime
from offmap_bench.speed import subject
from offmap_bench.speed.race import race
from offmap_bench.speed.record import Claim, Measurement, Record

STEPS = 100

HOW = """One gradient step of the MaxWEnt objective, batch 128, one draw a net, through the library's own loop: the mean over 100
steps. *Scaling* is V = I; *SVD* turns the noise of every matrix by its basis first, which for a fan-in as large as the batch is
as many multiplications as the forward pass. The paper says that an SVD step costs about twice a scaling step."""


def run(rounds: int = 15) -> Record:
    """Both parameterizations for one net and for five, in turns."""
    contestants = {f"{basis} {members}": descent(basis, members) for members in (1, 5) for basis in ("scaling", "svd")}
    timings = race(contestants, rounds=rounds)
    words = {1: "one net", 5: "five nets, stacked"}
    return Record(
        "steps",
        "An SVD step against a scaling step",
        HOW,
        rounds,
        [
            Measurement.of(f"{label}, {words[members]}", timings[f"{basis} {members}"], unit="ms", per=STEPS)
            for members in (1, 5)
            for basis, label in (("scaling", "scaling"), ("svd", "SVD"))
        ],
        [
            Claim(f"times the scaling step, {words[m]}", timings[f"svd {m}"].best / timings[f"scaling {m}"].best, "at most", 2.0)
            for m in (1, 5)
        ],
    )


def descent(basis: str, members: int) -> Callable[[], str]:
    """A hundred steps for that many nets."""
    nets = [subject.net(seed) for seed in range(members)]
    rows = Rows(*subject.table()["train"], subject.BATCH, "train")
    at = centre(nets)
    model = Runtime().model(at.net, at.mean | at.fixed, rows.inputs)
    q = svd(nets, (x for x, _ in rows)) if basis == "svd" else scaling(nets)
    objective = maxwent(q, model, Gaussian(), entropy_weight=30.0)
    optimizer = adam(q.raw_scale.parameters(), lr=1e-4)
    return lambda: minimize(objective, optimizer, rows, steps=STEPS)
