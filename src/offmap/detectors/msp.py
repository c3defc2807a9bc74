"""The maximum softmax probability (Hendrycks & Gimpel, 2017): a net that is unsure of its best class is off the map."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from offmap.detectors.known import Known, number
from offmap.detectors.penultimate import Seen


def msp(logits: Tensor, temperature: float = 1.0) -> Tensor:
    r"""1 − max_c softmax(z / T)_c: (B, C) -> (B,). In float64, without the digits that 1 − p would lose.

    >>> msp(torch.tensor([[0.0, 0.0], [0.0, 1.0986]]))
    tensor([0.5000, 0.2500])
    """
    return -torch.expm1((logits.double() / temperature).log_softmax(1).amax(1)).to(logits.dtype)


@dataclass(frozen=True)
class MSP:
    """The rule at a temperature."""

    temperature: float = 1.0

    def __call__(self, seen: Seen) -> Tensor:
        """Scores, (B,)."""
        return msp(seen.logits, self.temperature)


def fit(known: Known, *, temperature: float = 1.0) -> MSP:
    """Nothing to learn."""
    number("temperature", temperature, 1e-6, 1e6)
    return MSP(temperature)
