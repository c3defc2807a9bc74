"""Generalised entropy (Liu et al., 2023): a power of each probability, so that small ones count almost as much as large ones."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from offmap.detectors.known import Known, number
from offmap.detectors.penultimate import Seen


def gen(logits: Tensor, gamma: float = 0.1, top: int = 100) -> Tensor:
    r"""Σ p_c^γ (1 − p_c)^γ over the `top` largest p = softmax(z): (B, C) -> (B,).

    1 − p_c is the sum of the others: the largest of them would be rounded to 1.

    >>> gen(torch.tensor([[0.0, 0.0]]), gamma=0.5)
    tensor([1.])
    """
    logs = logits.double().log_softmax(1).topk(min(top, logits.shape[1]), 1).values
    others = torch.log(-torch.expm1(logs.clamp_max(-torch.finfo(logs.dtype).tiny)))
    return (gamma * (logs + others)).exp().sum(1).to(logits.dtype)


@dataclass(frozen=True)
class GEN:
    """The rule with its power and how many classes count."""

    gamma: float = 0.1
    top: int = 100

    def __call__(self, seen: Seen) -> Tensor:
        """Scores, (B,)."""
        return gen(seen.logits, self.gamma, self.top)


def fit(known: Known, *, gamma: float = 0.1, top: int = 100) -> GEN:
    """Nothing to learn; the authors' numbers."""
    number("gamma", gamma, 1e-6, 1)
    number("top", top, 1, 1e9, whole=True)
    return GEN(gamma, top)
