"""ASH-S (Djurisic et al., 2023): all but the largest features are removed and the rest made longer, then the energy."""

import torch
from torch import Tensor

from offmap.detectors.classifier import Head
from offmap.detectors.energy import energy
from offmap.detectors.posthoc import register
from offmap.detectors.scale import stretch


@register("ash", percent=(0, 100))
def ash(features: Tensor, head: Head, percent: float = 90.0) -> Tensor:
    r"""Energy of h′·exp(r) Wᵀ + b, where h′ keeps the largest 100 − `percent` per cent of h, and r = Σ_d h_d / Σ_d h′_d.

    Features should be outputs of a ReLU; of others, the positive ones are summed. (B, D) -> (B,).

    >>> ash(torch.tensor([[1.0, 3.0]]), Head(torch.tensor([[1.0, 0.0]]), torch.zeros(1)), 50)  # all that counted is removed
    tensor([-0.])
    """
    factor, count = stretch(features, percent)
    values, units = features.topk(count, 1)
    return energy(head(torch.zeros_like(features).scatter_(1, units, values) * factor))
