"""A mean-field Bayesian neural net from its own start: the paper's competitor BNN (its tables 1 and 2), λ by validation NLL.

It is the same weight distribution as MaxWEnt's, w = μ + σ ⊙ z with normal z, with a mean that is trained from an untrained net on
and the prior N(0, σ₀²I). `bnn` starts from trained nets instead, for the paper's ablation.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from offmap._types import Weights
from offmap.data import Batch, Batches, Rows
from offmap.data.inputs import take_rows
from offmap.errors import ConfigError
from offmap.likelihoods import Likelihood
from offmap.maxwent.monitors import BestValidation, History
from offmap.maxwent.objective import Objective, kl
from offmap.maxwent.train import adam, minimize
from offmap.model.forward import BatchedModel
from offmap.posterior.construct import StackedModel, centre
from offmap.posterior.distribution import WeightDistribution
from offmap.posterior.noise import Normal, Stream, draw_noise
from offmap.posterior.predictive import Stochastic
from offmap.posterior.protocol import Runtime
from offmap.progress import bar

logger = logging.getLogger("offmap")

GRID = tuple(10.0**k for k in range(-3, 4))
"""The paper's λ."""


@dataclass(frozen=True)
class Config:
    """Every member keeps its state of lowest validation NLL; budget, prior and grid are the paper's, the start the authors'.

    `tradeoff` is λ of E_q[Σ NLL] + λ·KL over the n training rows: 1 is the Bayesian posterior, less a cold one. Per row, as it is
    trained, the KL is weighted by λ/n. (`bnn.Config.tradeoff` is λ·d/n, as MaxWEnt's.)
    """

    tradeoff: float = 1.0
    prior_variance: float = 1.0  # σ₀²
    steps: int = 50_000
    lr: float = 1e-3
    draws_per_step: int = 1
    adam_epsilon: float = 1e-7
    initial_raw_scale: float = -3.0  # softplus⁻¹ of σ at the start
    check_every: int = 100
    risk_draws: int = 50


def fit(
    nets: nn.Module | Sequence[nn.Module],
    train: Batches,
    valid: Rows,
    *,
    likelihood: Likelihood,
    config: Config = Config(),
    seed: int = 0,
    runtime: Runtime = Runtime(),
) -> Stochastic:
    """Minimise E_q[NLL] + (λ/n)·KL(q ‖ N(0, σ₀²I)) from untrained nets on, all on the same batches."""
    return fit_grid(nets, train, valid, likelihood=likelihood, configs=[config], seed=seed, runtime=runtime)[0]


def fit_grid(
    nets: nn.Module | Sequence[nn.Module],
    train: Batches,
    valid: Rows,
    *,
    likelihood: Likelihood,
    configs: Sequence[Config],
    seed: int = 0,
    runtime: Runtime = Runtime(),
) -> list[Stochastic]:
    """One posterior for every setting, G settings × M members in one pass; settings differ in `tradeoff` alone.

    They meet the same batches and the same noise, so that a setting is what it would be alone, up to rounding.
    """
    config = shared(configs)
    at = centre(nets)
    model = runtime.model(at.net, at.mean | at.fixed, valid.inputs)
    posterior = Posteriors(start(at, len(configs), config), model, likelihood, config, at.members, seed)
    weight = torch.tensor([c.tradeoff / train.rows for c in configs for _ in range(at.members)], device=valid.targets.device)
    state = {f"{kind} {n}": w for kind in ("mean", "raw_scale") for n, w in getattr(posterior.q, kind).items()}
    with bar("BNN", config.steps, show=runtime.progress) as advance:
        monitor = BestValidation(
            state, lambda: posterior.validation(valid), every=config.check_every, report=lambda step: advance(step, "")
        )
        optimizer = adam(state.values(), lr=config.lr, epsilon=config.adam_epsilon)
        stop_reason = minimize(posterior.objective(weight), optimizer, train, steps=config.steps, monitors=[monitor], seed=seed)
    monitor.restore()
    if stop_reason == "diverged":
        logger.warning("Training diverged (the loss is not finite); every member keeps its best state so far. Lower `rate`.")
    assert monitor.lowest is not None
    return [posterior.setting(g, monitor.lowest, stop_reason, c) for g, c in enumerate(configs)]


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
        drawn = {name: t.repeat_interleave(len(index), 0) for name, t in self.q.fixed.items()}
        for name, mean in self.q.mean.items():
            z = draw_noise({name: mean[: self.members]}, index, seed=self.seed, stream=stream, noise=Normal())[name]
            middle, spread = (t.unflatten(0, (-1, self.members)).unsqueeze(2) for t in (mean, scale[name]))
            drawn[name] = (middle + spread * z).flatten(0, 2)  # (G, M, 1, ...), (M, P, ...)
        return drawn

    def objective(self, weight: Tensor) -> Objective:
        """Σ over all members of E_q[NLL] + weight·KL, the weight (G·M,); a member that is lost does not stop the others."""
        draws = self.config.draws_per_step

        def objective(step: int, batch: Batch) -> Tensor:
            scale = self.q.scale()
            outputs = self.model(self.draw(range(step * draws, (step + 1) * draws), "fit", scale), batch[0])
            risk = self.likelihood.nll(outputs, batch[1]).mean(1).unflatten(0, (self.q.members, draws)).mean(1)
            each = risk + weight.to(risk) * kl(self.q, self.config.prior_variance, scale=scale)
            finite = each.detach().isfinite()
            return each[finite].sum() if bool(finite.any()) else each.sum()

        return objective

    @torch.no_grad()
    def validation(self, valid: Rows) -> Tensor:
        """NLL of the prediction that every member's draws make together, (G·M,)."""
        draws, members, scale = self.config.risk_draws, self.q.members, self.q.scale()
        total = torch.zeros(members, dtype=torch.float64, device=valid.targets.device)
        for rows in self.model.blocks(valid.inputs, members * draws):
            x, y = take_rows(valid.inputs, rows), valid.targets[rows]
            outputs = self.model.outputs(lambda span: self.draw(span, "valid", scale), draws, x, members=members)
            apart = outputs.unflatten(0, (members, draws))
            total += torch.stack([self.likelihood.predictive_nll(own, y).double().sum() for own in apart])
        return total / valid.rows

    def setting(self, number: int, risk: Tensor, stop_reason: str, config: Config) -> Stochastic:
        """One setting by itself, M members."""
        own = slice(number * self.members, (number + 1) * self.members)
        q = WeightDistribution(
            {n: w.detach()[own].clone() for n, w in self.q.mean.items()},
            initial_scale={n: s.detach()[own] for n, s in self.q.scale().items()},
            fixed={n: t[own] for n, t in self.q.fixed.items()},
            noise=Normal(),
            trainable_mean=True,
        ).requires_grad_(False)
        history = History(stop_reason=stop_reason, chosen={"tradeoff": config.tradeoff})
        history.finish(risk[own], q.mean_log_square())
        return Stochastic(self.model, q, history)


def start(at: StackedModel, settings: int, config: Config) -> WeightDistribution:
    """Every setting from the same nets, with σ = softplus(u₀) around them."""

    def repeated(weights: Weights) -> Weights:
        return {n: w.repeat(settings, *[1] * (w.ndim - 1)) for n, w in weights.items()}

    scale = math.log1p(math.exp(min(config.initial_raw_scale, 30.0)))
    return WeightDistribution(
        repeated(at.mean), initial_scale=scale, fixed=repeated(at.fixed), noise=Normal(), trainable_mean=True
    )


def shared(configs: Sequence[Config]) -> Config:
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
    for name in ("tradeoff", "prior_variance", "lr", "adam_epsilon"):
        value = getattr(config, name)
        if not (isinstance(value, int | float) and 0 < value < math.inf):
            raise ConfigError(f"Expected `{name}` to be a number above 0, but got {value!r}.")
    if not (isinstance(config.initial_raw_scale, int | float) and math.isfinite(config.initial_raw_scale)):
        raise ConfigError(f"Expected `initial_raw_scale` to be a number, but got {config.initial_raw_scale!r}.")
    for name in ("steps", "draws_per_step", "check_every", "risk_draws"):
        value = getattr(config, name)
        if not (isinstance(value, int) and value > 0):
            raise ConfigError(f"Expected `{name}` to be a whole number above 0, but got {value!r}.")
