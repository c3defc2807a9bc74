"""ViM (Wang et al., 2022): the part of the features outside the space that training data span, as one more, virtual logit."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from offmap.detectors.energy import energy
from offmap.detectors.known import FitData, number
from offmap.detectors.penultimate import Seen

DIMENSIONS = {2048: 1000, 768: 512}
"""The authors' numbers of principal directions by the least width; for narrower features, half of them."""


def vim(features: Tensor, logits: Tensor, origin: Tensor, rest: Tensor, alpha: float) -> Tensor:
    r"""α |R (h − o)| − log Σ_c exp z_c: (B, D), (B, C), o (D,), R (r, D) -> (B,).

    >>> vim(torch.tensor([[3.0, 4.0]]), torch.zeros(1, 1), torch.zeros(2), torch.tensor([[0.0, 1.0]]), 0.5)
    tensor([2.])
    """
    residual = ((features.double() - origin) @ rest.double().mT).norm(dim=1)
    return (alpha * residual).to(logits.dtype) + energy(logits)


@dataclass(frozen=True)
class ViM:
    """The rule with the origin (D,), the directions left out (r, D), and the scale of the virtual logit."""

    origin: Tensor
    rest: Tensor
    alpha: float

    def __call__(self, seen: Seen) -> Tensor:
        """Scores, (B,)."""
        return vim(seen.features, seen.logits, self.origin, self.rest, self.alpha)


def fit(known: FitData, *, dimensions: int | None = None) -> ViM:
    """The origin is where all logits vanish, o = −W⁺ b; R are the directions of least second moment around it. α makes the mean
    of the virtual logit that of the largest one, on the training data.
    """
    width = known.features.shape[1]
    usual = next((d for least, d in DIMENSIONS.items() if width >= least), width // 2)
    number("dimensions", usual if dimensions is None else dimensions, 0, width - 1, whole=True)
    size = usual if dimensions is None else dimensions
    origin = -torch.linalg.pinv(known.head.weight.double()) @ known.head.bias.double()
    z = known.features.double() - origin
    _, vectors = torch.linalg.eigh(z.mT @ z / len(z))  # in rising order
    rest = vectors[:, : width - size].mT
    residual = (z @ rest.mT).norm(dim=1).mean()
    alpha = float(known.logits.double().amax(1).mean() / residual.clamp_min(torch.finfo(torch.float64).tiny))
    return ViM(origin, rest, alpha)
