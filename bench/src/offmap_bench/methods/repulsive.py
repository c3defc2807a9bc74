"""Repulsive deep ensemble (RDE): members push each other apart in weight space, the nearest most.

D'Angelo and Fortuin (2021), which the paper cites, as in the authors' code: Σ_j k / stopgrad(Σ_j k) with the median heuristic.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from offmap.data import Batch
from offmap.errors import ConfigError
from offmap.integrations.nets import Losses, Stack, Training, member_risks
from offmap.likelihoods import Likelihood
from offmap.posterior.predictive import Sampled
from offmap_bench.methods.base import ensemble_fitters, ensemble_nll


@dataclass(frozen=True)
class Config(Training):
    """The state whose ensemble has the lowest validation NLL is kept."""

    bandwidth: float | None = None  # h of exp(−‖w_i − w_j‖²/h²); None: the median heuristic
    fixed_median: bool = False  # True: no gradient through the median, as in D'Angelo and Fortuin's own code


def repulsive(stack: Stack, likelihood: Likelihood, *, bandwidth: float | None = None, fixed_median: bool = False) -> Losses:
    """Σ_i [NLL_i + Σ_j k_ij / stopgrad(Σ_j k_ij)], k_ij = exp(−γ·‖w_i − w_j‖²).

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
        gamma = median_gamma(distance, fixed_median) if bandwidth is None else bandwidth**-2
        kernel = (-gamma * distance).exp().sum(2)
        return (nll + kernel / kernel.detach()).sum(1)

    return losses


def median_gamma(distance: Tensor, fixed: bool) -> Tensor:
    """γ of every setting, (G, 1, 1), from its squared distances, (G, M, M)."""
    members = distance.shape[1]
    median = distance.flatten(1).sort(1).values[:, members**2 // 2, None, None]
    return math.log(members) / (median.detach() if fixed else median)


def _losses(stack: Stack, likelihood: Likelihood, configs: Sequence[Config], seed: int) -> Losses:
    return repulsive(stack, likelihood, bandwidth=configs[0].bandwidth, fixed_median=configs[0].fixed_median)


fit, _ = ensemble_fitters(Config, _losses, judge=ensemble_nll)


def fit_grid(*args: Any, configs: Sequence[Config], **options: Any) -> list[Sampled]:
    """Fit several configs one by one; the paper has no such grid."""
    return [fit(*args, config=config, **options) for config in configs]
