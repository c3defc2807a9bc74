"""KL matching (Hendrycks et al., 2022): how far a prediction is from the usual one of any class."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from offmap.detectors.known import FitData, each_class
from offmap.detectors.penultimate import Seen


def kl_matching(logits: Tensor, templates: Tensor) -> Tensor:
    r"""min_k KL(softmax(z) ‖ d_k), templates d: (B, C), (K, C) -> (B,).

    >>> kl_matching(torch.zeros(1, 2), torch.tensor([[0.5, 0.5], [0.9, 0.1]]))
    tensor([0.])
    """
    logs = logits.double().log_softmax(1)
    p = logs.exp()
    cross = p @ templates.double().clamp_min(torch.finfo(torch.float64).tiny).log().mT  # (B, K)
    return ((p * logs).sum(1) - cross.amax(1)).clamp_min(0).to(logits.dtype)


@dataclass(frozen=True)
class KLMatching:
    """The rule with its templates, (K, C)."""

    templates: Tensor

    def __call__(self, seen: Seen) -> Tensor:
        """Scores, (B,)."""
        return kl_matching(seen.logits, self.templates)


def fit(known: FitData) -> KLMatching:
    """A template is the mean prediction of the training rows that the net puts into a class."""
    predicted = known.logits.argmax(1)
    counts = each_class(predicted, known.classes, "predictions on training rows")
    sums = known.logits.new_zeros(known.classes, known.classes, dtype=torch.float64)
    sums.index_add_(0, predicted, known.logits.double().softmax(1))
    return KLMatching(sums / counts[:, None])
