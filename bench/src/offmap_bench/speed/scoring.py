"""Themes of scoring in memory: many rows, one row, and draws beside plain calls of the model."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from offmap.model.select import stack_models
from offmap.posterior.construct import svd
from offmap.posterior.predictive import Stochastic
from offmap.posterior.protocol import Runtime
from offmap_bench.speed import peers
from offmap_bench.speed.measure import GEMM, Claim, Measurement, Record, Work, compare, count_flops, measurements, race, repeat
from offmap_bench.speed.subjects import (
    CONV1D,
    DRAWS,
    MLP,
    RESNET,
    ROWS,
    SMALL_CONV1D,
    TRANSFORMER,
    Subject,
    fit_guard,
    reseed,
    run_passes,
    table,
    trained_net,
)  # fmt: skip

BATCHES = (512, 1024, 2048, 4096)


def scoring(rounds: int = 7) -> Record:
    """10,000 rows with 50 new draws: ours, the authors' package, and a bare GEMM."""
    x, theirs = table()["score"][0], peers.maxwent()
    paper, default = fit_guard(score="paper"), fit_guard()

    def predict_std(batch: int) -> Work:
        return lambda: theirs.predict_std(x.numpy(), batch_size=batch, n_sample=DRAWS)

    ours, joined = 'offmap, `guard.score`, score="paper"', "offmap, `guard.score`, the default score"
    tuned = {f"maxwent, `predict_std`, batch {batch}": predict_std(batch) for batch in BATCHES}
    untuned = "maxwent, `predict_std`, batch 32 (its default)"
    contestants: dict[str, Work] = {ours: lambda: reseed(paper).score(x), joined: lambda: reseed(default).score(x)}
    contestants |= {**tuned, untuned: predict_std(32)}
    timings = race(contestants, rounds=rounds, at_most={untuned: 2}, gemm={GEMM: contestants[ours]})
    best = min(tuned, key=lambda name: timings[name].best)
    products = sum(p.numel() for p in trained_net().parameters() if p.ndim == 2)
    return Record(
        "scoring",
        rounds,
        measurements({name: timings[name] for name in (ours, joined, best, untuned, GEMM)}),
        [
            ratio("times faster than the peer at its best", timings[best], timings[ours], "at least", 3.5),
            ratio("times faster than the peer at its default", timings[untuned], timings[ours], "at least", 40.0),
            ratio("times the bare GEMM", timings[ours], timings[GEMM], "at most", 1.7),
        ],
        {"gflop": round(count_flops(contestants[ours]) / 1e9, 1), "passes": round(2 * DRAWS * ROWS * products / 1e9, 1)},
    )


def latency(rounds: int = 15, calls: int = 20) -> Record:
    """One row: ours, others and the model alone."""
    x, theirs, net = table()["score"][0][:1], peers.maxwent(), trained_net()
    guard, default, fresh = fit_guard(score="paper"), fit_guard(), fit_guard(score="paper")  # `fresh` leaves the cache of `guard`
    contestants: dict[str, Work] = {
        'offmap, `guard.score(x)`, score="paper"': lambda: guard.score(x),
        "offmap, `guard.score(x)`, the default score": lambda: default.score(x),
        "offmap, `guard(x)`": lambda: guard(x),
        "offmap, `guard.score(x)`, the first call": lambda: reseed(fresh).score(x),
        "maxwent, `predict_std(x)`": lambda: theirs.predict_std(x.numpy(), n_sample=DRAWS),
        "the plain net": torch.no_grad()(lambda: net(x)),
    }
    contestants |= {name: work for name, work in peers.scorers(x).items() if name != "offmap"}
    turns = {name: repeat(calls, call) for name, call in contestants.items()}
    timings = race(turns, rounds=rounds, gemm={GEMM: repeat(calls, lambda: guard.score(x))})
    return Record("latency", rounds, measurements(timings, "ms", per=calls))


# --------------------------------------------------------------------------------------------------------- architectures


@dataclass(frozen=True)
class Case:
    """So many draws on one batch, or on all rows of the subject; `target` bounds the cost against plain calls."""

    subject: Subject
    draws: int
    batch: int
    target: float | None = None
    all_rows: bool = False

    def __str__(self) -> str:
        rows = f"{self.subject.rows:,} rows in batches of {self.batch}" if self.all_rows else f"one batch of {self.batch}"
        return f"{self.subject.name}, {self.draws} draws, {rows}"

    def contestants(self) -> tuple[int, dict[str, Work]]:
        """The chunk size that was chosen, plain calls, and ours."""
        net, x = self.subject.net(), self.subject.inputs(self.subject.rows if self.all_rows else self.batch)
        at = stack_models(net)
        model = Runtime(batch_size=self.batch).model(at.net, at.mean, x)
        predictive, seeds = Stochastic(model, svd(net, [self.subject.inputs(64)])), iter(range(10**6))
        return model.chunk_size, {
            "plain": lambda: run_passes(net, x, self.batch, self.draws),
            "ours": lambda: predictive.outputs(x, self.draws, clip=None, seed=next(seeds)),
        }


CASES = [
    *(Case(small, 50, batch, 0.5 if batch <= 128 else 1.2, all_rows)
      for small in (MLP, SMALL_CONV1D, CONV1D) for all_rows in (True, False) for batch in (32, 128, 512)),
    Case(RESNET, 10, 1), Case(RESNET, 10, 128, 1.3),
    Case(TRANSFORMER, 10, 32), Case(TRANSFORMER, 10, 128, 1.3), Case(TRANSFORMER, 10, 512, 1.3),
]  # fmt: skip


def architectures(rounds: int = 5) -> Record:
    """Draws against as many plain calls, case by case."""
    measured: list[Measurement] = []
    claims: list[Claim] = []
    for case in CASES:
        chunk, contestants = case.contestants()
        timings = race(contestants, rounds=rounds)
        ratio = timings["ours"].best / timings["plain"].best
        labels = {f"{case}: plain calls": "plain", f"offmap, chunks of {chunk} ({ratio:.2f} times)": "ours"}
        measured += measurements({label: timings[name] for label, name in labels.items()}, "ms")
        if case.target is not None:
            claims.append(Claim(f"{case}: times the plain calls", ratio, "at most", case.target))
        print(f"{case}: {ratio:.2f}, chunk {chunk}", flush=True)
    return Record("architectures", rounds, measured, claims)
