"""Temperature scaling (Guo et al., 2017): the maximum softmax probability of logits that are calibrated on validation rows."""

import math

from torch import Tensor

from offmap.detectors.msp import msp
from offmap.detectors.posthoc import FitData, register


def best_temperature(logits: Tensor, labels: Tensor) -> float:
    r"""Find the T that minimises the mean of −log softmax(z / T)_y: (n, C), (n,) -> number.

    In β = 1/T it is convex, with slope mean(Σ_c p_c z_c − z_y): β is where that changes sign, found by halving log β.

    >>> import torch
    >>> round(best_temperature(torch.tensor([[4.0, 0.0]] * 4), torch.tensor([0, 0, 0, 1])), 2)  # 4 / log 3
    3.64
    """
    z = logits.double()
    true_logits = z.gather(1, labels[:, None]).squeeze(1)
    low, high = math.log(1e-3), math.log(1e3)  # a model without errors would have no temperature at all
    for _ in range(60):
        middle = (low + high) / 2
        slope = (((z * math.exp(middle)).softmax(1) * z).sum(1) - true_logits).mean()
        low, high = (low, middle) if slope > 0 else (middle, high)
    return math.exp(-(low + high) / 2)


@register("temperature", score=msp)
def fit(data: FitData) -> dict[str, object]:
    """Calibrate on validation rows: on training rows, which the model has learnt by heart, T would be too low."""
    return {"temperature": best_temperature(data.valid.logits, data.valid_labels)}
