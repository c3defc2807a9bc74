"""Split conformal prediction, exact at small n: the radius that covers.

If the calibration scores and a new one are exchangeable, the new one is at most `quantile(scores, level)` with probability at
least `level`, whatever their distribution.
"""

import math

import torch
from torch import Tensor

from offmap import checks
from offmap.errors import DataError, ShapeError


def rank(n: int, level: float) -> int:
    """Return k = ⌈level · (n + 1)⌉: which of n sorted scores is the conformal quantile, from one; n + 1 stands for infinity.

    The level is read to twelve digits: 0.55 · 100 is 55.00000000000001, and must still give rank 55.

    >>> rank(99, 0.55), rank(19, 0.95), rank(18, 0.95)
    (55, 19, 19)
    """
    level = checks.fraction("level", level)
    if n < 1:
        raise DataError(f"Expected at least one calibration score, but got {n}; pass calibration data.")
    return math.ceil(level * (n + 1) * (1 - 1e-12))


def quantile(scores: Tensor, level: float) -> Tensor:
    """Return the k-th smallest calibration score q, k = `rank(n, level)`; infinity when k > n. (n,) -> (), or (n, K) -> (K,).

    P(s ≤ q) = k/(n + 1) ≥ level for a new score s, if no two scores tie.

    >>> scores = torch.tensor([3.0, 1.0, 2.0, 4.0])
    >>> quantile(scores, 0.6), quantile(scores, 0.9)
    (tensor(3.), tensor(inf))
    """
    scores = checks.tensor("scores", scores)
    scores = scores if scores.is_floating_point() else scores.double()
    if count := int(scores.isnan().sum()):
        got = f"{count} of {scores.numel()}; look for overflow in the network's outputs"
        raise DataError(f"Expected `scores` without NaN, but got {got}.")
    if scores.ndim not in (1, 2):
        raise ShapeError(f"Expected `scores` of shape (n,) or (n, K), but got {tuple(scores.shape)}; flatten it first.")
    k = rank(scores.shape[0], level)
    return scores.kthvalue(k, dim=0).values if k <= scores.shape[0] else scores.new_full(scores.shape[1:], torch.inf)
