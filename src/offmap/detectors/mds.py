"""Mahalanobis distance to the nearest class (Lee et al., 2018): one ellipsoid around every class mean of the features."""

import torch
from torch import Tensor

from offmap.detectors.posthoc import FitData, class_means, count_classes, register


def mds(features: Tensor, means: Tensor, whitening: Tensor) -> Tensor:
    r"""min_c (h − m_c)ᵀ Σ⁺ (h − m_c) with Σ⁺ = A Aᵀ: (B, D), (C, D), A (D, r) -> (B,).

    >>> mds(torch.tensor([[3.0, 1.0]]), torch.tensor([[0.0, 1.0], [3.0, 3.0]]), torch.eye(2))
    tensor([4.])
    """
    distances = torch.cdist(features.double() @ whitening.double(), means.double() @ whitening.double())
    return distances.amin(1).square().to(features.dtype)


def whiten(rows: Tensor) -> Tensor:
    """Return A with A Aᵀ the pseudo-inverse of the second moments of centred rows, in float64: (n, D) -> (D, r).

    Directions in which nothing varies, those of units that are dead on all training data, are left out.
    """
    z = rows.double()
    s, v = torch.linalg.eigh(z.mT @ z / len(z))
    varying = s > len(s) * torch.finfo(rows.dtype).eps * s.amax()
    return v[:, varying] / s[varying].sqrt()


@register("mds", score=mds)
def fit(data: FitData) -> dict[str, object]:
    """Take the means by true class, and one covariance of the deviations from them for all classes."""
    means = class_means(data.features, data.labels, count_classes(data.labels, data.classes, "training rows"))
    return {"means": means, "whitening": whiten(data.features - means[data.labels].to(data.features))}
