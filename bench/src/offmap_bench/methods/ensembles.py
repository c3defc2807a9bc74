"""Ensembles that the paper compares with: nets trained in one stack, each kind by its own loss, as in the authors' code."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from offmap._types import Inputs, Weights
from offmap.data import Batch
from offmap.errors import ConfigError
from offmap.likelihoods import Likelihood
from offmap.posterior.distribution import sum_per_member
from offmap.posterior.noise import NOISES, draw_noise
from offmap.posterior.predictive import Sampled
from offmap.random import generator
from offmap_bench.methods.competitor import Competitor, Nets, build_ensemble, one_by_one, per_setting
from offmap_bench.methods.stack import (
    Losses,
    Problem,
    Stack,
    Training,
    ensemble_nll,
    maximum_likelihood,
    member_risks,
    train_stack,
)

deep_ensemble = build_ensemble(Training, lambda stack, problem, _: maximum_likelihood(stack, problem.likelihood))
"""Plain nets trained from different starts by maximum likelihood. One net is the plain baseline."""


@dataclass(frozen=True)
class DiversityConfig(Training):
    """The state whose ensemble has the lowest validation NLL is kept."""

    tradeoff: float = 0.1  # λ; the paper's grid: 1, 0.1, …, 1e-5


def correlation_losses(stack: Stack, likelihood: Likelihood, tradeoff: Tensor) -> Losses:
    """Σ_i [NLL_i + λ·E_x p_i], p_i = (f_i − f̄)·Σ_{j≠i} (f_j − f̄) with f̄ and the f_j held fixed.

    Deviations from f̄ add up to 0, so that p_i = −(f_i − f̄)·[f_i − f̄], the bracket held fixed. λ is (G,). The penalty is that of
    Liu and Yao (1999) on the means. The authors' code lets it act on the log-variances as well, where it has no meaning.
    """

    def losses(step: int, batch: Batch) -> Tensor:
        outputs, nll = member_risks(stack, likelihood, batch)
        f = stack.by_setting(likelihood.point(outputs))
        centred = f - f.detach().mean(1, keepdim=True)
        penalty = -(centred * centred.detach()).flatten(2).mean(2)
        return (nll + tradeoff[:, None] * penalty).sum(1)

    return losses


negative_correlation = build_ensemble(
    DiversityConfig, lambda s, problem, c: correlation_losses(s, problem.likelihood, per_setting(c, "tradeoff", s)), ensemble_nll
)
"""Members are pushed away from what the ensemble predicts, on the training data themselves."""


def diversity_losses(stack: Stack, likelihood: Likelihood, tradeoff: Tensor, *, seed: int = 0) -> Losses:
    """Σ_i [NLL_i − λ·E_x' var_j f_j(x')] with x' uniform in the box around the batch's inputs, new at every step.

    The variance is that of the M members, (1/M) Σ_j (f_j − f̄)², after Jain et al. (2020). λ is (G,).
    """

    def losses(step: int, batch: Batch) -> Tensor:
        nll = member_risks(stack, likelihood, batch)[1]
        f = stack.by_setting(likelihood.point(stack(draw_in_box(batch[0], seed, step))))
        return nll.sum(1) - tradeoff * stack.members * f.var(1, correction=0).flatten(1).mean(1)

    return losses


def draw_in_box(x: Inputs, seed: int, step: int) -> Tensor:
    """Draw as many inputs, each number uniform between the least and the largest of its column in the batch."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        raise ConfigError("Expected inputs that are one tensor of floating-point numbers: others cannot be drawn between bounds.")
    low, high = x.amin(0), x.amax(0)
    share = torch.rand(x.shape, generator=generator(seed, "fit", step, "box"), device="cpu")
    return low + (high - low) * share.to(x)


overall_diversity = build_ensemble(
    DiversityConfig,
    lambda s, problem, c: diversity_losses(s, problem.likelihood, per_setting(c, "tradeoff", s), seed=problem.seed),
    ensemble_nll,
)
"""MOD: members are rewarded for disagreeing on inputs drawn around the training data."""


@dataclass(frozen=True)
class AnchoredConfig(Training):
    """Every member keeps its state of lowest validation NLL."""

    tradeoff: float = 1.0  # λ; the paper's grid: 0.1, 1, 10
    anchor_scale: float = 1.0  # Σ, the standard deviation of the anchors; the same grid


def anchor_losses(stack: Stack, likelihood: Likelihood, tradeoff: Tensor, anchors: Weights) -> Losses:
    """Σ_i [NLL_i + λ·(1/d)·‖w_i − a_i‖²], after Pearce et al. (2020). λ is (G,), anchors are {name: (G·M, ...)}."""
    dimension = sum(w[0].numel() for w in stack.weights.values())

    def losses(step: int, batch: Batch) -> Tensor:
        nll = member_risks(stack, likelihood, batch)[1]
        distance = sum_per_member({n: (w - anchors[n]).square() for n, w in stack.weights.items()})
        return (nll + tradeoff[:, None] / dimension * stack.by_setting(distance)).sum(1)

    return losses


def draw_anchors(stack: Stack, configs: Sequence[AnchoredConfig], seed: int) -> Weights:
    """Σ·z for every setting, {name: (G·M, ...)}, the same normal z in all of them."""
    scale = per_setting(configs, "anchor_scale", stack).repeat_interleave(stack.members)
    first = {n: w.detach()[: stack.members] for n, w in stack.weights.items()}
    z = draw_noise(first, [0], seed=seed, stream="init", noise=NOISES["normal"])
    return {n: scale.view(-1, *[1] * (w.ndim - 2)) * w[:, 0].repeat(stack.settings, *[1] * (w.ndim - 2)) for n, w in z.items()}


anchored = build_ensemble(
    AnchoredConfig,
    lambda s, problem, c: anchor_losses(s, problem.likelihood, per_setting(c, "tradeoff", s), draw_anchors(s, c, problem.seed)),
)
"""Every member is pulled towards random weights of its own, as if drawn from a prior."""


@dataclass(frozen=True)
class RepulsiveConfig(Training):
    """The state whose ensemble has the lowest validation NLL is kept."""

    bandwidth: float | None = None  # h of exp(−‖w_i − w_j‖²/h²); None: the median heuristic
    fixed_median: bool = False  # True: no gradient through the median, as in D'Angelo and Fortuin's own code


def repulsion_losses(stack: Stack, likelihood: Likelihood, configs: Sequence[RepulsiveConfig]) -> Losses:
    """Σ_i [NLL_i + Σ_j k_ij / stopgrad(Σ_j k_ij)], k_ij = exp(−γ·‖w_i − w_j‖²), after D'Angelo and Fortuin (2021).

    γ = log M / median of the M² squared distances, through which gradients flow unless `fixed_median`; with a bandwidth h it is
    1/h². Pairs belong to one setting.
    """
    members, device = stack.members, next(iter(stack.weights.values())).device
    if members < 2:
        raise ConfigError("Expected at least two nets, which can repel each other, but got one.")
    first, second = torch.triu_indices(members, members, 1, device=device)
    index = torch.zeros(members, members, dtype=torch.long, device=device)
    index[first, second] = index[second, first] = torch.arange(1, len(first) + 1, device=device)  # 0: a net and itself

    def losses(step: int, batch: Batch) -> Tensor:
        nll = member_risks(stack, likelihood, batch)[1]
        weights = [stack.by_setting(w).flatten(2) for w in stack.weights.values()]
        pairs = torch.stack([(w[:, first] - w[:, second]).square().sum(2) for w in weights]).sum(0)
        distance = F.pad(pairs, (1, 0))[:, index]  # (G, M, M)
        medians = distance.flatten(1).sort(1).values[:, members**2 // 2, None, None]
        gamma = torch.stack([
            torch.full_like(m, c.bandwidth**-2) if c.bandwidth else math.log(members) / (m.detach() if c.fixed_median else m)
            for c, m in zip(configs, medians, strict=True)
        ])  # fmt: skip
        kernel = (-gamma * distance).exp().sum(2)
        return (nll + kernel / kernel.detach()).sum(1)

    return losses


repulsive = build_ensemble(RepulsiveConfig, lambda s, problem, c: repulsion_losses(s, problem.likelihood, c), ensemble_nll)
"""RDE: members push each other apart in weight space, the nearest most."""


@dataclass(frozen=True)
class DareConfig(Training):
    """Every member keeps its last state at or below τ."""

    tradeoff: float = 1.0  # λ on the mean of log w²
    max_risk: float | None = None  # τ; None: from the nets as they are given


def growth_losses(stack: Stack, likelihood: Likelihood, tradeoff: Tensor, max_risk: Tensor) -> Losses:
    """Σ_i [NLL_i − λ·1[NLL_i ≤ τ_i]·(1/d) Σ_k log(w_ik² + ε)], after de Mathelin et al. (2023). λ is (G,), τ (G·M,)."""
    dimension, tiny = sum(w[0].numel() for w in stack.weights.values()), torch.finfo(torch.float32).eps

    def losses(step: int, batch: Batch) -> Tensor:
        nll = member_risks(stack, likelihood, batch)[1]
        size = stack.by_setting(sum_per_member({n: (w.square() + tiny).log() for n, w in stack.weights.items()}))
        growing = (nll.detach() <= stack.by_setting(max_risk)).to(nll)
        return (nll - tradeoff[:, None] / dimension * growing * size).sum(1)

    return losses


def member_max_risks(stack: Stack, problem: Problem, max_risk: float | None = None) -> Tensor:
    """τ of every member, (M,): the mean of its validation losses plus 2·std/√n, or the same number for all."""
    losses = stack.on_rows(problem.valid, problem.likelihood.nll)
    risk = losses.mean(1) + 2 * losses.std(1, correction=0) / math.sqrt(losses.shape[1])
    return risk if max_risk is None else torch.full_like(risk, max_risk)


def _fit_dare(nets: Nets, problem: Problem, config: DareConfig) -> Sampled:
    stack = Stack.build(nets, problem.valid.inputs, problem.runtime)
    max_risk = member_max_risks(stack, problem, config.max_risk)
    losses = growth_losses(stack, problem.likelihood, per_setting([config], "tradeoff", stack), max_risk)
    train_stack(stack, losses, problem, config, ceiling=max_risk)
    return stack.predictives()[0]


dare = Competitor(DareConfig, one_by_one(_fit_dare))
"""Deep anti-regularized ensembles: weights grow as long as the training loss is at most τ.

Here it goes on from trained nets, and τ is what MaxWEnt allows (their validation NLL plus twice its standard error). Nets that
are not trained yet need a `max_risk`.
"""
