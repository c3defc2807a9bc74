"""How far an example is from familiar ones, relative to how far those are from each other. Pure functions of tensors.

The distance to the nearest rows means little by itself: where data are sparse, familiar rows are far from each other too. So it
is divided by what the nearest rows see themselves (as local outlier factors do):

    ratio(x) = mean_k |x − x_i(x)| / (mean over those x_i of their own mean_k distance + a tenth of the average one)
"""

from __future__ import annotations

import torch
from torch import Tensor

NEIGHBOURS = 10
"""k."""

SHARE = 0.1
"""Of the average spacing, added to the local one: copies of one row are at no distance at all."""


def nearest(rows: Tensor, x: Tensor, *, itself: Tensor | None = None, k: int = NEIGHBOURS) -> tuple[Tensor, Tensor]:
    """Distances (B, k) to the k nearest of `rows` (N, D), and their numbers; x_b is not compared with row `itself[b]`.

    >>> nearest(torch.tensor([[0.0], [3.0], [10.0]]), torch.tensor([[2.0]]), k=2)[1]
    tensor([[1, 0]])
    """
    apart = _squares(x.double(), rows.double())
    if itself is not None:
        apart.scatter_(1, itself[:, None].to(apart.device), torch.inf)
    squares, numbers = apart.topk(min(k, rows.shape[0] - (itself is not None)), dim=1, largest=False)
    return squares.clamp_min(0).sqrt(), numbers


def relative(distances: Tensor, numbers: Tensor, spacings: Tensor) -> Tensor:
    """Log ratio(x), (B,), from the distances to the nearest rows, their numbers, and all rows' own spacings.

    >>> own = torch.tensor([1.0, 1.0, 2.0])
    >>> relative(torch.tensor([[5.0]]), torch.tensor([[2]]), own).exp()
    tensor([2.3438])
    """
    floor = SHARE * spacings.mean()
    tiny = torch.finfo(spacings.dtype).tiny ** 0.5
    return ((distances.mean(1) + SHARE * floor) / (spacings[numbers].mean(1) + floor).clamp_min(tiny)).clamp_min(tiny).log()


def _squares(x: Tensor, rows: Tensor) -> Tensor:
    """|x − row|², (B, N), as one matrix product around the rows' mean, so that little cancels."""
    middle = rows.mean(0)
    x, rows = x - middle, rows - middle
    return x.square().sum(1)[:, None] + rows.square().sum(1) - 2 * x @ rows.mT
