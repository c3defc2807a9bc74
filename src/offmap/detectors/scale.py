"""SCALE (Xu et al., 2024): features whose strength lies in few units are made longer, then the energy."""

import math

import torch
from torch import Tensor

from offmap.detectors.base import register
from offmap.detectors.classifier import Head
from offmap.detectors.energy import energy


@register("scale", percent=(0, 100))
def scale(features: Tensor, head: Head, percent: float = 85.0) -> Tensor:
    r"""Energy of h·exp(r) Wᵀ + b with r = Σ_d h_d / Σ h_d over the units above the `percent`-th percentile of h: (B, D) -> (B,).

    Features should be outputs of a ReLU; of others, the positive ones are summed.

    >>> scale(torch.tensor([[0.0, 2.0]]), Head(torch.tensor([[0.0, 1.0]]), torch.zeros(1)), 50)  # −2e
    tensor([-5.4366])
    """
    total, top = strengths(features, percent)
    return energy(head(features * (total / top).exp().unsqueeze(1)))


def strengths(features: Tensor, percent: float) -> tuple[Tensor, Tensor]:
    """Sum all positive features, and the largest 100 − `percent` per cent of them, at least one: (B, D) -> (B,), (B,).

    >>> strengths(torch.tensor([[1.0, 2.0, 3.0, 4.0]]), 75)
    (tensor([10.]), tensor([4.]))
    """
    positive = features.clamp_min(0)
    top = positive.topk(count_top(features.shape[1], percent), 1).values.sum(1)
    return positive.sum(1), top.clamp_min(torch.finfo(features.dtype).tiny)


def count_top(width: int, percent: float) -> int:
    """Count the units above the percentile, at least one."""
    return max(1, width - math.floor(width * percent / 100 + 0.5))
