"""Mahalanobis distance to the nearest class (Lee et al., 2018): one ellipsoid around every class mean of the features.

`mahalanobis.py` beside it is the older baseline: one ellipsoid for all, around the inputs themselves.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from offmap.detectors.known import FitData, each_class
from offmap.detectors.penultimate import Seen


def mds(features: Tensor, means: Tensor, whiten: Tensor) -> Tensor:
    r"""min_c (h − m_c)ᵀ Σ⁺ (h − m_c) with Σ⁺ = A Aᵀ: (B, D), (C, D), A (D, r) -> (B,).

    >>> mds(torch.tensor([[3.0, 1.0]]), torch.tensor([[0.0, 1.0], [3.0, 3.0]]), torch.eye(2))
    tensor([4.])
    """
    apart = torch.cdist(features.double() @ whiten.double(), means.double() @ whiten.double())
    return apart.amin(1).square().to(features.dtype)


def whitening(rows: Tensor) -> Tensor:
    """A with A Aᵀ the pseudo-inverse of the second moments of centred rows, in float64: (n, D) -> (D, r).

    Directions in which nothing varies are left out: those of units that are dead on all training data.
    """
    z = rows.double()
    s, v = torch.linalg.eigh(z.mT @ z / len(z))
    kept = s > len(s) * torch.finfo(rows.dtype).eps * s.amax()
    return v[:, kept] / s[kept].sqrt()


@dataclass(frozen=True)
class MDS:
    """The rule with class means (C, D) and the whitening (D, r) that all classes share."""

    means: Tensor
    whiten: Tensor

    def __call__(self, seen: Seen) -> Tensor:
        """Scores, (B,)."""
        return mds(seen.features, self.means, self.whiten)


def fit(known: FitData) -> MDS:
    """Means by true class; the covariance of what is left is that of all classes together."""
    counts = each_class(known.labels, known.classes, "training rows")
    sums = known.features.new_zeros(known.classes, known.features.shape[1], dtype=torch.float64)
    means = sums.index_add_(0, known.labels, known.features.double()) / counts[:, None]
    return MDS(means, whitening(known.features - means[known.labels].to(known.features)))
