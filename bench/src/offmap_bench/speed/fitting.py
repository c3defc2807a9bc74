"""Themes of fitting: complete fits, gradient steps, stacked nets, and the pass that finds the basis."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import offmap
from offmap.likelihoods import Gaussian
from offmap.maxwent.config import Runtime
from offmap.maxwent.train import adam, maxwent, minimize
from offmap.model.params import StackedModel, stack_models
from offmap.posterior.basis import observe
from offmap.posterior.distribution import scaling, svd
from offmap_bench.methods import anchored, negative_correlation
from offmap_bench.runner.base_models import models
from offmap_bench.speed import subjects as on
from offmap_bench.speed.measure import GEMM, Claim, Record, Timing, Work, count_flops, measurements, race, record
from offmap_bench.tasks.catalog import task
from offmap_bench.tasks.task import Task


def fitting(rounds: int = 7) -> Record:
    """Complete fits against the gradient steps of the authors' package."""
    steps, theirs = on.maxwent_steps(epochs=7)
    closed, paper = 'offmap, solver="closed-form"', 'offmap, solver="closed-form", score="paper"'
    refined, extrapolated = 'offmap, solver="refine", 500 steps (the default)', "maxwent, 20,000 steps (extrapolated)"
    works: dict[str, Work] = {
        closed: on.fit_guard, paper: lambda: on.fit_guard(score="paper"), refined: lambda: on.fit_guard("refine"),
        extrapolated: theirs,
    }  # fmt: skip
    bounds = {f"{GEMM} as the closed form": works[closed], f"{GEMM} as the default": works[refined]}
    timings = race(works, rounds=rounds, at_most={refined: 3}, gemm=bounds)
    timings[extrapolated] = timings[extrapolated].times(20_000 / steps)
    result = record("fitting", rounds, timings)
    result.measurements[3:3] = measurements({"maxwent, one gradient step": timings[extrapolated].times(1 / 20_000)}, "ms")
    values = {name: round(count_flops(works[fit]) / 1e9, 1) for name, fit in (("closed", closed), ("refined", refined))}
    return replace(result, values={"timed": steps, **values})


def paper_steps(rounds: int = 3) -> Record:
    """Fits of five nets on data of three sizes against the paper's settings, extrapolated from two short fits."""
    result, best = Record("paper_steps", rounds, []), dict[str, dict[str, float]]()
    for name in ("concrete", "power", "protein"):
        data = task(f"uci/{name}/extrapolation", 0)
        nets = models(data)

        def fit(data: Task = data, nets: Sequence[nn.Module] = nets, **settings: Any) -> Work:
            return lambda: offmap.fit(nets, data.train, data.valid, progress=False, **settings)

        works = {
            "closed form": fit(solver="closed-form"), "closed form, paper's score": fit(solver="closed-form", score="paper"),
            "default": fit(), "few": fit(config="paper", steps=100), "more": fit(config="paper", steps=500),
        }  # fmt: skip
        timings = race(works, rounds=rounds, at_most=dict.fromkeys(("default", "few", "more"), 2))
        few, more = timings.pop("few"), timings.pop("more")
        # the best turns compared, and the worst: turns side by side would favour slow short ones
        pairs = (zip(sorted(f), sorted(m), strict=True) for f, m in ((few.cpu, more.cpu), (few.wall, more.wall)))
        timings["paper"] = Timing(*([b - a for a, b in turns] for turns in pairs)).times(50_000 / (500 - 100))
        words = f"{name}, {len(data.train[1]):,} + {len(data.valid[1]):,} rows"
        shown = {"default": "default solver", "paper": "paper's settings (extrapolated)"}
        result.measurements.extend(measurements({f"{words}: {shown.get(n, n)}": t for n, t in timings.items()}))
        best[name] = {n: t.cpu[0] if n == "paper" else t.best for n, t in timings.items()}
    best["sum"] = {solver: sum(each[solver] for each in best.values()) for solver in next(iter(best.values()))}
    for solver, target in {"default": 50.0, "closed form": 300.0, "closed form, paper's score": 300.0}.items():
        what = f"times faster than the paper's settings, {solver}"
        result.claims.extend(Claim(f"{what}, {n}", t["paper"] / t[solver], "at least", target) for n, t in best.items())
    return result


def descent(members: int, basis: str = "svd", steps: int = 100) -> Callable[[], str]:
    """A hundred steps of the MaxWEnt objective for so many nets."""
    nets, rows = on.members()[:members], on.rows("train")
    stacked = stack_models(nets)
    model = Runtime().model(stacked.module, stacked.mean | stacked.fixed, rows.inputs)
    q = svd(nets, (x for x, _ in rows)) if basis == "svd" else scaling(nets)
    objective = maxwent(q, model, Gaussian(), entropy_weight=30.0)
    optimizer = adam(q.raw_scale.parameters(), lr=1e-4)
    return lambda: minimize(objective, optimizer, rows, steps=steps)


def steps(rounds: int = 15) -> Record:
    """SVD and scaling, for one net and for five."""
    words = {1: "one net", 5: "five nets, stacked"}
    works = {
        f"{title}, {words[n]}": descent(n, basis) for n in words for basis, title in (("scaling", "scaling"), ("svd", "SVD"))
    }
    return record("steps", rounds, race(works, rounds=rounds), "ms", per=100)


def stacking(rounds: int = 15) -> Record:
    """One net, five stacked nets, and five of the authors' package in turn."""
    taken, theirs = on.maxwent_steps(epochs=4)
    five, peer = "five nets, stacked", "maxwent, five nets in turn"
    works: dict[str, Work] = {"one net": descent(1), five: descent(5), peer: theirs}
    timings = race(works, rounds=rounds, gemm={f"{GEMM}, five nets": works[five]})
    timings[peer] = timings[peer].times(5 * 100 / taken)
    return record("stacking", rounds, timings, "ms", per=100)


ANCHORED = [anchored.Config(steps=50, tradeoff=t, anchor_scale=s) for t, s in product((0.1, 1.0, 10.0), (0.1, 1.0))]
CORRELATED = [negative_correlation.Config(steps=50, tradeoff=10.0**-k) for k in range(6)]


def grids(rounds: int = 3) -> Record:
    """Five members and a grid of six settings, stacked and in turn."""
    nets, options = on.members(), {"likelihood": Gaussian(), "runtime": Runtime(progress=False)}

    def fit(method: Any, nets: Sequence[nn.Module], configs: Sequence[Any]) -> object:
        return method.fit_grid(nets, on.rows("train"), on.rows("valid"), configs=configs, **options)

    anchor, correlated, turn = "anchored networks", "negative correlation", "six ensembles of five, one after another"
    thirty, stacked = f"{anchor}: thirty nets, one after another", f"{anchor}: all stacked"
    works: dict[str, Work] = {
        thirty: lambda: [fit(anchored, [net], [config]) for config in ANCHORED for net in nets],
        f"{anchor}: {turn}": lambda: [fit(anchored, nets, [config]) for config in ANCHORED],
        stacked: lambda: fit(anchored, nets, ANCHORED),
        f"{correlated}: {turn}": lambda: [fit(negative_correlation, nets, [config]) for config in CORRELATED],
        f"{correlated}: all stacked": lambda: fit(negative_correlation, nets, CORRELATED),
    }
    timings = race(works, rounds=rounds, gemm={f"{stacked}, {GEMM}": works[stacked]})
    return record("grids", rounds, timings, "ms", per=50)


def basis(rounds: int = 3) -> Record:
    """The pass that finds the basis, with `eigh` apart, against a forward pass and the authors' package, model by model."""
    passes: dict[str, Timing] = {}
    # as many rows as data sets have: the first few thousand cost more, as all of their inputs are counted
    for subject, rows in ((on.MLP, 102_400), (on.CONV1D, 20_480), (on.RESNET, 4_096), (on.TRANSFORMER, 8_192)):
        net, x = subject.net(), subject.inputs(rows)
        stacked, turns = stack_models(net), list[Timing]()

        def find_basis(stacked: StackedModel = stacked, x: Tensor = x, turns: list[Timing] = turns) -> None:
            turns.append(Timing())
            with mock.patch.object(torch.linalg, "eigh", partial(time_call, turns[-1], torch.linalg.eigh)):
                observe(stacked, lambda size: iter(x.split(max(on.BATCH, size))), rotated=True)

        works: dict[str, Work] = {"plain pass": lambda net=net, x=x: on.run_passes(net, x, on.BATCH), "both": find_basis}
        if subject.name == on.MLP.name:
            works["maxwent, `fit_svd`"] = lambda net=net, x=x: on.maxwent(net).fit_svd(x.numpy(), batch_size=on.BATCH)
        timings = race(works, rounds=rounds, gemm={GEMM: find_basis})
        measured = turns[1 : rounds + 1]  # the first is not measured
        both, eigh = timings.pop("both"), Timing([sum(t.cpu) for t in measured], [sum(t.wall) for t in measured])
        rest = Timing(*([a - b for a, b in zip(*pair, strict=True)] for pair in ((both.cpu, eigh.cpu), (both.wall, eigh.wall))))
        shown = {"plain pass": timings.pop("plain pass"), "basis pass": rest, "`eigh`": eigh, "basis pass and `eigh`": both}
        shown |= {GEMM: timings.pop(GEMM), **timings}
        passes |= {f"{subject.name}, {rows:,} rows: {name}": timing for name, timing in shown.items()}
    return record("basis", rounds, passes, "ms")


def time_call(timing: Timing, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Call a function as one more turn."""
    results: list[Any] = []
    timing.run(lambda: results.append(function(*args, **options)))
    return results[0]
