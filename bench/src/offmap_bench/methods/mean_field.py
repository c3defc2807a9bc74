"""A mean-field Bayesian neural net from its own start: the paper's competitor BNN (its tables 1 and 2), λ by validation NLL.

It is the same weight distribution as MaxWEnt's, w = μ + σ ⊙ z with normal z, with a mean that is trained from an untrained net on
and the prior N(0, σ₀²I). `bnn` starts from trained nets instead, for the paper's ablation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from offmap._types import Weights
from offmap.data import Batch, Rows
from offmap.data.batch import take_rows
from offmap.errors import ConfigError
from offmap.integrations.nets import Stack, Training, train_stack
from offmap.likelihoods import Likelihood
from offmap.model.forward import BatchedModel
from offmap.model.params import StackedModel, stack_models
from offmap.posterior.distribution import WeightDistribution
from offmap.posterior.noise import Normal, Stream, draw_noise
from offmap.posterior.predictive import History, Stochastic
from offmap_bench.methods.base import POSITIVE, Nets, Problem, check_fields, grid_fitters
from offmap_bench.methods.elbo import kl

GRID = tuple(10.0**k for k in range(-3, 4))
"""The paper's λ."""


@dataclass(frozen=True)
class Config(Training):
    """Every member keeps its state of lowest validation NLL; budget, prior and grid are the paper's, the start the authors'.

    `tradeoff` is λ of E_q[Σ NLL] + λ·KL over the n training rows: 1 is the Bayesian posterior, less a cold one. Per row, as it is
    trained, the KL is weighted by λ/n. (`bnn.Config.tradeoff` is λ·d/n, as MaxWEnt's.)
    """

    steps: int = 50_000
    tradeoff: float = 1.0
    prior_variance: float = 1.0  # σ₀²
    draws_per_step: int = 1
    initial_raw_scale: float = -3.0  # softplus⁻¹ of σ at the start
    risk_draws: int = 50


@dataclass(frozen=True)
class Posteriors:
    """Q over G settings × M members, setting-major, and how it is trained."""

    q: WeightDistribution
    model: BatchedModel
    likelihood: Likelihood
    config: Config
    members: int
    seed: int

    def draw(self, index: range, stream: Stream, scale: Mapping[str, Tensor]) -> Weights:
        """W = μ + σ ⊙ z, {name: (G·M·P, ...)}, with the same z in every setting."""
        weights = {name: t.repeat_interleave(len(index), 0) for name, t in self.q.fixed.items()}
        for name, mean in self.q.mean.items():
            z = draw_noise({name: mean[: self.members]}, index, seed=self.seed, stream=stream, noise=Normal())[name]
            mu, sigma = (t.unflatten(0, (-1, self.members)).unsqueeze(2) for t in (mean, scale[name]))
            weights[name] = (mu + sigma * z).flatten(0, 2)  # (G, M, 1, ...), (M, P, ...)
        return weights

    def losses(self, weight: Tensor, step: int, batch: Batch) -> Tensor:
        """E_q[NLL] + weight·KL, summed over the members of every setting, (G,); the weight is (G,)."""
        draws, scale = self.config.draws_per_step, self.q.scale()
        outputs = self.model(self.draw(range(step * draws, (step + 1) * draws), "fit", scale), batch[0])
        risk = self.likelihood.nll(outputs, batch[1]).mean(1).unflatten(0, (-1, self.members, draws)).mean(2)
        divergence = kl(self.q, self.config.prior_variance, scale=scale).unflatten(0, (-1, self.members))
        return (risk + weight.to(risk)[:, None] * divergence).sum(1)

    @torch.no_grad()
    def validation(self, valid: Rows) -> Tensor:
        """NLL of the prediction that every member's draws make together, (G·M,)."""
        draws, members, scale = self.config.risk_draws, self.q.members, self.q.scale()
        total = torch.zeros(members, dtype=torch.float64, device=valid.targets.device)
        for rows in self.model.blocks(valid.inputs, members * draws):
            x, y = take_rows(valid.inputs, rows), valid.targets[rows]
            outputs = self.model.outputs(lambda span: self.draw(span, "valid", scale), draws, x, members=members)
            by_member = outputs.unflatten(0, (members, draws))
            total += torch.stack([self.likelihood.predictive_nll(drawn, y).double().sum() for drawn in by_member])
        return total / valid.rows

    def setting(self, number: int, risk: Tensor, stop_reason: str, config: Config) -> Stochastic:
        """One setting by itself, M members."""
        part = slice(number * self.members, (number + 1) * self.members)
        q = WeightDistribution(
            {n: w.detach()[part].clone() for n, w in self.q.mean.items()},
            initial_scale={n: s.detach()[part] for n, s in self.q.scale().items()},
            fixed={n: t[part] for n, t in self.q.fixed.items()},
            noise=Normal(),
            trainable_mean=True,
        ).requires_grad_(False)
        history = History(stop_reason=stop_reason, chosen={"tradeoff": config.tradeoff})
        history.finish(risk[part], q.mean_log_square())
        return Stochastic(self.model, q, history)


def _fit_all(nets: Nets, problem: Problem, configs: Sequence[Config]) -> list[Stochastic]:
    """Minimise E_q[NLL] + (λ/n)·KL(q ‖ N(0, σ₀²I)) from untrained nets on, G settings × M members in one pass.

    Settings differ in `tradeoff` alone, and share batches and noise, so each gives what it would give alone, up to rounding.
    """
    config, at, valid = _shared(configs), stack_models(nets), problem.valid
    model = problem.runtime.model(at.module, at.mean | at.fixed, valid.inputs)
    posterior = Posteriors(start(at, len(configs), config), model, problem.likelihood, config, at.members, problem.seed)
    weight = torch.tensor([c.tradeoff / problem.train.rows for c in configs], device=valid.targets.device)
    state = {f"{kind} {n}": w for kind in ("mean", "raw_scale") for n, w in getattr(posterior.q, kind).items()}
    stop_reason = train_stack(
        Stack(model, state, dict(posterior.q.fixed.items()), at.members),
        lambda step, batch: posterior.losses(weight, step, batch),
        problem.train, valid, likelihood=problem.likelihood, config=config, judge=lambda *_: posterior.validation(valid),
        seed=problem.seed, progress=problem.runtime.progress,
    )  # fmt: skip
    risk = posterior.validation(valid)
    return [posterior.setting(g, risk, stop_reason, c) for g, c in enumerate(configs)]


def start(at: StackedModel, settings: int, config: Config) -> WeightDistribution:
    """Every setting from the same nets, with σ = softplus(u₀) around them."""
    mean, fixed = ({n: w.repeat(settings, *[1] * (w.ndim - 1)) for n, w in weights.items()} for weights in (at.mean, at.fixed))
    scale = math.log1p(math.exp(min(config.initial_raw_scale, 30.0)))
    return WeightDistribution(mean, initial_scale=scale, fixed=fixed, noise=Normal(), trainable_mean=True)


def _shared(configs: Sequence[Config]) -> Config:
    """What all settings have in common; impossible ones are refused before any work."""
    if not configs:
        raise ConfigError("Expected at least one setting, but got none.")
    for config in configs:
        check(config)
        if replace(config, tradeoff=1.0) != replace(configs[0], tradeoff=1.0):
            raise ConfigError("Expected settings of one grid to differ in `tradeoff` alone; fit the others apart.")
    return configs[0]


def check(config: Config) -> None:
    """Refuse impossible settings."""
    check_fields(config, tradeoff=POSITIVE)


fit, fit_grid = grid_fitters(Config, _fit_all)
