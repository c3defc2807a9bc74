"""One plan becomes one result: train, fit, score, and look at the grid that will be drawn."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from offmap.data import Place, Rows, as_batches, load_rows
from offmap.detectors.nearest import nearest
from offmap.evaluation import Evaluation, evaluate
from offmap.fit import fit, guard
from offmap.guard import Guard
from offmap.integrations.nets import mlp
from offmap.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood
from offmap.maxwent.config import Runtime
from offmap.model.select import stack_models
from offmap.posterior.predictive import Predictive, Sampled, Scorer
from offmap_bench.demo.plans import DROPOUT, ENSEMBLE, JOINED, NEAREST, PLAIN, SCALING, SVD, SVD5, Plan
from offmap_bench.methods import deep_ensemble, mc_dropout
from offmap_bench.runner.cell import warm_up
from offmap_bench.runner.watch import View, grid, view
from offmap_bench.tasks.task import Task

Value = TypeVar("Value")
LIKELIHOODS: dict[str, Likelihood] = {"gaussian": Gaussian(), "bernoulli": Bernoulli(), "categorical": Categorical()}
SILENT = Runtime(progress=False)
Report = Callable[[str], None]
"""Told what is about to be done."""


@dataclass(frozen=True)
class Result:
    """What one plan gave. `seconds` of a method on top of the plain net (or the ensemble) do not count that net's training."""

    plan: Plan
    task: Task
    evaluation: Evaluation
    seconds: dict[str, float]
    thresholds: dict[str, float]
    views: dict[str, View]
    labels: Tensor  # what the SVD guard takes the first OOD set for; (n,), empty for regression
    clip: float | None  # the SVD guard's own choice
    wall: float


@dataclass
class Bench:
    """The plan at work: makes nets, trains them, keeps the time."""

    plan: Plan
    task: Task
    seed: int
    report: Report

    def __post_init__(self) -> None:
        self.law = LIKELIHOODS[self.task.likelihood]
        self.seconds: dict[str, float] = {}
        place = Place(torch.device("cpu"), torch.float32)
        self.train = as_batches(self.task.train, place, name="train", batch_size=self.plan.batch_size)
        self.valid: Rows = load_rows(as_batches(self.task.valid, place, name="valid"))

    def models(self, members: range, dropout: float = 0.0) -> list[nn.Module]:
        """Fresh nets; a member's start depends on the seed and its number alone."""
        sizes = self.task.inputs, self.task.outputs
        return [
            mlp(*sizes, hidden=self.plan.hidden, dropout=dropout, seed=self.seed * self.plan.members + member)
            for member in members
        ]

    def plain(self, members: range) -> list[nn.Module]:
        """Nets trained by maximum likelihood."""
        config = deep_ensemble.Config(steps=self.plan.steps, lr=self.plan.lr)
        trained = deep_ensemble.fit(
            self.models(members), self.train, self.valid, likelihood=self.law, config=config, seed=self.seed, runtime=SILENT
        )
        return trained.nets()

    def dropout(self) -> Predictive:
        """A net trained with dropout, left on when it predicts."""
        config = mc_dropout.Config(steps=self.plan.steps, lr=self.plan.lr)
        nets = self.models(range(1), self.plan.dropout)
        return mc_dropout.fit(nets, self.train, self.valid, likelihood=self.law, config=config, seed=self.seed, runtime=SILENT)

    def guard(self, predictive: Predictive) -> Guard:
        """The paper's score over any method."""
        return guard(predictive, self.task.valid, likelihood=self.law, score="paper", draws=self.plan.draws, seed=self.seed)

    def joined(self, predictive: Predictive) -> Guard:
        """The default score: disagreement and distance to training rows."""
        options: dict[str, Any] = {"train": self.task.train, "draws": self.plan.draws, "seed": self.seed}
        return guard(predictive, self.task.valid, likelihood=self.law, **options)

    def maxwent(self, nets: list[nn.Module], basis: str, **options: Any) -> Guard:
        """A guard around trained nets."""
        return fit(
            nets, self.task.train, self.task.valid, likelihood=self.law, basis=basis,  # pyright: ignore[reportArgumentType]
            score="paper", draws=self.plan.draws, seed=self.seed, progress=False, **self.plan.fit | options,
        )  # fmt: skip


def run(plan: Plan, seed: int, report: Report = lambda doing: None) -> Result:
    """All methods on one task, with one thread: small tensors run slower on two."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _run(Bench(plan, plan.task(), seed, report))
    finally:
        torch.set_num_threads(threads)


def _run(bench: Bench) -> Result:
    start = time.perf_counter()
    plan, task = bench.plan, bench.task
    warm_up()
    first = timed(bench, PLAIN, lambda: bench.plain(range(1)))
    others = timed(bench, ENSEMBLE, lambda: bench.plain(range(1, plan.members)))
    bench.seconds[ENSEMBLE] += bench.seconds[PLAIN]
    nets = first + others
    guards = {PLAIN: bench.guard(fixed(first, bench.valid)), ENSEMBLE: bench.guard(fixed(nets, bench.valid))}
    guards[DROPOUT] = bench.guard(timed(bench, DROPOUT, bench.dropout))
    for label, basis in ((SCALING, "identity"), (SVD, "svd")):
        guards[label] = timed(bench, label, lambda basis=basis: bench.maxwent(first, basis))
    entropy_weight = guards[SVD].history.chosen["entropy_weight"]  # what one net chose serves for five
    guards[SVD5] = timed(bench, SVD5, lambda: bench.maxwent(nets, "svd", entropy_weight=entropy_weight))
    joined = timed(bench, JOINED, lambda: bench.joined(guards[SVD5].predictive))
    bench.seconds[JOINED] += bench.seconds[SVD5]
    baseline = timed(bench, NEAREST, lambda: nearest(task.train[0], standardise=plan.standardise))
    bench.report("Looking around")
    scorers: dict[str, Scorer] = {**guards, JOINED: joined, NEAREST: baseline}
    evaluation = evaluate(scorers, task.test, task.ood)
    return Result(
        plan, task, evaluation, bench.seconds, {label: g.threshold for label, g in {**guards, JOINED: joined}.items()},
        look(plan, task, guards), strange_labels(task, guards[SVD]), guards[SVD].clip, time.perf_counter() - start,
    )  # fmt: skip


def timed(bench: Bench, label: str, work: Callable[[], Value]) -> Value:
    """Do the work, and note how long it took."""
    bench.report(label)
    start = time.perf_counter()
    result = work()
    bench.seconds[label] = time.perf_counter() - start
    return result


def fixed(nets: list[nn.Module], valid: Rows) -> Sampled:
    """Trained nets as they are, nothing random."""
    at = stack_models(nets)
    weights = at.mean | at.fixed
    return Sampled(SILENT.model(at.net, weights, valid.inputs), weights)


def look(plan: Plan, task: Task, guards: dict[str, Guard]) -> dict[str, View]:
    """Every guard on the grid, unclipped, and the SVD guard clipped."""
    x = grid(task.inputs, plan.grid)
    if x is None:
        return {}
    views = {label: view(g, x, None) for label, g in guards.items()}
    return views | {clipped(plan): view(guards[SVD], x, plan.clip)}


def clipped(plan: Plan) -> str:
    """The name of the clipped panel."""
    return f"{SVD}, clipped at {plan.clip:g}"


def strange_labels(task: Task, guarded: Guard) -> Tensor:
    """The classes that a guard would give to the first OOD set."""
    label = guarded.predict(next(iter(task.ood.values()))).label
    return torch.zeros(0, dtype=torch.int64) if label is None else label
