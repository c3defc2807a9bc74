"""Generalised entropy (Liu et al., 2023): a power of each probability, so that small ones count almost as much as large ones."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from offmap.detectors.known import FitData, number
from offmap.detectors.msp import odds
from offmap.detectors.penultimate import Seen


def gen(logits: Tensor, gamma: float = 0.1, top: int = 100) -> Tensor:
    r"""Σ p_c^γ (1 − p_c)^γ over the `top` largest p = softmax(z): (B, C) -> (B,).

    1 − p_c is the sum of the others: that of the largest p would else be rounded to 0.

    >>> gen(torch.tensor([[0.0, 0.0]]), gamma=0.5)
    tensor([1.])
    """
    powers, others = odds(logits.double())
    whole = 1 + others.unsqueeze(1)
    rest = torch.cat([others.unsqueeze(1), whole - powers[:, 1:]], 1)
    return (powers * rest / whole.square())[:, :top].pow(gamma).sum(1).to(logits.dtype)


@dataclass(frozen=True)
class GEN:
    """The rule with its power and how many classes count."""

    gamma: float = 0.1
    top: int = 100

    def __call__(self, seen: Seen) -> Tensor:
        """Scores, (B,)."""
        return gen(seen.logits, self.gamma, self.top)


def fit(known: FitData, *, gamma: float = 0.1, top: int = 100) -> GEN:
    """Nothing to learn; the authors' numbers."""
    number("gamma", gamma, 1e-6, 1)
    number("top", top, 1, 1e9, whole=True)
    return GEN(gamma, top)
