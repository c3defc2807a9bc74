"""fDBD (Liu & Qin, 2024): the mean distance of the features to the decision boundaries, relative to that to the training mean."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from offmap.detectors.known import FitData
from offmap.detectors.penultimate import Head, Seen


def fdbd(features: Tensor, logits: Tensor, weight: Tensor, mean: Tensor) -> Tensor:
    r"""−mean over c ≠ ŷ of (z_ŷ − z_c) / |w_ŷ − w_c|, divided by |h − mean|: (B, D), (B, C), (C, D), (D,) -> (B,).

    >>> eye = torch.eye(2)
    >>> fdbd(torch.tensor([[3.0, 1.0]]), torch.tensor([[3.0, 1.0]]), eye, torch.tensor([3.0, 0.0]))  # −√2
    tensor([-1.4142])
    """
    best = logits.argmax(1)
    tiny = torch.finfo(torch.float64).tiny
    between = torch.cdist(weight.double(), weight.double(), compute_mode="donot_use_mm_for_euclid_dist")
    gaps = logits.double().amax(1, keepdim=True) - logits.double()
    ratios = gaps / between[best].clamp_min(tiny)  # 0 for the best class itself
    reach = (features.double() - mean.double()).norm(dim=1).clamp_min(tiny)
    return -(ratios.sum(1) / (logits.shape[1] - 1) / reach).to(logits.dtype)


@dataclass(frozen=True)
class FDBD:
    """The rule with its head and the mean of the training features."""

    head: Head
    mean: Tensor

    def __call__(self, seen: Seen) -> Tensor:
        """Scores, (B,)."""
        return fdbd(seen.features, seen.logits, self.head.weight, self.mean)


def fit(known: FitData) -> FDBD:
    """The mean of the training features."""
    return FDBD(known.head, known.features.double().mean(0))
