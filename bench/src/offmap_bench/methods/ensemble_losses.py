"""What ensembles minimise together: closures (step, batch) -> the loss of every setting, (G,), summed over its M members.

Sums over members where the authors' code takes means: the same minimum, and at λ = 0 each member's own gradient to the bit.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from offmap._types import Inputs
from offmap.data import Batch
from offmap.errors import ConfigError
from offmap.integrations.stack_training import Losses, Stack
from offmap.integrations.stack_training import member_risks as risk
from offmap.likelihoods import Likelihood
from offmap.posterior.distribution import sum_per_member
from offmap.random import generator

TINY = torch.finfo(torch.float32).eps
"""Added to squared weights under a logarithm."""


def negative_correlation(stack: Stack, likelihood: Likelihood, tradeoff: Tensor) -> Losses:
    """Σ_i [NLL_i + λ·E_x p_i], p_i = (f_i − f̄)·Σ_{j≠i} (f_j − f̄) with f̄ and the f_j held fixed (Liu and Yao, 1999).

    Deviations from f̄ add up to 0, so that p_i = −(f_i − f̄)·[f_i − f̄], the bracket held fixed. λ is (G,).
    """

    def losses(step: int, batch: Batch) -> Tensor:
        outputs, own = risk(stack, likelihood, batch)
        f = stack.apart(predicted(likelihood, outputs))
        centred = f - f.detach().mean(1, keepdim=True)
        penalty = -(centred * centred.detach()).flatten(2).mean(2)
        return (own + tradeoff[:, None] * penalty).sum(1)

    return losses


def overall_diversity(stack: Stack, likelihood: Likelihood, tradeoff: Tensor, *, seed: int = 0) -> Losses:
    """Σ_i [NLL_i − λ·E_x' var_j f_j(x')] with x' uniform in the box around the batch's inputs (Jain et al., 2020).

    The variance is that of the M members, (1/M) Σ_j (f_j − f̄)². λ is (G,).
    """

    def losses(step: int, batch: Batch) -> Tensor:
        own = risk(stack, likelihood, batch)[1]
        f = stack.apart(predicted(likelihood, stack(in_box(batch[0], seed, step))))
        diversity = f.var(1, correction=0).flatten(1).mean(1)
        return own.sum(1) - tradeoff * stack.members * diversity

    return losses


def anchored(stack: Stack, likelihood: Likelihood, tradeoff: Tensor, anchors: dict[str, Tensor]) -> Losses:
    """Σ_i [NLL_i + λ·(1/d)·‖w_i − a_i‖²] (Pearce et al., 2020). λ is (G,), anchors are {name: (G·M, ...)}."""
    dimension = sum(w[0].numel() for w in stack.weights.values())

    def losses(step: int, batch: Batch) -> Tensor:
        own = risk(stack, likelihood, batch)[1]
        away = sum_per_member({n: (w - anchors[n]).square() for n, w in stack.weights.items()})
        return (own + tradeoff[:, None] / dimension * stack.apart(away)).sum(1)

    return losses


def repulsive(stack: Stack, likelihood: Likelihood, *, bandwidth: float | None = None, fixed_median: bool = False) -> Losses:
    """Σ_i [NLL_i + Σ_j k_ij / stopgrad(Σ_j k_ij)], k_ij = exp(−γ·‖w_i − w_j‖²) (D'Angelo and Fortuin, 2021).

    γ = log M / median of the M² squared distances, through which gradients flow unless `fixed_median`; with a bandwidth h it is
    1/h². Pairs belong to one setting.
    """
    members, device = stack.members, next(iter(stack.weights.values())).device
    first, second = torch.triu_indices(members, members, 1, device=device)
    place = torch.zeros(members, members, dtype=torch.long, device=device)
    place[first, second] = place[second, first] = torch.arange(1, len(first) + 1, device=device)  # 0: a net and itself

    def losses(step: int, batch: Batch) -> Tensor:
        own = risk(stack, likelihood, batch)[1]
        weights = [stack.apart(w).flatten(2) for w in stack.weights.values()]
        pairs = torch.stack([(w[:, first] - w[:, second]).square().sum(2) for w in weights]).sum(0)
        distance = F.pad(pairs, (1, 0))[:, place]  # (G, M, M)
        lr = _median_rate(distance, fixed_median) if bandwidth is None else bandwidth**-2
        kernel = (-lr * distance).exp().sum(2)
        return (own + kernel / kernel.detach()).sum(1)

    return losses


def anti_regularised(stack: Stack, likelihood: Likelihood, tradeoff: Tensor, threshold: Tensor) -> Losses:
    """Σ_i [NLL_i − λ·1[NLL_i ≤ τ_i]·(1/d) Σ_k log(w_ik² + ε)]: DARE (de Mathelin et al., 2023). λ is (G,), τ (G·M,)."""
    dimension = sum(w[0].numel() for w in stack.weights.values())

    def losses(step: int, batch: Batch) -> Tensor:
        own = risk(stack, likelihood, batch)[1]
        size = stack.apart(sum_per_member({n: (w.square() + TINY).log() for n, w in stack.weights.items()}))
        shrink_to_feasible = (own.detach() <= stack.apart(threshold)).to(own)
        return (own - tradeoff[:, None] / dimension * shrink_to_feasible * size).sum(1)

    return losses


def predicted(likelihood: Likelihood, outputs: Tensor) -> Tensor:
    """What members can differ in: the means of a regression, else the outputs themselves, (G·M, B, ...)."""
    return likelihood.point(outputs)


def in_box(x: Inputs, seed: int, step: int) -> Tensor:
    """As many inputs, each number uniform between the least and the largest of its column in the batch."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        raise ConfigError("Expected inputs that are one tensor of floating-point numbers: others cannot be drawn between bounds.")
    low, high = x.amin(0), x.amax(0)
    share = torch.rand(x.shape, generator=generator(seed, "fit", step, "box"), device="cpu")
    return low + (high - low) * share.to(x)


def _median_rate(distance: Tensor, fixed: bool) -> Tensor:
    """γ of every setting, (G, 1, 1), from its squared distances, (G, M, M)."""
    members = distance.shape[1]
    median = distance.flatten(1).sort(1).values[:, members**2 // 2, None, None]
    return math.log(members) / (median.detach() if fixed else median)
