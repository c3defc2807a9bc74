"""Split conformal prediction, exact at small n: the radius that covers, and how unusual a score is.

If the calibration scores and a new one are exchangeable, the new one is at most `quantile(scores, level)` with probability at
least `level`, whatever their distribution, and `p_value` is at most α with probability at most α.
"""

import math

import torch
from torch import Tensor

from offmap import checks
from offmap.errors import DataError, ShapeError


def rank(n: int, level: float) -> int:
    r"""Return which of n sorted calibration scores is the conformal quantile, counted from one; n + 1 stands for infinity.

    .. math:: k = \lceil \mathrm{level} \cdot (n + 1) \rceil

    Args:
        n: Number of calibration scores.
        level: Between 0 and 1, read to twelve digits: 0.55 · 100 is 55.00000000000001, and must still give rank 55.

    >>> rank(99, 0.55), rank(19, 0.95), rank(18, 0.95)
    (55, 19, 19)
    """
    level = checks.fraction("level", level)
    if n < 1:
        raise DataError(f"Expected at least one calibration score, but got {n}; pass calibration data.")
    return math.ceil(level * (n + 1) * (1 - 1e-12))


def quantile(scores: Tensor, level: float) -> Tensor:
    r"""Return the k-th smallest calibration score, k = `rank(n, level)`; infinity when k > n.

    .. math:: P(s_{n+1} \le q) = \frac{k}{n + 1} \ge \mathrm{level}

    with equality when no two scores tie.

    Args:
        scores: (n,) -> (), or (n, K) -> (K,), column by column.
        level: Share of new scores that the quantile covers.

    >>> scores = torch.tensor([3.0, 1.0, 2.0, 4.0])
    >>> quantile(scores, 0.6), quantile(scores, 0.9)
    (tensor(3.), tensor(inf))
    """
    scores = _check_scores("scores", scores)
    if scores.ndim not in (1, 2):
        raise ShapeError(f"Expected `scores` of shape (n,) or (n, K), but got {tuple(scores.shape)}; flatten it first.")
    k = rank(scores.shape[0], level)
    return scores.kthvalue(k, dim=0).values if k <= scores.shape[0] else scores.new_full(scores.shape[1:], torch.inf)


def p_value(calibration: Tensor, scores: Tensor) -> Tensor:
    r"""Return the share of scores, the new one among them, that are at least as large as the new one: small means unusual.

    .. math:: p(s) = \frac{1 + \#\{i : c_i \ge s\}}{n + 1}

    Args:
        calibration: (n,), sorted once: O(n + B) memory.
        scores: (B,) or (B, ...), the shape of the result.

    >>> p_value(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.0, 2.0, 9.0]))
    tensor([1.0000, 0.7500, 0.2500])
    """
    calibration, scores = _check_scores("calibration", calibration), _check_scores("scores", scores)
    n = calibration.numel()
    if calibration.ndim != 1:
        raise ShapeError(f"Expected `calibration` of shape (n,), but got {tuple(calibration.shape)}; flatten it first.")
    if n < 1:
        raise DataError("Expected at least one calibration score, but got 0; pass calibration data.")
    dtype = torch.promote_types(calibration.dtype, scores.dtype)
    below = torch.searchsorted(calibration.to(dtype).sort().values, scores.to(dtype).contiguous())  # #{c < s}
    return (1 + n - below).to(torch.promote_types(dtype, torch.float32)) / (n + 1)


def _check_scores(name: str, scores: Tensor) -> Tensor:
    """Return floating-point scores; refuse NaN."""
    scores = checks.tensor(name, scores)
    if count := int(scores.isnan().sum()):
        raise DataError(
            f"Expected `{name}` without NaN, but got {count} of {scores.numel()}; look for overflow in the network's outputs."
        )
    return scores if scores.is_floating_point() else scores.double()
