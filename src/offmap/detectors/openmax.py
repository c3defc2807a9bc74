"""OpenMax (Bendale & Boult, 2016): logits far from the usual ones of their class hand evidence over to an unknown class."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from offmap.detectors.known import FitData, each_class, number
from offmap.detectors.penultimate import Seen


def openmax(logits: Tensor, means: Tensor, shape: Tensor, scale: Tensor, alpha: int = 3) -> Tensor:
    r"""P(unknown): (B, C), means (C, C), Weibull shapes and scales (C,) -> (B,).

    With d_c = |z − mean_c| and F_c(d) = 1 − exp(−(d / scale_c)^shape_c), the class of rank i = 0, 1, … among the `alpha` largest
    logits keeps the share w = 1 − (1 − i/α) F_c(d_c), the others all; z₀ = Σ_c (1 − w_c) z_c joins z_c w_c in a softmax.

    >>> openmax(torch.tensor([[0.0, 0.0]]), torch.zeros(2, 2), torch.ones(2), torch.ones(2))
    tensor([0.3333])
    """
    z = logits.double()
    alpha = min(alpha, z.shape[1])
    distance = torch.cdist(z, means.double(), compute_mode="donot_use_mm_for_euclid_dist")
    outside = -torch.expm1(-((distance / scale) ** shape))
    place = z.argsort(1, descending=True).argsort(1)
    lost = (1 - place / alpha).clamp_min(0) * outside
    revised = torch.cat([(lost * z).sum(1, keepdim=True), (1 - lost) * z], 1)
    return revised.softmax(1)[:, 0].to(logits.dtype)


def weibull(values: Tensor, steps: int = 80) -> tuple[Tensor, Tensor]:
    r"""Shape k and scale of the Weibull law that fits positive numbers best: (n,) -> (), ().

    The likelihood is highest where Σ x^k log x / Σ x^k − 1/k − mean log x = 0; the left side rises with k.

    >>> [round(float(v), 2) for v in weibull(torch.tensor([1.0, 2.0, 3.0, 4.0]))]
    [2.45, 2.83]
    """
    tiny = torch.finfo(torch.float64).tiny
    x = values.double().clamp_min(tiny)
    unit = x.max()
    logs = (x / unit).log()
    low, high = x.new_tensor(-7.0), x.new_tensor(14.0)  # log k
    for _ in range(steps):
        k = ((low + high) / 2).exp()
        weights = (k * logs).softmax(0)
        rises = (weights * logs).sum() - 1 / k - logs.mean() > 0
        low, high = (low, (low + high) / 2) if rises else ((low + high) / 2, high)
    k = ((low + high) / 2).exp()
    return k, unit * (k * logs).exp().mean() ** (1 / k)


@dataclass(frozen=True)
class OpenMax:
    """The rule with the mean logits of each class, and the Weibull laws of the largest distances to them."""

    means: Tensor
    shape: Tensor
    scale: Tensor
    alpha: int = 3

    def __call__(self, seen: Seen) -> Tensor:
        """Scores, (B,)."""
        return openmax(seen.logits, self.means, self.shape, self.scale, self.alpha)


def fit(known: FitData, *, tail: int = 20, alpha: int = 3) -> OpenMax:
    """Means of the rows that the net gets right, and the law of the `tail` largest distances to them, class by class."""
    number("tail", tail, 2, 1e9, whole=True)
    number("alpha", alpha, 1, 1e9, whole=True)
    right = known.logits.argmax(1) == known.labels
    z, labels = known.logits[right].double(), known.labels[right]
    each_class(labels, known.classes, "correctly classified training rows")
    own = [z[labels == c] for c in range(known.classes)]
    means = torch.stack([rows.mean(0) for rows in own])
    laws = [weibull((rows - mean).norm(dim=1).sort().values[-tail:]) for rows, mean in zip(own, means, strict=True)]
    return OpenMax(means, torch.stack([k for k, _ in laws]), torch.stack([s for _, s in laws]), alpha)
