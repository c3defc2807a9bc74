"""SWAG: a Gaussian around the average of the weights that a few more steps of SGD visit, diagonal plus low rank."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from offmap._types import Weights
from offmap.data import Batch
from offmap.errors import ConfigError
from offmap.maxwent.train import minimize
from offmap.model.params import stack_models
from offmap.posterior.noise import Normal, draw_noise
from offmap.posterior.predictive import Sampled
from offmap.progress import bar
from offmap_bench.methods.competitor import Competitor, Nets, check_fields, one_by_one
from offmap_bench.methods.stack import Problem

logger = logging.getLogger("offmap")

COLUMNS = "(columns)"
"""The address of the low-rank noise, which no parameter can have."""


@dataclass(frozen=True)
class Config:
    """SGD with momentum at a constant rate from the trained nets on; every `collect_every` steps the weights are noted."""

    steps: int = 2000
    lr: float = 1e-3
    momentum: float = 0.9
    collect_every: int = 50
    rank: int = 20  # K: how many of the latest deviations are kept
    scale: float = 1.0  # multiplies the standard deviation


@dataclass
class Moments:
    """Running mean and sum of squared deviations of what was noted, {name: (M, ...)}, and the last K deviations of the mean.

    With w_1 … w_T noted and w̄_i the mean of the first i of them, column i is w_i − w̄_i.
    """

    rank: int
    count: int = 0
    mean: Weights = field(default_factory=dict[str, Tensor])
    squares: Weights = field(default_factory=dict[str, Tensor])
    columns: list[Weights] = field(default_factory=list[Weights])

    @torch.no_grad()
    def note(self, weights: Weights) -> None:
        """One more state of all members; in float64, for the deviations are small beside the weights."""
        now = {name: w.detach().double() for name, w in weights.items()}
        before = self.mean or now
        self.count += 1
        self.mean = {n: before[n] + (w - before[n]) / self.count for n, w in now.items()}
        step = {n: (w - before[n]) * (w - self.mean[n]) for n, w in now.items()}
        self.squares = {n: s + self.squares[n] if self.squares else s for n, s in step.items()}
        deviation = {n: (w - self.mean[n]).to(weights[n]) for n, w in now.items()}
        self.columns = [*self.columns, deviation][-self.rank :]

    def std(self) -> Weights:
        """√((1/T) Σ (w_i − w̄)²), {name: (M, ...)}."""
        return {name: (s / self.count).sqrt() for name, s in self.squares.items()}


@dataclass(frozen=True)
class Draw:
    """w = w̄ + c·(σ ⊙ z₁ + D·z₂/√(K−1))/√2, with normal z₁ per weight and z₂ per column of D; c is `scale`."""

    mean: Weights
    std: Weights
    columns: Weights  # {name: (M, K, ...)}
    fixed: Weights
    scale: float = 1.0

    def __call__(self, span: range, seed: int) -> Weights:
        """Some draws of every member, member-major: {name: (M·p, ...)}."""
        first = next(iter(self.columns.values()))
        like = {COLUMNS: first.new_empty(first.shape[:2])}
        along = draw_noise(like, span, seed=seed, stream="infer", noise=Normal())[COLUMNS] / math.sqrt(first.shape[1] - 1)
        drawn: Weights = {}
        for name, mean in self.mean.items():  # one parameter at a time: what is made on the way stays small
            z = draw_noise({name: mean}, span, seed=seed, stream="infer", noise=Normal())[name]
            low = torch.einsum("mpk,mk...->mp...", along, self.columns[name])
            delta = (self.std[name].unsqueeze(1) * z + low) * (self.scale / math.sqrt(2))
            drawn[name] = (mean.unsqueeze(1) + delta).flatten(0, 1)
        return drawn | {name: t.repeat_interleave(len(span), 0) for name, t in self.fixed.items()}


def _fit(nets: Nets, problem: Problem, config: Config) -> Sampled:
    """Let copies of the trained nets wander, all on the same batches, and collect their states; `valid` teaches nothing."""
    stacked = stack_models(nets)
    model = problem.runtime.model(stacked.module, stacked.mean | stacked.fixed, problem.valid.inputs)

    def wander(lr: float) -> Moments | None:
        """Where all were on the way; None if one is lost."""
        weights = {n: w.clone().requires_grad_() for n, w in stacked.mean.items()}
        moments = Moments(config.rank)

        def objective(step: int, batch: Batch) -> Tensor:
            return problem.likelihood.nll(model(weights | stacked.fixed, batch[0]), batch[1]).mean(1).sum()

        def collect(step: int, loss: Tensor) -> bool:
            if (step + 1) % config.collect_every == 0:
                moments.note(weights)
                advance(step + 1, "")
            return False

        optimizer = torch.optim.SGD(list(weights.values()), lr=lr, momentum=config.momentum)
        with bar("SWAG", config.steps, show=problem.runtime.progress) as advance:
            stop_reason = minimize(objective, optimizer, problem.train, steps=config.steps, monitors=[collect], seed=problem.seed)
        finite = stop_reason != "diverged" and all(bool(mean.isfinite().all()) for mean in moments.mean.values())
        return moments if finite else None

    for lr in (config.lr / 10**tenths for tenths in range(4)):  # confident nets have steep losses: start again, slower
        if (moments := wander(lr)) is not None:
            break
        logger.warning("SWAG diverged at rate %g (the loss is not finite).", lr)
    else:
        raise ConfigError(f"SWAG diverged at rates from {config.lr:g} down to {config.lr / 1000:g}: lower `lr`.")
    mean, std = ({n: w.to(stacked.mean[n]) for n, w in weights.items()} for weights in (moments.mean, moments.std()))
    columns = {n: torch.stack([column[n] for column in moments.columns], 1) for n in mean}
    return Sampled(model, mean | stacked.fixed, Draw(mean, std, columns, stacked.fixed, config.scale))


def _check(config: Config) -> None:
    check_fields(config)
    if config.rank < 2 or config.steps < 2 * config.collect_every:
        raise ConfigError(
            f"Expected `rank` of at least 2 and `steps` for at least two states, but got {config.rank}, and {config.steps} steps "
            f"with one state every {config.collect_every}."
        )


swag = Competitor(Config, one_by_one(_fit), _check)
