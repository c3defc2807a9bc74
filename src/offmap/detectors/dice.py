"""DICE (Sun & Li, 2022): only the weights that matter most for training data are kept in the head, then the energy."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from offmap.detectors.energy import energy
from offmap.detectors.known import FitData, number
from offmap.detectors.penultimate import Head, Seen
from offmap.detectors.react import percentile


def dice(features: Tensor, head: Head) -> Tensor:
    """Energy of h (M ⊙ W)ᵀ + b for a head whose weights are thinned out already: (B, D) -> (B,).

    >>> import torch
    >>> dice(torch.tensor([[1.0, 7.0]]), Head(torch.tensor([[1.0, 0.0]]), torch.zeros(1)))
    tensor([-1.])
    """
    return energy(head(features))


def thinned(head: Head, mean: Tensor, percent: float) -> Head:
    """The head without the weights whose share W_cd · mean_d of the mean logits is in the lowest `percent` per cent."""
    shares = head.weight * mean
    return Head(head.weight * (shares > percentile(shares, percent)), head.bias)


@dataclass(frozen=True)
class DICE:
    """The rule with its thinned head."""

    head: Head

    def __call__(self, seen: Seen) -> Tensor:
        """Scores, (B,)."""
        return dice(seen.features, self.head)


def fit(known: FitData, *, percent: float = 90.0) -> DICE:
    """The mean is that of the training features."""
    number("percent", percent, 0, 100)
    return DICE(thinned(known.head, known.features.mean(0), percent))
