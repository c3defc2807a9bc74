"""Binary classification: yes or no, per example, label or position."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from offmap.likelihoods.categorical import Classification, drop_axis
from offmap.likelihoods.protocol import align_targets, mean_over_positions


@dataclass(frozen=True)
class Bernoulli(Classification):
    """Binary classification: a logit per example, (B,) or (B, 1), or per position, (B, *positions).

    Several labels of one example are positions as well. Probabilities are (B, 2, *positions), like those of a classifier with
    two classes; targets of −100 are ignored.

    Args:
        positions: The number of axes of positions; the outputs may have a further axis of size 1.

    >>> Bernoulli().nll(torch.zeros(1, 1), torch.tensor([1]))
    tensor([[0.6931]])
    """

    positions: int = 0

    expects: ClassVar[str] = "targets (B,) or (B, 1) of 0 and 1 with outputs (B,) or (B, 1) of logits, or both (B, *positions)"

    def logit(self, outputs: Tensor) -> Tensor:
        """Return one logit per position: (P, B, ...) -> (P, B, *positions)."""
        if outputs.ndim - 2 == self.positions:
            return outputs
        return outputs.squeeze(2 if outputs.shape[2] == 1 else -1)

    def logits(self, outputs: Tensor) -> Tensor:
        """Return two-class logits, (P, B, 2, *positions)."""
        logit = self.logit(outputs)
        return torch.stack([torch.zeros_like(logit), logit], 2)

    def nll(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return log(1 + e^∓logit), averaged over positions: (P, B, ...), (B, ...) -> (P, B)."""
        logit = self.logit(outputs)
        y = align_targets(y, logit.shape[1:])
        return mean_over_positions(F.softplus((1 - 2 * y.to(logit)) * logit), y)

    @classmethod
    def infer(cls, output: Tensor, y: Tensor) -> Bernoulli | None:
        """Return the likelihood with the positions of the targets; None if they do not fit."""
        if cls().fits(output, y):
            return cls()
        squeezed = [drop_axis(output.shape, axis) for axis in (1, -1) if output.ndim > 2 and output.shape[axis] == 1]
        return cls(y.ndim - 1) if y.ndim > 1 and y.shape in [output.shape, *squeezed] else None

    def fits(self, output: Tensor, y: Tensor) -> bool:
        """Return whether there is one target per logit."""
        if self.positions == 0:
            return max(output.ndim, y.ndim) <= 2 and output.numel() == output.shape[0] and y.numel() == y.shape[0]
        extra = output.ndim - y.ndim
        return y.ndim == self.positions + 1 and (extra == 0 or (extra == 1 and 1 in (output.shape[1], output.shape[-1])))
