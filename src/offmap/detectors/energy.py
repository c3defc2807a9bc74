"""The energy of the logits (Liu et al., 2020): a smooth maximum, which falls where all evidence is weak."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from offmap.detectors.known import FitData, number
from offmap.detectors.penultimate import Seen


def energy(logits: Tensor, temperature: float = 1.0) -> Tensor:
    r"""−T log Σ_c exp(z_c / T): (B, C) -> (B,).

    >>> energy(torch.tensor([[0.0, 0.0]]))
    tensor([-0.6931])
    """
    return -temperature * torch.logsumexp(logits / temperature, 1)


@dataclass(frozen=True)
class Energy:
    """The rule at a temperature."""

    temperature: float = 1.0

    def __call__(self, seen: Seen) -> Tensor:
        """Scores, (B,)."""
        return energy(seen.logits, self.temperature)


def fit(known: FitData, *, temperature: float = 1.0) -> Energy:
    """Nothing to learn."""
    number("temperature", temperature, 1e-6, 1e6)
    return Energy(temperature)
