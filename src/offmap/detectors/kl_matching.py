"""KL matching (Hendrycks et al., 2022): the divergence of a prediction from the mean prediction of the nearest class."""

import torch
from torch import Tensor

from offmap.detectors.posthoc import FitData, class_means, count_classes, register


def kl_matching(logits: Tensor, templates: Tensor) -> Tensor:
    r"""min_k KL(softmax(z) ‖ d_k), templates d: (B, C), (K, C) -> (B,).

    >>> kl_matching(torch.zeros(1, 2), torch.tensor([[0.5, 0.5], [0.9, 0.1]]))
    tensor([0.])
    """
    logs = logits.double().log_softmax(1)
    p = logs.exp()
    cross = p @ templates.double().clamp_min(torch.finfo(torch.float64).tiny).log().mT  # (B, K)
    return ((p * logs).sum(1) - cross.amax(1)).clamp_min(0).to(logits.dtype)


@register("kl_matching", score=kl_matching)
def fit(data: FitData) -> dict[str, object]:
    """A template is the mean prediction of the training rows that the model assigns to a class."""
    predicted = data.logits.argmax(1)
    counts = count_classes(predicted, data.classes, "predictions on training rows")
    return {"templates": class_means(data.logits.double().softmax(1), predicted, counts)}
