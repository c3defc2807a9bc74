"""SCALE (Xu et al., 2024): features whose strength lies in few units are made longer, then the energy."""

import math

import torch
from torch import Tensor

from offmap.detectors.classifier import Head
from offmap.detectors.energy import energy
from offmap.detectors.posthoc import register


@register("scale", percent=(0, 100))
def scale(features: Tensor, head: Head, percent: float = 85.0) -> Tensor:
    r"""Energy of h·exp(r) Wᵀ + b with r = Σ_d h_d / Σ h_d over the units above the `percent`-th percentile of h: (B, D) -> (B,).

    Features should be outputs of a ReLU; of others, the positive ones are summed.

    >>> scale(torch.tensor([[0.0, 2.0]]), Head(torch.tensor([[0.0, 1.0]]), torch.zeros(1)), 50)  # −2e
    tensor([-5.4366])
    """
    return energy(head(features * stretch(features, percent)[0]))


def stretch(features: Tensor, percent: float) -> tuple[Tensor, int]:
    """Return exp(r), (B, 1), and the number of units above the percentile, at least one."""
    positive, width = features.clamp_min(0), features.shape[1]
    count = max(1, width - math.floor(width * percent / 100 + 0.5))
    top = positive.topk(count, 1).values.sum(1).clamp_min(torch.finfo(features.dtype).tiny)
    return (positive.sum(1) / top).exp().unsqueeze(1), count
