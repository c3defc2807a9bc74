"""Distance of inputs to the training rows, without any model: the nearest row, or one ellipsoid around all of them."""

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
    if not 1 <= k <= len(rows):
        raise ConfigError(f"Expected `k` from 1 to the number of rows, {len(rows)}, but got {k}.")
    # the matrix-product form of cdist loses the digits of small distances: a row's distance to itself would not be 0
    parts = [
        torch.cdist(part, rows.flatten(1), compute_mode="donot_use_mm_for_euclid_dist").kthvalue(k, 1).values
        for part in check_rows(x, rows[0]).flatten(1).split(max(1, DISTANCES // len(rows)))
    ]
    return torch.cat(parts)


class Nearest:
    """A Scorer: the distance to the k-th nearest training row; in `standardise`d columns those that do not vary are only centred.

    >>> Nearest(torch.tensor([[0.0], [2.0]])).score(torch.tensor([[4.0]]))
    tensor([2.])
    """

    def __init__(self, inputs: Tensor, *, k: int = 1, standardise: bool = True) -> None:
        check_training_rows(inputs, 1)
        spread = inputs.std(0, correction=0)
        self.k: int = k
        self.shift: Tensor = inputs.mean(0) if standardise else torch.zeros_like(inputs[0])
        self.scale: Tensor = torch.where(spread > 0, spread, 1.0) if standardise else torch.ones_like(inputs[0])
        self.rows: Tensor = (inputs - self.shift) / self.scale

    def score(self, x: Tensor) -> Tensor:
        """(B, ...) -> (B,), higher = more OOD."""
        x = check_rows(x, self.shift)
        check_finite(x, None, "the inputs")
        return nearest_distance((x - self.shift) / self.scale, self.rows, k=self.k)


def mahalanobis_distance(x: Tensor, mean: Tensor, covariance: Tensor) -> Tensor:
    r"""√((x − m)ᵀ Σ⁻¹ (x − m)), computed in float64: (B, D), (D,), (D, D) -> (B,).

    >>> mahalanobis_distance(torch.tensor([[3.0, 0.0], [0.0, 3.0]]), torch.zeros(2), torch.diag(torch.tensor([1.0, 9.0])))
    tensor([3., 1.])
    """
    factor = torch.linalg.cholesky(covariance.double())
    gap = (x.double() - mean.double()).mT
    return torch.linalg.solve_triangular(factor, gap, upper=False).norm(dim=0).to(x)


def shrunk_covariance(x: Tensor, shrinkage: float | None = None) -> Tensor:
    r"""(1 − a)·S + a·(tr S / D)·I in float64, S the covariance of the rows: (n, D) -> (D, D).

    Without `shrinkage`, a is Ledoit and Wolf's: the one of least expected squared error, from the data alone.

    >>> shrunk_covariance(torch.tensor([[1.0, 0.0], [-1.0, 0.0]]), shrinkage=0.5)
    tensor([[0.7500, 0.0000],
            [0.0000, 0.2500]], dtype=torch.float64)
    """
    z = x.double() - x.double().mean(0)
    rows, width = z.shape
    covariance = z.mT @ z / rows
    target = torch.eye(width, dtype=z.dtype, device=z.device) * (covariance.trace() / width)
    if shrinkage is None:
        gap = (covariance - target).square().sum()
        noise = (z.square().sum(1).square().mean() - covariance.square().sum()) / rows
        shrinkage = float((noise / gap).clamp(0, 1)) if gap > 0 else 0.0
    return (1 - shrinkage) * covariance + shrinkage * target


class Mahalanobis:
    """A Scorer: the distance from the training rows' mean in units of their covariance, of columns in standard deviations.

    A column that does not vary counts with the variance that shrinkage gives it: a new value there is OOD.

    >>> Mahalanobis(torch.tensor([[0.0], [2.0]])).score(torch.tensor([[4.0]]))
    tensor([3.])
    """

    def __init__(self, inputs: Tensor, *, shrinkage: float | None = None) -> None:
        if shrinkage is not None and not 0 <= shrinkage <= 1:
            raise ConfigError(f"Expected `shrinkage` from 0 to 1, or None for Ledoit and Wolf's, but got {shrinkage!r}.")
        check_training_rows(inputs, 2)
        spread = inputs.double().std(0, correction=0)
        self.scale: Tensor = torch.where(spread > 0, spread, 1.0).to(inputs)
        rows = (inputs / self.scale).flatten(1)
        self.mean: Tensor = rows.double().mean(0)
        self.covariance: Tensor = shrunk_covariance(rows, shrinkage)
        if int(torch.linalg.cholesky_ex(self.covariance).info):
            raise DataError("The covariance of the training rows is singular: raise `shrinkage`.")

    def score(self, x: Tensor) -> Tensor:
        """(B, ...) -> (B,), higher = more OOD."""
        x = check_rows(x, self.scale)
        check_finite(x, None, "the inputs")
        return mahalanobis_distance((x / self.scale).flatten(1), self.mean, self.covariance)


def check_training_rows(inputs: Tensor, least: int) -> None:
    """Raise unless there are so many training rows, all finite."""
    if len(inputs) < least:
        raise DataError(f"Expected {least} or more training rows, but got {len(inputs)}.")
    check_finite(inputs, None, "the training inputs")


def check_rows(x: Tensor, row: Tensor) -> Tensor:
    """Return inputs in the type of a training row, or raise if they are none or of another shape."""
    if not len(x):
        raise DataError("Expected at least one input, but got none.")
    if x.shape[1:] != row.shape:
        raise ShapeError(f"Expected rows of shape {tuple(row.shape)}, but got {tuple(x.shape[1:])}.")
    return x.to(row)
