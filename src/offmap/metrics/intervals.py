"""Whether intervals hold the truth, and how wide they must be for it. Bounds may be infinite."""

from __future__ import annotations

import torch
from torch import Tensor

from offmap.errors import DataError
from offmap.metrics._checks import like, same_length, share, vector


def coverage(lower: Tensor, upper: Tensor, y: Tensor) -> Tensor:
    r"""Share of targets inside their closed interval; best when it equals the level that was asked for.

    .. math:: \frac1n \#\{i : l_i \le y_i \le u_i\}

    Shapes: `lower`, `upper`, `y` (B,) -> ().

    >>> coverage(torch.zeros(4), torch.ones(4), torch.tensor([0.0, 0.5, 1.0, 1.5]))
    tensor(0.7500)
    """
    low, high = _check_bounds(lower, upper)
    target = vector("y", y, finite=True)
    same_length(lower=low, upper=high, y=target)
    inside = (low <= target) & (target <= high)
    return like(inside.double().mean(), lower, upper, y)


def mean_width(lower: Tensor, upper: Tensor) -> Tensor:
    r"""Mean length of the intervals, in the unit of the targets; infinite as soon as one of them is.

    .. math:: \frac1n \sum_i u_i - l_i

    Shapes: `lower`, `upper` (B,) -> ().

    >>> mean_width(torch.tensor([0.0, 1.0]), torch.tensor([1.0, 4.0]))
    tensor(2.)
    """
    low, high = _check_bounds(lower, upper)
    return like((high - low).mean(), lower, upper)


def interval_score(lower: Tensor, upper: Tensor, y: Tensor, level: float = 0.95) -> Tensor:
    r"""Width plus a fine for every miss, smallest for the true quantiles (Gneiting & Raftery, 2007).

    .. math:: \frac1n \sum_i (u_i - l_i) + \frac2\alpha (l_i - y_i)_+ + \frac2\alpha (y_i - u_i)_+,
              \qquad \alpha = 1 - \mathrm{level}

    Shapes: `lower`, `upper`, `y` (B,) -> ().

    >>> interval_score(torch.zeros(2), torch.ones(2), torch.tensor([0.5, 1.5]), level=0.5)
    tensor(2.)
    """
    alpha = 1 - share("level", level)
    low, high = _check_bounds(lower, upper)
    target = vector("y", y, finite=True)
    same_length(lower=low, upper=high, y=target)
    miss = (low - target).clamp_min(0) + (target - high).clamp_min(0)
    return like((high - low + 2 / alpha * miss).mean(), lower, upper, y)


def _check_bounds(lower: Tensor, upper: Tensor) -> tuple[Tensor, Tensor]:
    low, high = vector("lower", lower), vector("upper", upper)
    same_length(lower=low, upper=high)
    empty = (low > high) | (low == torch.inf) | (high == -torch.inf)
    if empty.any():
        raise DataError(
            f"Expected `lower` to be at most `upper`, with real numbers between them, but {int(empty.sum())} of "
            f"{low.numel()} intervals are not so; swap the bounds."
        )
    return low, high
