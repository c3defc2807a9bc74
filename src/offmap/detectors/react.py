"""ReAct (Sun et al., 2021): features are cut off above what training data reach, then the energy of the new logits."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from offmap.detectors.energy import energy
from offmap.detectors.known import FitData, number
from offmap.detectors.penultimate import Head, Seen


def react(features: Tensor, head: Head, bound: float) -> Tensor:
    r"""Energy of min(h, bound) Wᵀ + b: (B, D) -> (B,).

    >>> import torch
    >>> react(torch.tensor([[5.0]]), Head(torch.tensor([[1.0], [1.0]]), torch.zeros(2)), 2.0)  # −2 − log 2
    tensor([-2.6931])
    """
    return energy(head(features.clamp_max(bound)))


@dataclass(frozen=True)
class ReAct:
    """The rule with its bound."""

    head: Head
    bound: float

    def __call__(self, seen: Seen) -> Tensor:
        """Scores, (B,)."""
        return react(seen.features, self.head, self.bound)


def percentile(values: Tensor, percent: float) -> float:
    """The value below which so many per cent of all numbers lie: the ⌈percent · n / 100⌉-th smallest.

    >>> import torch
    >>> percentile(torch.tensor([[1.0, 4.0], [2.0, 3.0]]), 75)
    3.0
    """
    flat = values.flatten()
    place = -(-int(percent * 1e6) * flat.numel() // int(1e8))
    return float(flat.kthvalue(min(max(place, 1), flat.numel())).values)


def fit(known: FitData, *, percent: float = 90.0) -> ReAct:
    """The bound is that percentile of all training features together."""
    number("percent", percent, 0, 100)
    return ReAct(known.head, percentile(known.features, percent))
