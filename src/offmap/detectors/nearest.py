"""Distance of inputs to the nearest training row: no model at all, and the baseline for every claim."""

from dataclasses import dataclass

import torch
from torch import Tensor

from offmap.data import check_finite
from offmap.errors import ConfigError, DataError, ShapeError

DISTANCES = 1 << 22
"""Distances held at once (16 MB in float32), whatever the number of rows."""


def nearest_distance(x: Tensor, rows: Tensor, *, k: int = 1) -> Tensor:
    """Euclidean distance from each of `x` (B, ...) to the k-th nearest of `rows` (n, ...): (B,). Memory is bounded.

    >>> nearest_distance(torch.tensor([[0.0, 0.0], [3.0, 5.0]]), torch.tensor([[0.0, 1.0], [3.0, 1.0]]))
    tensor([1., 4.])
    """
    if x.shape[1:] != rows.shape[1:]:
        raise ShapeError(f"Expected rows of shape {tuple(rows.shape[1:])}, but got {tuple(x.shape[1:])}.")
    if not 1 <= k <= len(rows):
        raise ConfigError(f"Expected `k` from 1 to the number of rows, {len(rows)}, but got {k}.")
    if not len(x):
        raise DataError("Expected at least one input, but got none.")
    step = max(1, DISTANCES // len(rows))
    # the matrix-product form of cdist loses the digits of small distances: a row's distance to itself would not be 0
    parts = [
        torch.cdist(part, rows.flatten(1), compute_mode="donot_use_mm_for_euclid_dist").kthvalue(k, 1).values
        for part in x.flatten(1).split(step)
    ]
    return torch.cat(parts)


@dataclass(frozen=True)
class Nearest:
    """A Scorer: the distance to the k-th nearest training row, on standardised inputs if `shift` and `scale` say so."""

    rows: Tensor
    shift: Tensor
    scale: Tensor
    k: int = 1

    def score(self, x: Tensor) -> Tensor:
        """(B, ...) -> (B,), higher = more OOD."""
        x = x.to(self.rows)
        check_finite(x, None, "the inputs")
        return nearest_distance((x - self.shift) / self.scale, self.rows, k=self.k)


def nearest(inputs: Tensor, *, k: int = 1, standardise: bool = True) -> Nearest:
    """Remember the training inputs (n, ...); columns that do not vary are only centred.

    >>> nearest(torch.tensor([[0.0], [2.0]])).score(torch.tensor([[4.0]]))
    tensor([2.])
    """
    if not len(inputs):
        raise DataError("Expected at least one training row, but got none.")
    check_finite(inputs, None, "the training inputs")
    shift, scale = torch.zeros_like(inputs[0]), torch.ones_like(inputs[0])
    if standardise:
        shift, spread = inputs.mean(0), inputs.std(0, correction=0)
        scale = torch.where(spread > 0, spread, scale)
    return Nearest((inputs - shift) / scale, shift, scale, k)
