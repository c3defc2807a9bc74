"""ReAct (Sun et al., 2021): features are clamped at a percentile of the training features, then the energy of the new logits."""

import torch
from torch import Tensor

from offmap.detectors.classifier import Head
from offmap.detectors.energy import energy
from offmap.detectors.posthoc import FitData, register


def react(features: Tensor, head: Head, bound: float) -> Tensor:
    r"""Energy of min(h, bound) Wᵀ + b: (B, D) -> (B,).

    >>> react(torch.tensor([[5.0]]), Head(torch.tensor([[1.0], [1.0]]), torch.zeros(2)), 2.0)  # −2 − log 2
    tensor([-2.6931])
    """
    return energy(head(features.clamp_max(bound)))


def percentile(values: Tensor, percent: float) -> float:
    """Return the ⌈percent · n / 100⌉-th smallest of all n values."""
    rank = -(-int(percent * 1e6) * values.numel() // int(1e8))
    return float(torch.kthvalue(values.flatten(), min(max(rank, 1), values.numel())).values)


@register("react", score=react, percent=(0, 100))
def fit(data: FitData, percent: float = 90.0) -> dict[str, object]:
    """Bound all features by one percentile of the training features."""
    return {"bound": percentile(data.features, percent)}
