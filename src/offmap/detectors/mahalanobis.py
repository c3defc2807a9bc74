"""Distance to the training data's mean in units of their covariance: the oldest baseline, one ellipsoid for all."""

from dataclasses import dataclass

import torch
from torch import Tensor

from offmap.data import check_finite
from offmap.errors import ConfigError, DataError, ShapeError


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


@dataclass(frozen=True)
class Mahalanobis:
    """A Scorer: the distance from the training rows' mean; inputs are divided by `scale` first."""

    mean: Tensor
    covariance: Tensor
    scale: Tensor

    def score(self, x: Tensor) -> Tensor:
        """(B, ...) -> (B,), higher = more OOD."""
        x = x.to(self.scale)
        check_finite(x, None, "the inputs")
        if not len(x):
            raise DataError("Expected at least one input, but got none.")
        if x.shape[1:] != self.scale.shape:
            raise ShapeError(f"Expected rows of shape {tuple(self.scale.shape)}, but got {tuple(x.shape[1:])}.")
        return mahalanobis_distance((x / self.scale).flatten(1), self.mean, self.covariance)


def mahalanobis(inputs: Tensor, *, shrinkage: float | None = None) -> Mahalanobis:
    """Remember mean and covariance of the training inputs (n, ...), in units of each column's standard deviation.

    A column that does not vary counts with the variance that shrinkage gives it: a new value there is OOD.

    >>> mahalanobis(torch.tensor([[0.0], [2.0]])).score(torch.tensor([[4.0]]))
    tensor([3.])
    """
    if shrinkage is not None and not 0 <= shrinkage <= 1:
        raise ConfigError(f"Expected `shrinkage` from 0 to 1, or None for Ledoit and Wolf's, but got {shrinkage!r}.")
    if len(inputs) < 2:
        raise DataError(f"Expected at least two training rows, but got {len(inputs)}.")
    check_finite(inputs, None, "the training inputs")
    spread = inputs.double().std(0, correction=0)
    scale = torch.where(spread > 0, spread, 1.0).to(inputs)
    rows = (inputs / scale).flatten(1)
    covariance = shrunk_covariance(rows, shrinkage)
    if int(torch.linalg.cholesky_ex(covariance).info):
        raise DataError(
            "Expected training rows that vary in every direction, but their covariance is singular: raise `shrinkage`."
        )
    return Mahalanobis(rows.double().mean(0), covariance, scale)
