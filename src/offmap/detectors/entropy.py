"""The entropy of the plain net's prediction."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from offmap.detectors.known import FitData
from offmap.detectors.penultimate import Seen


def entropy(logits: Tensor) -> Tensor:
    r"""−Σ_c p_c log p_c with p = softmax(z), in nats: (B, C) -> (B,).

    >>> import torch
    >>> entropy(torch.zeros(1, 10))
    tensor([2.3026])
    """
    logs = logits.double().log_softmax(1)
    return -(logs.exp() * logs).sum(1).to(logits.dtype)


@dataclass(frozen=True)
class Entropy:
    """The rule."""

    def __call__(self, seen: Seen) -> Tensor:
        """Scores, (B,)."""
        return entropy(seen.logits)


def fit(known: FitData) -> Entropy:
    """Nothing to learn."""
    return Entropy()
