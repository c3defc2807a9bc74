"""Bayesian neural nets by variational inference: the weight distribution of MaxWEnt, found by the ELBO instead of its entropy.

`bnn` starts from trained nets: the paper's appendix C asks what turns such a net into MaxWEnt, a mean frozen at the trained
weights w̄ with the prior N(w̄, σ²I) around it, a wide prior, and the SVD basis. (Its definitions swap the words "frozen" and
"unfrozen"; its tables, and these names, mean what they say.) `mean_field` is the paper's competitor BNN (tables 1 and 2):
w = μ + σ ⊙ z with normal z, a mean that is trained from an untrained net on, and the prior N(0, σ₀²I).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from offmap._types import Weights
from offmap.data import Batch, Rows
from offmap.data.batch import take_rows
from offmap.errors import ConfigError
from offmap.likelihoods import Likelihood
from offmap.maxwent import search
from offmap.maxwent.risk import RiskFn, Validation, as_risk
from offmap.maxwent.train import Objective, RiskMonitor, adam, expected_nll, minimize
from offmap.model.forward import BatchedModel
from offmap.model.params import ParamSelection, StackedModel, choose, stack_models
from offmap.posterior.basis import Observed, observe
from offmap.posterior.distribution import WeightDistribution, sum_per_member
from offmap.posterior.noise import Noise, Normal, Stream, as_noise, draw_noise
from offmap.posterior.predictive import History, Stochastic
from offmap.progress import bar
from offmap_bench.methods.competitor import POSITIVE, Competitor, Nets, check_fields, one_by_one
from offmap_bench.methods.stack import Problem, Stack, Training, run_columns, train_stack

logger = logging.getLogger("offmap")


def kl(
    q: WeightDistribution, variance: float, mean: Mapping[str, Tensor] | None = None, *, scale: Mapping[str, Tensor] | None = None
) -> Tensor:
    """KL(q ‖ N(m, σ²I)) per member in nats, (M,), in closed form for noise of entropy h and variance v per component:

        Σ_k [(v·φ_k² + (w̄_k − m_k)²) / 2σ² − log φ_k] + d·(½ log 2πσ² − h)

    V drops out: it turns neither the determinant nor the trace. For normal noise this is the KL of two Gaussians.

    >>> kl(WeightDistribution({"w": torch.ones(1, 2)}, initial_scale=1.0, noise=Normal()), 1.0)
    tensor([1.0000], grad_fn=<AddBackward0>)
    """
    entropy = q.noise.entropy()
    if entropy is None or q.parameterization is not None:
        raise ConfigError(
            "Expected noise with a density, such as uniform or normal, for a KL divergence in closed form, and w = w̄ + Vφz."
        )
    scale = q.scale() if scale is None else scale
    squares = {
        n: q.noise.variance() * s.square() + (q.mean[n] - (0.0 if mean is None else mean[n])).square() for n, s in scale.items()
    }
    logs = sum_per_member({n: s.log() for n, s in scale.items()})
    constant = q.dimension * (0.5 * math.log(2 * math.pi * variance) - entropy)
    return sum_per_member(squares) / (2 * variance) - logs + constant


def elbo(
    q: WeightDistribution, model: BatchedModel, likelihood: Likelihood, *, entropy_weight: float, prior_variance: float,
    prior_mean: Mapping[str, Tensor] | None = None, draws: int = 1, seed: int = 0,
) -> Objective:  # fmt: skip
    """The negative ELBO of variational Bayes, KL-weighted, per training row: E_q[NLL] + λ·(1/d)·KL(q ‖ N(m, σ²I)).

    The paper's appendix C maximises E_q[Σ log p] − 10·(n/d)·KL over the n training rows. Divided by n that is this with λ = 10,
    whatever n is; the Bayesian posterior itself is λ = d/n. `prior_mean` is m by name, (M, ...); None is 0.
    """

    def objective(step: int, batch: Batch) -> Tensor:
        scale = q.scale()
        risk = expected_nll(q, model, likelihood, batch, range(step * draws, (step + 1) * draws), scale, seed)
        return (risk + entropy_weight / q.dimension * kl(q, prior_variance, prior_mean, scale=scale)).sum()

    return objective


def softplus(raw: float) -> float:
    """log(1 + eˣ), without overflow."""
    return raw if raw > 30 else math.log1p(math.exp(raw))


# ------------------------------------------------------------------------------------------------ around trained nets


@dataclass(frozen=True)
class BNNConfig:
    """A mean-field (or, in the SVD basis, matrix-wise) posterior around the given nets; the defaults are the paper's.

    `tradeoff` multiplies KL/d beside the *mean* NLL of the training rows. The paper's weight 10·n/d on the KL, beside the *sum*
    over n rows, is `tradeoff=10` for any n; the untempered posterior is `tradeoff=d/n`.
    """

    mean: Literal["frozen", "trained"] = "frozen"  # frozen: prior N(w̄, σ²I); trained from w̄ on: prior N(0, σ²I)
    prior_variance: float = 1e10  # σ²
    basis: Literal["svd", "identity"] = "svd"  # svd: the mean must be frozen, V belongs to its activations
    params: ParamSelection = None
    noise: str | Noise = "normal"
    tradeoff: float = 10.0
    steps: int = 50_000
    lr: float = 1e-3
    draws_per_step: int = 1
    adam_epsilon: float = 1e-8
    initial_raw_scale: float | None = None  # u at the start; None: −5 for identity, −10 for svd, as for MaxWEnt
    fan_in_limit: int = 4096
    risk: str | RiskFn = "nll"
    max_risk: float | None = None  # τ; None: the base model's risk plus twice its standard error
    tolerance: Literal["paper", "reference", "smoothed"] = "paper"
    check_every: int = 100
    patience: int | None = None
    risk_draws: int = 50


LARGE = BNNConfig(basis="identity")
SMALL = replace(LARGE, prior_variance=0.1)
ABLATION: dict[str, BNNConfig] = {
    "svd_frozen_large": replace(LARGE, basis="svd"),
    "svd_frozen_small": replace(SMALL, basis="svd"),
    "nosvd_unfrozen_small": replace(SMALL, mean="trained"),
    "nosvd_unfrozen_large": replace(LARGE, mean="trained"),
    "nosvd_frozen_small": SMALL,
    "nosvd_frozen_large": LARGE,
}
"""The paper's tables 8 and 9, the default first. Up to a constant, the two large priors around a frozen mean are MaxWEnt with
g = log."""


def _fit_bnn(nets: Nets, problem: Problem, config: BNNConfig) -> Stochastic:
    train, valid, likelihood, seed, runtime = problem.train, problem.valid, problem.likelihood, problem.seed, problem.runtime
    stacked = choose(stack_models(nets), valid.inputs, config.params, runtime.output_fn)
    model = runtime.model(stacked.module, stacked.mean | stacked.fixed, valid.inputs)
    observed, raw = Observed(), -5.0
    if config.basis == "svd":
        batches, limit = (lambda rows: (x for x, _ in train)), config.fan_in_limit
        observed, raw = observe(stacked, batches, rotated=True, output_fn=runtime.output_fn, limit=limit), -10.0
    q = WeightDistribution(
        stacked.mean, initial_scale=softplus(raw if config.initial_raw_scale is None else config.initial_raw_scale),
        rotation=observed.rotation(), fixed=stacked.fixed, noise=as_noise(config.noise), trainable_mean=config.mean == "trained",
    )  # fmt: skip
    validation = Validation(model, likelihood, valid, as_risk(config.risk), config.risk_draws, seed)
    max_risk = validation.max_risk(q, tolerance=config.tolerance).detach()
    max_risk = max_risk if config.max_risk is None else torch.full_like(max_risk, float(config.max_risk))
    start = search.shrink_to_feasible(q, validation, max_risk)
    history = History()
    with bar("BNN", config.steps, show=runtime.progress) as advance:
        monitor = RiskMonitor(
            q, validation.evaluate, max_risk, every=config.check_every, history=history, patience=config.patience,
            report=advance,
        )  # fmt: skip
        monitor.check(0, float("nan"), start)
        objective = elbo(
            q, model, likelihood, entropy_weight=config.tradeoff, prior_variance=config.prior_variance,
            prior_mean=stacked.mean if config.mean == "frozen" else None, draws=config.draws_per_step, seed=seed,
        )  # fmt: skip
        optimizer = adam((p for p in q.parameters() if p.requires_grad), lr=config.lr, epsilon=config.adam_epsilon)
        history.stop_reason = minimize(objective, optimizer, train, steps=config.steps, monitors=[monitor], seed=seed)
        if history.stop_reason == "finished" and config.steps % config.check_every:
            monitor.check(config.steps, float("nan"))
    monitor.restore()
    history.finish(max_risk.new_tensor(history.of_kept()[0]), q.mean_log_square().detach())
    history.chosen["tradeoff"] = config.tradeoff
    if history.stop_reason == "diverged":
        logger.warning("Training diverged (the loss is not finite); every member keeps its last state below τ. Lower `lr`.")
    return Stochastic(model, q.requires_grad_(False), history)


def _check_bnn(config: BNNConfig) -> None:
    check_fields(config, tradeoff=POSITIVE)
    if config.basis == "svd" and config.mean == "trained":
        raise ConfigError("Expected `mean='frozen'` with `basis='svd'`: the basis belongs to the activations of that mean.")
    as_noise(config.noise)
    as_risk(config.risk)


bnn = Competitor(BNNConfig, one_by_one(_fit_bnn), _check_bnn)
"""Minimise E_q[NLL] + λ·KL/d around trained nets; every member ends with its last state (φ, and a trained mean) at or below τ."""

# ------------------------------------------------------------------------------------------------ from untrained nets

GRID = tuple(10.0**k for k in range(-3, 4))
"""The paper's λ of `mean_field`, chosen by validation NLL."""


@dataclass(frozen=True)
class MeanFieldConfig(Training):
    """Every member keeps its state of lowest validation NLL; budget, prior and grid are the paper's, σ's start their code's.

    `tradeoff` is λ of E_q[Σ NLL] + λ·KL over the n training rows: 1 is the Bayesian posterior, less a cold one. Per row, as it is
    trained, the KL is weighted by λ/n. (`BNNConfig.tradeoff` is λ·d/n, as MaxWEnt's.)
    """

    steps: int = 50_000
    tradeoff: float = 1.0
    prior_variance: float = 1.0  # σ₀²
    draws_per_step: int = 1
    initial_raw_scale: float = -3.0  # softplus⁻¹ of σ at the start
    risk_draws: int = 50
    random: Literal["all", "matrices"] = "all"  # matrices: biases are trained without noise or prior, as there
    risk: Literal["nll", "averaged-nll"] = "nll"  # of the draws' mixture; or of their averaged outputs, as there


@dataclass(frozen=True)
class Posteriors:
    """Q over G settings × M members, setting-major, and how it is trained."""

    q: WeightDistribution
    model: BatchedModel
    likelihood: Likelihood
    config: MeanFieldConfig
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
        outputs = run_columns(self.model, self.draw(range(step * draws, (step + 1) * draws), "fit", scale), batch[0])
        risk = self.likelihood.nll(outputs, batch[1]).mean(1).unflatten(0, (-1, self.members, draws)).mean(2)
        divergence = kl(self.q, self.config.prior_variance, scale=scale).unflatten(0, (-1, self.members))
        return (risk + weight.to(risk)[:, None] * divergence).sum(1)

    @torch.no_grad()
    def validation(self, valid: Rows) -> Tensor:
        """NLL of the prediction that every member's draws make together, (G·M,)."""
        draws, members, scale = self.config.risk_draws, self.q.members, self.q.scale()
        risk = as_risk(self.config.risk)
        total = torch.zeros(members, dtype=torch.float64, device=valid.targets.device)
        for rows in self.model.blocks(valid.inputs, members * draws):
            x, y = take_rows(valid.inputs, rows), valid.targets[rows]
            outputs = self.model.outputs(lambda span: self.draw(span, "valid", scale), draws, x, members=members)
            by_member = outputs.unflatten(0, (members, draws))
            total += torch.stack([risk(self.likelihood, drawn, y).double().sum() for drawn in by_member])
        return total / valid.rows

    def take_setting(self, number: int, risk: Tensor, stop_reason: str, config: MeanFieldConfig) -> Stochastic:
        """One setting by itself, M members."""
        part = slice(number * self.members, (number + 1) * self.members)
        q = distribution(
            {n: w.detach()[part].clone() for n, w in self.q.mean.items()}, {n: t.detach()[part] for n, t in self.q.fixed.items()},
            {n: s.detach()[part] for n, s in self.q.scale().items()},
        ).requires_grad_(False)  # fmt: skip
        history = History(stop_reason=stop_reason, chosen={"tradeoff": config.tradeoff})
        history.finish(risk[part], q.mean_log_square())
        return Stochastic(self.model, q, history)


def distribution(mean: Weights, fixed: Weights, scale: float | Mapping[str, Tensor]) -> WeightDistribution:
    """Normal noise of this scale around a trained mean."""
    return WeightDistribution(mean, initial_scale=scale, fixed=fixed, noise=Normal(), trainable_mean=True)


def start(stacked: StackedModel, settings: int, config: MeanFieldConfig) -> WeightDistribution:
    """Every setting from the same nets, with σ = softplus(u₀) around them."""
    mean, fixed = (
        {n: w.repeat(settings, *[1] * (w.ndim - 1)) for n, w in weights.items()} for weights in (stacked.mean, stacked.fixed)
    )
    biases = {n: w.requires_grad_() for n, w in mean.items() if config.random == "matrices" and w.ndim < 3}
    mean = {n: w for n, w in mean.items() if n not in biases}
    return distribution(mean, fixed | biases, softplus(config.initial_raw_scale))


def _fit_mean_field(nets: Nets, problem: Problem, configs: Sequence[MeanFieldConfig]) -> list[Stochastic]:
    config, stacked, valid = configs[0], stack_models(nets), problem.valid
    if any(replace(other, tradeoff=1.0) != replace(config, tradeoff=1.0) for other in configs):
        raise ConfigError("Expected settings of one grid to differ in `tradeoff` alone; fit the others apart.")
    model = problem.runtime.model(stacked.module, stacked.mean | stacked.fixed, valid.inputs)
    posterior = Posteriors(start(stacked, len(configs), config), model, problem.likelihood, config, stacked.members, problem.seed)
    weight = torch.tensor([c.tradeoff * problem.repeats / problem.train.rows for c in configs], device=valid.targets.device)
    state = {f"{kind} {n}": w for kind in ("mean", "raw_scale") for n, w in getattr(posterior.q, kind).items()}
    state |= {n: w for n, w in posterior.q.fixed.items() if w.requires_grad}
    stack = Stack(model, state, {n: w for n, w in posterior.q.fixed.items() if not w.requires_grad}, stacked.members)
    losses = partial(posterior.losses, weight)
    stop_reason = train_stack(stack, losses, problem, config, judge=lambda *_: posterior.validation(valid))
    risk = posterior.validation(valid)
    return [posterior.take_setting(g, risk, stop_reason, c) for g, c in enumerate(configs)]


mean_field = Competitor(MeanFieldConfig, _fit_mean_field, partial(check_fields, tradeoff=POSITIVE))
"""Minimise E_q[NLL] + (λ/n)·KL(q ‖ N(0, σ₀²I)) from untrained nets on, G settings × M members in one pass.

Settings differ in `tradeoff` alone, and share batches and noise, so each gives what it would give alone, up to rounding.
"""
