"""ASH-S (Djurisic et al., 2023): all but the largest features are removed and the rest made longer, then the energy."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from offmap.detectors.energy import energy
from offmap.detectors.known import FitData, number
from offmap.detectors.penultimate import Head, Seen
from offmap.detectors.scale import kept, strengths


def ash(features: Tensor, head: Head, percent: float = 90.0) -> Tensor:
    r"""Energy of h′·exp(r) Wᵀ + b, where h′ keeps the largest 100 − `percent` per cent of h, and r = Σ_d h_d / Σ_d h′_d.

    Features are meant to be what a ReLU gives; of others, the positive ones are summed. (B, D) -> (B,).

    >>> ash(torch.tensor([[1.0, 3.0]]), Head(torch.tensor([[1.0, 0.0]]), torch.zeros(1)), 50)  # all that counted is removed
    tensor([-0.])
    """
    whole, top = strengths(features, percent)
    value, place = features.topk(kept(features.shape[1], percent), 1)
    left = torch.zeros_like(features).scatter_(1, place, value)
    return energy(head(left * (whole / top).exp().unsqueeze(1)))


@dataclass(frozen=True)
class ASH:
    """The rule with its head."""

    head: Head
    percent: float = 90.0

    def __call__(self, seen: Seen) -> Tensor:
        """Scores, (B,)."""
        return ash(seen.features, self.head, self.percent)


def fit(known: FitData, *, percent: float = 90.0) -> ASH:
    """Nothing to learn; the authors' percentile."""
    number("percent", percent, 0, 100)
    return ASH(known.head, percent)
