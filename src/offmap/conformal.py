"""Split conformal prediction, exact at small n: the radius that covers; over rows, or over whole groups of rows.

If the calibration scores and a new one are exchangeable, the new one is at most `quantile(scores, level)` with probability at
least `level`, whatever their distribution. Rows of a series are not exchangeable, but its runs, days or sites may be: with
`group_weights`, a new group has on average at least the share `level` of its rows below the quantile (hierarchical conformal
prediction: Dunn, Wasserman & Ramdas 2023; Lee, Barber & Willett 2023), however the rows of a group depend on each other.
"""

import math
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from offmap import checks
from offmap.errors import ConfigError, DataError, ShapeError


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


def quantile(scores: Tensor, level: float, weights: Tensor | None = None) -> Tensor:
    """Return the k-th smallest calibration score q, k = `rank(n, level)`; infinity when k > n. (n,) -> (), or (n, K) -> (K,).

    P(s ≤ q) = k/(n + 1) ≥ level for a new score s, if no two scores tie. With weights, q is the smallest score at or below which
    weights sum to `level`; what they lack of 1 is at infinity.

    >>> scores = torch.tensor([3.0, 1.0, 2.0, 4.0])
    >>> quantile(scores, 0.6), quantile(scores, 0.9)
    (tensor(3.), tensor(inf))
    >>> quantile(scores, 0.6, group_weights([0, 1, 1, 1]))
    tensor(4.)
    """
    scores = checks.tensor("scores", scores)
    scores = scores if scores.is_floating_point() else scores.double()
    if count := int(scores.isnan().sum()):
        got = f"{count} of {scores.numel()}; look for overflow in the network's outputs"
        raise DataError(f"Expected `scores` without NaN, but got {got}.")
    if scores.ndim not in (1, 2):
        raise ShapeError(f"Expected `scores` of shape (n,) or (n, K), but got {tuple(scores.shape)}; flatten it first.")
    k = rank(scores.shape[0], level)
    if weights is None:
        return scores.kthvalue(k, dim=0).values if k <= scores.shape[0] else scores.new_full(scores.shape[1:], torch.inf)
    weights = checks.tensor("weights", weights).double()
    if weights.shape != scores.shape[:1] or not bool((weights >= 0).all()):
        raise ShapeError(f"Expected `weights` of shape ({len(scores)},), none negative, but got {tuple(weights.shape)}.")
    ordered, order = scores.sort(dim=0)
    below = (weights[order.cpu()].cumsum(0) < level - 1e-9).sum(0, keepdim=True)  # a sum of n weights is rounded
    return torch.cat([ordered, torch.full_like(ordered[:1], torch.inf)]).gather(0, below.to(order.device)).squeeze(0)


def group_weights(groups: Any) -> Tensor:
    """Return the weight 1/((K + 1)·N_k) of every row of group k, in double precision on the CPU: one label per row -> (n,).

    >>> group_weights(["a", "b", "b"])
    tensor([0.3333, 0.1667, 0.1667], dtype=torch.float64)
    """
    labels, codes = check_labels(groups), dict[Any, int]()
    index = torch.tensor([codes.setdefault(label, len(codes)) for label in labels], dtype=torch.long, device="cpu")
    return 1 / ((len(codes) + 1) * index.bincount()[index].double())


def check_labels(groups: Any) -> list[Any]:
    """Return the label of every row as a plain value; a missing one is refused.

    >>> check_labels(torch.tensor([3, 4]))
    [3, 4]
    """
    labels = groups.tolist() if hasattr(groups, "tolist") else list(groups)
    if any(isinstance(label, list) for label in labels):
        raise ShapeError("Expected `groups` of shape (n,), one label for each row, but got more axes.")
    if any(label is None or type(label).__name__ == "NAType" or label != label for label in labels):  # also pandas' NaT
        raise DataError("Expected a label for each row in `groups`, but some are missing; drop these rows or name their group.")
    odd = next((label for label in labels if not isinstance(label, Hashable)), None)
    if odd is not None:
        raise DataError(f"Expected words or numbers as labels in `groups`, but got {type(odd).__name__}.")
    return labels


def count_groups(weights: Tensor) -> int:
    """Return K of `group_weights`, which sum to K/(K + 1).

    >>> count_groups(group_weights([0, 1, 1]))
    2
    """
    total = float(weights.sum())
    return round(total / (1 - total))


def consecutive_blocks(n: int, block: int) -> Tensor:
    """Return labels of n rows in blocks of `block` consecutive rows; the last block takes what is left over.

    >>> consecutive_blocks(7, 3)
    tensor([0, 0, 0, 1, 1, 1, 1])
    """
    block = checks.integer("block", block, at_least=1)
    if block > n:
        raise ConfigError(f"Expected `block` to be at most {n}, the number of rows, but got {block}.")
    return (torch.arange(n, device="cpu") // block).clamp(max=n // block - 1)


def effective_rows(scores: Tensor, targets: Tensor | None = None) -> int | None:
    """Return how many independent rows these are worth, if stretches of them plainly differ in level; None if they do not.

    The Kruskal-Wallis statistic H of up to 20 stretches of consecutive rows has mean (stretches − 1) in random order, and so
    many times more as stretches vary more. It counts if p < 0.001 and stretches explain 2 % of the variance of the ranks, which
    moves a rate of 5 % by about 1.5 points from stretch to stretch. Ranks are taken among rows of one class, so that rows
    sorted by class are no series.

    Args:
        scores: (n,), in the order of the rows.
        targets: (n,) classes, if these are integers.

    >>> effective_rows(torch.arange(200.0)), effective_rows(torch.arange(200.0) % 7)
    (19, None)
    """
    n = len(scores)
    stretches = min(20, n // 8)
    if stretches < 4:
        return None
    scores, centred = scores.detach().cpu(), torch.empty(n, dtype=torch.float64, device="cpu")
    classes = torch.zeros(n, dtype=torch.long, device="cpu")
    if targets is not None and targets.ndim == 1 and not targets.is_floating_point():
        classes = targets.cpu()
    for label in classes.unique():
        rows = classes == label
        _, tied, sizes = scores[rows].unique(return_inverse=True, return_counts=True)
        centred[rows] = ((sizes.cumsum(0) - sizes / 2) / len(tied) - 0.5).double()[tied]  # ranks, from -1/2 to 1/2
    stretch = torch.arange(n, device="cpu") * stretches // n
    counts = stretch.bincount()
    between = (torch.zeros(stretches, dtype=torch.float64, device="cpu").index_add(0, stretch, centred).square() / counts).sum()
    share = float(between / centred.square().sum().clamp_min(1e-300))
    ratio, spread = share * (n - 1) / (stretches - 1), 2 / (9 * (stretches - 1))
    z = (ratio ** (1 / 3) - (1 - spread)) / math.sqrt(spread)  # Wilson & Hilferty: a chi-square variable as a normal one
    return max(1, round(n / ratio)) if z > 3.09 and share > 0.02 else None
