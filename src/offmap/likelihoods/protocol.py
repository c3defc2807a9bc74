"""The contract of a likelihood, and what all of them do with targets and positions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from offmap._types import IGNORED
from offmap.errors import ShapeError


@dataclass(frozen=True)
class Prediction:
    """What the mixture over draws predicts; fields that do not apply are None.

    Regression: `mean` and total standard deviation `std` in the targets' units and shape: (B,), (B, K), or dense.
    Classification: `probs` (B, C, *positions), wherever the model has its class axis, and `label` (B, *positions).
    """

    mean: Tensor | None = None
    std: Tensor | None = None
    probs: Tensor | None = None
    label: Tensor | None = None


@runtime_checkable
class Likelihood(Protocol):
    """The contract of a likelihood; a user's own object with these methods is accepted."""

    def nll(self, output: Tensor, y: Tensor) -> Tensor:
        """(P, B, ...), (B, ...) -> (P, B), nats."""
        ...

    def predictive(self, outputs: Tensor) -> Prediction:
        """The mixture over P."""
        ...

    def score(self, outputs: Tensor) -> Tensor:
        """(P, B, ...) -> (B,) or (B, *positions), higher = more OOD."""
        ...


def aligned(y: Tensor, shape: Sequence[int]) -> Tensor:
    """Targets in the shape of what is predicted, (B, *positions): axes of size 1 may differ, nothing else.

    >>> aligned(torch.tensor([[1], [0]]), (2,))
    tensor([1, 0])
    """
    if y.numel() != math.prod(shape):
        raise ShapeError(
            f"Expected one target per prediction, {tuple(shape)}, but got targets {tuple(y.shape)}. "
            "Check that inputs and targets are cut or padded to the same length."
        )
    return y.reshape(tuple(shape))


def averaged(each: Tensor, y: Tensor) -> Tensor:
    """The mean over the positions that count; 0 for a row whose targets are all −100.

    Shapes: `each` (..., B, *positions), `y` (B, *positions) -> (..., B).

    >>> averaged(torch.tensor([[1.0, 3.0, 9.0], [5.0, 5.0, 5.0]]), torch.tensor([[0, 1, -100], [-100, -100, -100]]))
    tensor([2., 0.])
    """
    counted = (y != IGNORED).unsqueeze(-1).flatten(1)
    rows = each.unsqueeze(-1).flatten(each.ndim - y.ndim + 1)
    return torch.where(counted, rows, 0).sum(-1) / counted.sum(-1).clamp_min(1)
