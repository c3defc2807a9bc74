"""SCALE (Xu et al., 2024): features whose strength lies in few units are made longer, then the energy."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from offmap.detectors.energy import energy
from offmap.detectors.known import FitData, number
from offmap.detectors.penultimate import Head, Seen


def scale(features: Tensor, head: Head, percent: float = 85.0) -> Tensor:
    r"""Energy of h·exp(r) Wᵀ + b with r = Σ_d h_d / Σ h_d over the units above the `percent`-th percentile of h: (B, D) -> (B,).

    Features are meant to be what a ReLU gives; of others, the positive ones are summed.

    >>> scale(torch.tensor([[0.0, 2.0]]), Head(torch.tensor([[0.0, 1.0]]), torch.zeros(1)), 50)  # −2e
    tensor([-5.4366])
    """
    whole, top = strengths(features, percent)
    return energy(head(features * (whole / top).exp().unsqueeze(1)))


def strengths(features: Tensor, percent: float) -> tuple[Tensor, Tensor]:
    """The sum of all positive features, and that of the largest 100 − `percent` per cent, at least one: (B, D) -> (B,), (B,).

    >>> strengths(torch.tensor([[1.0, 2.0, 3.0, 4.0]]), 75)
    (tensor([10.]), tensor([4.]))
    """
    positive = features.clamp_min(0)
    top = positive.topk(kept(features.shape[1], percent), 1).values.sum(1)
    return positive.sum(1), top.clamp_min(torch.finfo(features.dtype).tiny)


def kept(width: int, percent: float) -> int:
    """How many of so many units are above the percentile, at least one."""
    return max(1, width - math.floor(width * percent / 100 + 0.5))


@dataclass(frozen=True)
class Scale:
    """The rule with its head."""

    head: Head
    percent: float = 85.0

    def __call__(self, seen: Seen) -> Tensor:
        """Scores, (B,)."""
        return scale(seen.features, self.head, self.percent)


def fit(known: FitData, *, percent: float = 85.0) -> Scale:
    """Nothing to learn; the authors' percentile."""
    number("percent", percent, 0, 100)
    return Scale(known.head, percent)
