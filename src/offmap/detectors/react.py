"""ReAct (Sun et al., 2021): features are clamped at a percentile of the training features, then the energy of the new logits."""

from typing import Any

from torch import Tensor

from offmap.detectors.base import FitData, register
from offmap.detectors.classifier import Head
from offmap.detectors.energy import energy


def react(features: Tensor, head: Head, bound: float) -> Tensor:
    r"""Energy of min(h, bound) Wᵀ + b: (B, D) -> (B,).

    >>> import torch
    >>> react(torch.tensor([[5.0]]), Head(torch.tensor([[1.0], [1.0]]), torch.zeros(2)), 2.0)  # −2 − log 2
    tensor([-2.6931])
    """
    return energy(head(features.clamp_max(bound)))


def percentile(values: Tensor, percent: float) -> float:
    """Return the ⌈percent · n / 100⌉-th smallest of all n values.

    >>> import torch
    >>> percentile(torch.tensor([[1.0, 4.0], [2.0, 3.0]]), 75)
    3.0
    """
    flat = values.flatten()
    rank = -(-int(percent * 1e6) * flat.numel() // int(1e8))
    return float(flat.kthvalue(min(max(rank, 1), flat.numel())).values)


@register("react", score=react, percent=(0, 100))
def fit(data: FitData, percent: float = 90.0) -> dict[str, Any]:
    """Bound all features by one percentile of the training features."""
    return {"bound": percentile(data.features, percent)}
