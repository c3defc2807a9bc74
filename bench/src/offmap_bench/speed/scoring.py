"""Themes of scoring in memory: many rows, one row, and draws beside plain calls of the model."""

from __future__ import annotations

import torch

from offmap.maxwent.config import Runtime
from offmap.model.params import stack_models
from offmap.posterior.distribution import svd
from offmap.posterior.predictive import Stochastic
from offmap_bench.speed import peers
from offmap_bench.speed import subjects as on
from offmap_bench.speed.measure import GEMM, Claim, Record, Work, count_flops, measurements, race, record, repeat


def scoring(rounds: int = 7) -> Record:
    """10,000 rows with 50 new draws: ours, the authors' package, and a bare GEMM."""
    x, theirs = on.table()["score"][0], peers.maxwent()
    paper, default = on.fit_guard(score="paper"), on.fit_guard()

    def predict_std(batch: int) -> Work:
        return lambda: theirs.predict_std(x.numpy(), batch_size=batch, n_sample=on.DRAWS)

    ours, combined = 'offmap, `guard.score`, score="paper"', "offmap, `guard.score`, the default score"
    tuned = {f"maxwent, `predict_std`, batch {batch}": predict_std(batch) for batch in (512, 1024, 2048, 4096)}
    untuned = "maxwent, `predict_std`, batch 32 (its default)"
    works: dict[str, Work] = {ours: lambda: on.reseed(paper).score(x), combined: lambda: on.reseed(default).score(x)}
    timings = race({**works, **tuned, untuned: predict_std(32)}, rounds=rounds, at_most={untuned: 2}, gemm={GEMM: works[ours]})
    quickest = min(tuned, key=lambda name: timings[name].best)
    best, tuned_best, untuned_best, gemm = (timings[name].best for name in (ours, quickest, untuned, GEMM))
    products = sum(p.numel() for p in on.trained_net().parameters() if p.ndim == 2)
    claims = [
        Claim("times faster than the peer at its best", tuned_best / best, "at least", 3.5),
        Claim("times faster than the peer at its default", untuned_best / best, "at least", 40.0),
        Claim("times the bare GEMM", best / gemm, "at most", 1.7),
    ]
    values = {"gflop": round(count_flops(works[ours]) / 1e9, 1), "passes": round(2 * on.DRAWS * len(x) * products / 1e9, 1)}
    shown = measurements({name: timings[name] for name in (ours, combined, quickest, untuned, GEMM)})
    return Record("scoring", rounds, shown, claims, values)


def latency(rounds: int = 15, calls: int = 20) -> Record:
    """One row: ours, others and the model alone."""
    x, theirs, net = on.table()["score"][0][:1], peers.maxwent(), on.trained_net()
    guard, default, fresh = (on.fit_guard(score=score) for score in ("paper", "default", "paper"))
    works: dict[str, Work] = {
        'offmap, `guard.score(x)`, score="paper"': lambda: guard.score(x),
        "offmap, `guard.score(x)`, the default score": lambda: default.score(x),
        "offmap, `guard(x)`": lambda: guard(x),
        "offmap, `guard.score(x)`, the first call": lambda: on.reseed(fresh).score(x),  # leaves the cache of `guard` alone
        "maxwent, `predict_std(x)`": lambda: theirs.predict_std(x.numpy(), n_sample=on.DRAWS),
        "the plain net": torch.no_grad()(lambda: net(x)),
    }
    works |= {name: work for name, work in peers.scorers(x).items() if name != "offmap"}
    turns = {name: repeat(calls, work) for name, work in works.items()}
    return record("latency", rounds, race(turns, rounds=rounds, gemm={GEMM: next(iter(turns.values()))}), "ms", per=calls)


SMALL = [
    (subject, 50, batch, 0.5 if batch <= 128 else 1.2, all_rows)
    for subject in (on.MLP, on.SMALL_CONV1D, on.CONV1D)
    for all_rows in (True, False)
    for batch in (32, 128, 512)
]
LARGE = [(on.RESNET, 10, 1, None, False), (on.RESNET, 10, 128, 1.3, False), (on.TRANSFORMER, 10, 32, None, False),
         (on.TRANSFORMER, 10, 128, 1.3, False), (on.TRANSFORMER, 10, 512, 1.3, False)]  # fmt: skip
"""Subject, draws, batch, the bound of the cost against plain calls, and whether all rows are scored or one batch."""


def architectures(rounds: int = 5) -> Record:
    """Draws against as many plain calls of the model, case by case."""
    result = Record("architectures", rounds, [])
    for subject, draws, batch, target, all_rows in SMALL + LARGE:
        net, x = subject.net(), subject.inputs(subject.rows if all_rows else batch)
        at = stack_models(net)
        model = Runtime(batch_size=batch).model(at.module, at.mean, x)
        predictive, seeds = Stochastic(model, svd(net, [subject.inputs(64)])), iter(range(10**6))
        works: dict[str, Work] = {
            "plain": lambda net=net, x=x, batch=batch, draws=draws: on.run_passes(net, x, batch, draws),
            "ours": lambda p=predictive, x=x, draws=draws, seeds=seeds: p.outputs(x, draws, clip=None, seed=next(seeds)),
        }
        plain, ours = race(works, rounds=rounds).values()
        ratio = ours.best / plain.best
        rows = f"{subject.rows:,} rows in batches of {batch}" if all_rows else f"one batch of {batch}"
        case, chunks = f"{subject.name}, {draws} draws, {rows}", f"offmap, chunks of {model.chunk_size} ({ratio:.2f} times)"
        result.measurements.extend(measurements({f"{case}: plain calls": plain, chunks: ours}, "ms"))
        result.claims.extend([Claim(f"{case}: times the plain calls", ratio, "at most", target)] if target else [])
        print(case, chunks, flush=True)
    return result
