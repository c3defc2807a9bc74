"""fDBD (Liu & Qin, 2024): the mean distance of the features to the decision boundaries, relative to that to the training mean."""

import torch
from torch import Tensor

from offmap.detectors.classifier import Head
from offmap.detectors.posthoc import FitData, register


def fdbd(features: Tensor, logits: Tensor, head: Head, mean: Tensor) -> Tensor:
    r"""−mean over c ≠ ŷ of (z_ŷ − z_c) / |w_ŷ − w_c|, divided by |h − mean|: (B, D), (B, C), head (C, D), (D,) -> (B,).

    >>> h, head = torch.tensor([[3.0, 1.0]]), Head(torch.eye(2), torch.zeros(2))
    >>> fdbd(h, head(h), head, torch.tensor([3.0, 0.0]))  # −√2
    tensor([-1.4142])
    """
    best, weight = logits.argmax(1), head.weight.double()
    tiny = torch.finfo(torch.float64).tiny
    between = torch.cdist(weight, weight, compute_mode="donot_use_mm_for_euclid_dist")
    gaps = logits.double().amax(1, keepdim=True) - logits.double()
    ratios = gaps / between[best].clamp_min(tiny)  # 0 for the best class itself
    reach = (features.double() - mean.double()).norm(dim=1).clamp_min(tiny)
    return -(ratios.sum(1) / (logits.shape[1] - 1) / reach).to(logits.dtype)


@register("fdbd", score=fdbd)
def fit(data: FitData) -> dict[str, object]:
    """Take the mean of the training features."""
    return {"mean": data.features.double().mean(0)}
