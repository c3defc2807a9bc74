"""Split conformal prediction, exact at small n: the radius that covers, and how unusual a score is.

If the calibration scores and a new one are exchangeable, the new one is at most `quantile(scores, level)` with
probability at least `level`, whatever their distribution, and `p_value` is at most α with probability at most α.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from offmap import checks
from offmap.errors import DataError, ShapeError


def rank(n: int, level: float) -> int:
    r"""Which of n sorted calibration scores is the conformal quantile, counted from one; n + 1 stands for infinity.

    .. math:: k = \lceil \mathrm{level} \cdot (n + 1) \rceil

    The level is read to twelve digits: in floating point 0.55 · 100 is 55.00000000000001, and must still give rank 55.

    >>> rank(99, 0.55), rank(19, 0.95), rank(18, 0.95)
    (55, 19, 19)
    """
    level = checks.fraction("level", level)
    if n < 1:
        raise DataError(f"Expected at least one calibration score, but got {n}; pass calibration data.")
    return math.ceil(level * (n + 1) * (1 - 1e-12))


def quantile(scores: Tensor, level: float) -> Tensor:
    r"""Conformal quantile of the calibration scores: the k-th smallest, k = `rank(n, level)`, infinite when k > n.

    .. math:: P(s_{n+1} \le q) = \frac{k}{n + 1} \ge \mathrm{level}

    (with equality when no two scores tie). Shapes: `scores` (n,) -> (), or (n, K) -> (K,), column by column.

    >>> quantile(torch.tensor([3.0, 1.0, 2.0, 4.0]), 0.6)
    tensor(3.)
    >>> quantile(torch.tensor([3.0, 1.0, 2.0, 4.0]), 0.9)
    tensor(inf)
    """
    scores = checks.tensor("scores", scores)
    if scores.ndim not in (1, 2):
        raise ShapeError(f"Expected `scores` of shape (n,) or (n, K), but got {tuple(scores.shape)}; flatten it first.")
    scores = _floating(scores)
    k = rank(scores.shape[0], level)
    _refuse_nan("scores", scores)
    if k > scores.shape[0]:
        return scores.new_full(scores.shape[1:], torch.inf)
    return scores.kthvalue(k, dim=0).values


def p_value(calibration: Tensor, scores: Tensor) -> Tensor:
    r"""Share of scores, the new one among them, that are at least as large as the new one: small means unusual.

    .. math:: p(s) = \frac{1 + \#\{i : c_i \ge s\}}{n + 1}

    Shapes: `calibration` (n,), `scores` (B,) or (B, ...) -> the shape of `scores`. Sorts once and looks each score up:
    O(n + B) memory.

    >>> p_value(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.0, 2.0, 9.0]))
    tensor([1.0000, 0.7500, 0.2500])
    """
    calibration, scores = checks.tensor("calibration", calibration), checks.tensor("scores", scores)
    if calibration.ndim != 1:
        raise ShapeError(f"Expected `calibration` of shape (n,), but got {tuple(calibration.shape)}; flatten it first.")
    n = calibration.numel()
    if n < 1:
        raise DataError("Expected at least one calibration score, but got 0; pass calibration data.")
    _refuse_nan("calibration", calibration)
    _refuse_nan("scores", scores)
    dtype = torch.promote_types(_floating(calibration).dtype, _floating(scores).dtype)
    ordered = calibration.to(dtype).sort().values
    below = torch.searchsorted(ordered, scores.to(dtype).contiguous())  # #{c < s}
    return (1 + n - below).to(torch.promote_types(dtype, torch.float32)) / (n + 1)


def _floating(values: Tensor) -> Tensor:
    return values if values.is_floating_point() else values.double()


def _refuse_nan(name: str, values: Tensor) -> None:
    count = int(values.isnan().sum())
    if count:
        raise DataError(
            f"Expected `{name}` without NaN, but got {count} of {values.numel()}; look for overflow in the network's outputs."
        )
