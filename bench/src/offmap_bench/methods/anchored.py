"""Anchored networks: every member is pulled towards random weights of its own, as if drawn from a prior.

Pearce et al. (2020), which the paper cites, as in the authors' code: anchors a ~ N(0, Σ²) and λ times the mean of (w − a)².
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from offmap._types import Weights
from offmap.data import Batch
from offmap.integrations.nets import Losses, Stack, Training, member_risks
from offmap.likelihoods import Likelihood
from offmap.posterior.distribution import sum_per_member
from offmap.posterior.noise import NOISES, draw_noise
from offmap_bench.methods.base import ensemble_fitters, per_setting


@dataclass(frozen=True)
class Config(Training):
    """Every member keeps its state of lowest validation NLL."""

    tradeoff: float = 1.0  # λ; the paper's grid: 0.1, 1, 10
    anchor_scale: float = 1.0  # Σ, the standard deviation of the anchors; the same grid


def anchored(stack: Stack, likelihood: Likelihood, tradeoff: Tensor, anchors: Weights) -> Losses:
    """Σ_i [NLL_i + λ·(1/d)·‖w_i − a_i‖²]. λ is (G,), anchors are {name: (G·M, ...)}."""
    dimension = sum(w[0].numel() for w in stack.weights.values())

    def losses(step: int, batch: Batch) -> Tensor:
        nll = member_risks(stack, likelihood, batch)[1]
        distance = sum_per_member({n: (w - anchors[n]).square() for n, w in stack.weights.items()})
        return (nll + tradeoff[:, None] / dimension * stack.by_setting(distance)).sum(1)

    return losses


def draw_anchors(stack: Stack, configs: Sequence[Config], seed: int) -> Weights:
    """Σ·z for every setting, {name: (G·M, ...)}, the same normal z in all of them."""
    scale = per_setting(configs, "anchor_scale", stack).repeat_interleave(stack.members)
    first = {n: w.detach()[: stack.members] for n, w in stack.weights.items()}
    z = draw_noise(first, [0], seed=seed, stream="init", noise=NOISES["normal"])
    return {n: scale.view(-1, *[1] * (w.ndim - 2)) * w[:, 0].repeat(stack.settings, *[1] * (w.ndim - 2)) for n, w in z.items()}


fit, fit_grid = ensemble_fitters(
    Config,
    lambda stack, likelihood, configs, seed: anchored(
        stack, likelihood, per_setting(configs, "tradeoff", stack), draw_anchors(stack, configs, seed)
    ),
)
