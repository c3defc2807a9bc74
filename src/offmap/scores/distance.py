"""How far an example is from in-distribution ones, relative to how far those are from each other. Pure functions of tensors.

The distance to the nearest rows means little by itself: where data are sparse, in-distribution rows are far from each other too. So it
is divided by what the nearest rows see themselves (as local outlier factors do). With s_i the mean distance of row i to its own
k nearest, and a tenth of their average as a floor, f = 0.1 mean_i s_i:

    ratio(x) = (mean_k |x − x_i(x)| + f/10) / (mean over those x_i of s_i + f)
"""

from __future__ import annotations

import torch
from torch import Tensor

NEIGHBOURS = 10
"""k."""

SHARE = 0.1
"""Of the average spacing, added to the local one: copies of one row are at no distance at all."""

HELD = 1 << 21
"""Numbers held at once (8 MB), whatever the number of examples."""


def nearest(rows: Tensor, x: Tensor, *, itself: Tensor | None = None, k: int = NEIGHBOURS) -> tuple[Tensor, Tensor]:
    """Distances (B, k) to the k nearest of `rows` (N, D), in float64, and their numbers.

    x_b is not compared with row `itself[b]`. Of N rows at most N − 1 are taken: as many as a row itself can see. A matrix
    product in float32 finds them, around the rows' mean so that little cancels; their distances are then exact, for a
    difference of two numbers is rounded by its own size, not by theirs.

    >>> nearest(torch.tensor([[0.0], [3.0], [10.0]]), torch.tensor([[2.0]]), k=2)[1]
    tensor([[1, 0]])
    """
    middle, k = rows.double().mean(0), min(k, len(rows) - 1)
    near = (rows.double() - middle).float()
    sizes = near.square().sum(1)
    distances, numbers = x.new_empty((len(x), k), dtype=torch.float64), x.new_empty((len(x), k), dtype=torch.long)
    step = max(1, HELD // max(len(rows), k * rows.shape[1]))
    for block in (slice(start, start + step) for start in range(0, len(x), step)):
        apart = torch.addmm(sizes, (x[block].double() - middle).float(), near.mT, alpha=-2)  # |x − row|² − |x|²
        if itself is not None:
            apart.scatter_(1, itself[block, None].to(apart.device), torch.inf)
        numbers[block] = found = apart.topk(k, dim=1, largest=False).indices
        apart = rows[found] - x[block].unsqueeze(1)
        distances[block] = torch.linalg.vector_norm(apart, dim=2, dtype=torch.float64)
    return distances, numbers


def relative(distances: Tensor, numbers: Tensor, spacings: Tensor) -> Tensor:
    """Log ratio(x), (B,), from the distances to the nearest rows, their numbers, and all rows' own spacings; NaN becomes ∞.

    >>> own = torch.tensor([1.0, 1.0, 2.0])
    >>> relative(torch.tensor([[5.0]]), torch.tensor([[2]]), own).exp()
    tensor([2.3500])
    """
    eps = SHARE * spacings.mean()
    tiny = torch.finfo(spacings.dtype).tiny ** 0.5
    ratio = (distances.mean(1) + SHARE * eps) / (spacings[numbers].mean(1) + eps).clamp_min(tiny)
    return ratio.clamp_min(tiny).log().nan_to_num(nan=torch.inf, posinf=torch.inf)
