"""Maximise overall diversity (MOD): members are rewarded for disagreeing on inputs drawn around the training data.

The reward is the variance of the members' means, after Jain et al. (2020), which the paper cites. As in the authors' code the
inputs are uniform in the box that the batch spans, one for every row of the batch, new at every step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from offmap._types import Inputs
from offmap.data import Batch
from offmap.errors import ConfigError
from offmap.integrations.nets import Losses, Stack, Training, member_risks
from offmap.likelihoods import Likelihood
from offmap.random import generator
from offmap_bench.methods.base import ensemble_fitters, ensemble_nll, per_setting


@dataclass(frozen=True)
class Config(Training):
    """The state whose ensemble has the lowest validation NLL is kept."""

    tradeoff: float = 0.1  # λ; the paper's grid: 1, 0.1, …, 1e-5


def overall_diversity(stack: Stack, likelihood: Likelihood, tradeoff: Tensor, *, seed: int = 0) -> Losses:
    """Σ_i [NLL_i − λ·E_x' var_j f_j(x')] with x' uniform in the box around the batch's inputs.

    The variance is that of the M members, (1/M) Σ_j (f_j − f̄)². λ is (G,).
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


fit, fit_grid = ensemble_fitters(
    Config,
    lambda stack, likelihood, configs, seed: overall_diversity(
        stack, likelihood, per_setting(configs, "tradeoff", stack), seed=seed
    ),
    judge=ensemble_nll,
)
