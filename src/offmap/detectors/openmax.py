"""OpenMax (Bendale & Boult, 2016): logits far from the usual ones of their class hand evidence over to an unknown class."""

import torch
from torch import Tensor

from offmap.detectors.posthoc import FitData, count_classes, register


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
    ranks = z.argsort(1, descending=True).argsort(1)
    lost = (1 - ranks / alpha).clamp_min(0) * outside
    revised = torch.cat([(lost * z).sum(1, keepdim=True), (1 - lost) * z], 1)
    return revised.softmax(1)[:, 0].to(logits.dtype)


def fit_weibull(values: Tensor) -> tuple[Tensor, Tensor]:
    r"""Fit shape k and scale of a Weibull law to positive numbers: (n,) -> (), ().

    The likelihood is highest where Σ x^k log x / Σ x^k − 1/k − mean log x = 0; the left side rises with k.

    >>> [round(float(v), 2) for v in fit_weibull(torch.tensor([1.0, 2.0, 3.0, 4.0]))]
    [2.45, 2.83]
    """
    x = values.double().clamp_min(torch.finfo(torch.float64).tiny)
    unit = x.max()
    logs = (x / unit).log()
    low, high = x.new_tensor(-7.0), x.new_tensor(14.0)  # log k
    for _ in range(80):
        k = ((low + high) / 2).exp()
        weights = (k * logs).softmax(0)
        rises = (weights * logs).sum() - 1 / k - logs.mean() > 0
        low, high = (low, (low + high) / 2) if rises else ((low + high) / 2, high)
    k = ((low + high) / 2).exp()
    return k, unit * (k * logs).exp().mean() ** (1 / k)


@register("openmax", score=openmax, tail=(2, 1e9), alpha=(1, 1e9))
def fit(data: FitData, tail: int = 20, alpha: int = 3) -> dict[str, object]:
    """Per class: the mean logits of correctly classified rows, and the Weibull law of the `tail` largest distances to it."""
    correct = data.logits.argmax(1) == data.labels
    z, labels = data.logits[correct].double(), data.labels[correct]
    count_classes(labels, data.classes, "correctly classified training rows")
    by_class = [z[labels == c] for c in range(data.classes)]
    means = torch.stack([rows.mean(0) for rows in by_class])
    laws = [fit_weibull((rows - mean).norm(dim=1).sort().values[-tail:]) for rows, mean in zip(by_class, means, strict=True)]
    shape, scale = (torch.stack(values) for values in zip(*laws, strict=True))
    return {"means": means, "shape": shape, "scale": scale, "alpha": alpha}
