"""Bayesian neural nets by variational inference: the same weight distribution, found by the ELBO instead of its entropy.

The paper's appendix C asks what turns such a net into MaxWEnt: a mean frozen at the trained weights w̄ with the prior N(w̄, σ²I)
around it, a wide prior, and the SVD basis. ABLATION holds its six settings. (Its definitions swap the words "frozen" and
"unfrozen"; its tables, and these names, mean what they say.)
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, replace
from typing import Literal

import torch

from offmap.errors import ConfigError
from offmap.maxwent import search
from offmap.maxwent.risk import RiskFn, Validation, as_risk
from offmap.maxwent.train import RiskMonitor, adam, minimize
from offmap.model.params import ParamSelection, StackedModel, choose, stack_models
from offmap.posterior.basis import Observed, observe
from offmap.posterior.distribution import WeightDistribution
from offmap.posterior.noise import Noise, as_noise
from offmap.posterior.predictive import History, Stochastic
from offmap.progress import bar
from offmap_bench.methods.base import POSITIVE, Nets, Problem, as_settings, check_fields, check_words, fitter
from offmap_bench.methods.elbo import elbo

logger = logging.getLogger("offmap")


@dataclass(frozen=True)
class Config:
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


LARGE = Config(basis="identity")
SMALL = replace(LARGE, prior_variance=0.1)
ABLATION: dict[str, Config] = {
    "svd_frozen_large": replace(LARGE, basis="svd"),
    "svd_frozen_small": replace(SMALL, basis="svd"),
    "nosvd_unfrozen_small": replace(SMALL, mean="trained"),
    "nosvd_unfrozen_large": replace(LARGE, mean="trained"),
    "nosvd_frozen_small": SMALL,
    "nosvd_frozen_large": LARGE,
}
"""The paper's tables 8 and 9, the default first. Up to a constant, the two large priors around a frozen mean are MaxWEnt with
g = log."""


@fitter(Config)
def fit(nets: Nets | StackedModel, problem: Problem, config: Config) -> Stochastic:
    """Minimise E_q[NLL] + λ·KL/d around the trained nets; every member ends with its last state at or below τ.

    The state is φ, and the mean where it is trained; τ belongs to the nets as they are given.
    """
    check(config)
    train, valid, likelihood, seed, runtime = as_settings(problem).values()
    at = nets if isinstance(nets, StackedModel) else choose(stack_models(nets), valid.inputs, config.params, runtime.output_fn)
    model = runtime.model(at.module, at.mean | at.fixed, valid.inputs)
    observed = Observed()
    if config.basis == "svd":
        observed = observe(
            at, lambda rows: (x for x, _ in train), rotated=True, output_fn=runtime.output_fn, limit=config.fan_in_limit
        )
    q = distribution(at, observed, config)
    validation = Validation(model, likelihood, valid, as_risk(config.risk), config.risk_draws, seed)
    max_risk = validation.max_risk(q, tolerance=config.tolerance).detach()
    max_risk = max_risk if config.max_risk is None else torch.full_like(max_risk, float(config.max_risk))
    start = search.shrink_to_feasible(q, validation, max_risk)
    history = History()
    with bar("BNN", config.steps, show=runtime.progress) as advance:
        monitor = RiskMonitor(
            q, validation.evaluate, max_risk, every=config.check_every, history=history, patience=config.patience,
            report=lambda step, h: advance(step, h.describe()),
        )  # fmt: skip
        monitor.check(0, float("nan"), start)
        objective = elbo(
            q, model, likelihood, entropy_weight=config.tradeoff, prior_variance=config.prior_variance,
            prior_mean=at.mean if config.mean == "frozen" else None, draws=config.draws_per_step, seed=seed,
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
    q.requires_grad_(False)
    return Stochastic(model, q, history)


def distribution(at: StackedModel, observed: Observed, config: Config) -> WeightDistribution:
    """Q at the start: peaked around the nets."""
    raw = config.initial_raw_scale
    raw = raw if raw is not None else (-10.0 if config.basis == "svd" else -5.0)
    return WeightDistribution(
        at.mean,
        initial_scale=raw if raw > 30 else math.log1p(math.exp(raw)),  # softplus
        rotation=observed.rotation(),
        fixed=at.fixed,
        noise=as_noise(config.noise),
        trainable_mean=config.mean == "trained",
    )


def check(config: Config) -> None:
    """Refuse impossible settings before any work."""
    check_words(config, mean=("frozen", "trained"), basis=("svd", "identity"), tolerance=("paper", "reference", "smoothed"))
    if config.basis == "svd" and config.mean == "trained":
        raise ConfigError("Expected `mean='frozen'` with `basis='svd'`: the basis belongs to the activations of that mean.")
    as_noise(config.noise)
    as_risk(config.risk)
    check_fields(config, tradeoff=POSITIVE)
