"""Whether confidence matches outcomes: of class probabilities, Gaussian predictions and intervals (bounds may be infinite)."""

import torch
from torch import Tensor

from offmap import checks
from offmap.errors import DataError, ShapeError
from offmap.metrics._checks import like, same_length, vector


def expected_calibration_error(probs: Tensor, labels: Tensor, bins: int = 15) -> Tensor:
    """Gap between confidence and accuracy of the predicted class, averaged over equally wide bins (Guo et al., 2017):
    Σ_b |B_b|/n · |acc(B_b) − conf(B_b)| with the confidences B_b in ((b − 1)/bins, b/bins].

    Args:
        probs: (B, C), rows sum to 1.
        labels: (B,) integers.
        bins: Number of bins of the confidence.

    >>> expected_calibration_error(torch.tensor([[0.9, 0.1], [0.9, 0.1]]), torch.tensor([0, 1]))
    tensor(0.4000)
    """
    index, confidence, correct = _bin_confidence(probs, labels, bins)
    surplus = torch.bincount(index, weights=correct - confidence, minlength=bins)
    return like(surplus.abs().sum() / len(index), probs)


def confidence_curve(probs: Tensor, labels: Tensor, bins: int = 10) -> Tensor:
    """Mean confidence, accuracy and number of examples in the bins of `expected_calibration_error` that are not empty: (k, 3).

    Args:
        probs: (B, C), rows sum to 1.
        labels: (B,) integers.
        bins: Number of bins of the confidence.

    >>> confidence_curve(torch.tensor([[0.9, 0.1], [0.9, 0.1]]), torch.tensor([0, 1]))
    tensor([[0.9000, 0.5000, 2.0000]], dtype=torch.float64)
    """
    index, confidence, correct = _bin_confidence(probs, labels, bins)
    size = torch.bincount(index, minlength=bins).double()
    means = [torch.bincount(index, weights=values, minlength=bins) / size for values in (confidence, correct)]
    return torch.stack([*means, size], 1)[size > 0]


def brier(probs: Tensor, labels: Tensor) -> Tensor:
    """Squared distance between probabilities and one-hot truth, mean_i Σ_c (p_ic − 1[y_i = c])²: from 0 to 2.

    Brier's own sum; the binary score in [0, 1] is half of it.

    Args:
        probs: (B, C), rows sum to 1.
        labels: (B,) integers.

    >>> brier(torch.tensor([[0.9, 0.1], [0.6, 0.4]]), torch.tensor([0, 1]))
    tensor(0.3700)
    """
    p, y = check_classes(probs, labels)
    return like((p - torch.nn.functional.one_hot(y, p.shape[1]).double()).square().sum(1).mean(), probs)


def ence(mean: Tensor, std: Tensor, y: Tensor, bins: int = 10) -> Tensor:
    """Expected normalised calibration error: relative gap between stated and observed error size (Levi et al., 2022),
    mean_b |RMV_b − RMSE_b| / RMV_b with the root mean variance RMV_b of group b.

    Args:
        mean: (B,).
        std: (B,), positive and finite.
        y: (B,).
        bins: Number N of groups of (nearly) equal size of the examples sorted by σ; equal σ stay in order.

    >>> ence(torch.zeros(4), torch.tensor([1.0, 1.0, 2.0, 2.0]), torch.tensor([1.0, -1.0, 3.0, 3.0]), bins=2)
    tensor(0.2500)
    """
    error, scale = check_gaussian(mean, std, y)
    if (scale == 0).any() or scale.isinf().any():
        raise DataError("Expected `std` to be positive and finite, since errors are divided by it; clamp it first.")
    order = scale.argsort(stable=True)
    groups = checks.integer("bins", bins, 1, scale.numel())
    gaps = [
        (errors.square().mean().sqrt() / stated.square().mean().sqrt() - 1).abs()
        for errors, stated in zip(error[order].tensor_split(groups), scale[order].tensor_split(groups), strict=True)
    ]
    return like(torch.stack(gaps).mean(), mean, std, y)


def quantile_ece(mean: Tensor, std: Tensor, y: Tensor, levels: int = 10) -> Tensor:
    """Mean gap between nominal and empirical coverage of the central Gaussian intervals at evenly spaced levels:
    mean_k |ℓ_k − c_k| with ℓ_k = k/(L + 1), and c_k the share of |y_i − μ_i| ≤ z_((1 + ℓ_k)/2) σ_i.

    Args:
        mean: (B,).
        std: (B,), may be infinite.
        y: (B,).
        levels: Number L of levels.

    >>> quantile_ece(torch.zeros(2), torch.ones(2), torch.tensor([0.1, 0.7]), levels=1)
    tensor(0.)
    """
    error, scale = check_gaussian(mean, std, y)
    nominal, radii = _central_radii(error, levels)
    return like((nominal - (error <= radii[:, None] * scale).double().mean(1)).abs().mean(), mean, std, y)


def coverage_curve(mean: Tensor, std: Tensor, y: Tensor, levels: int = 19) -> Tensor:
    """Level, empirical coverage of the central Gaussian interval at that level, and number of examples: (L, 3).

    Args:
        mean: (B,).
        std: (B,), may be infinite.
        y: (B,).
        levels: Number L of levels k / (L + 1).

    >>> coverage_curve(torch.zeros(2), torch.ones(2), torch.tensor([0.1, 0.7]), levels=1)
    tensor([[0.5000, 0.5000, 2.0000]], dtype=torch.float64)
    """
    error, scale = check_gaussian(mean, std, y)
    nominal, radii = _central_radii(error, levels)
    covered = torch.stack([(error <= radius * scale).double().mean() for radius in radii])
    return torch.stack([nominal, covered, torch.full_like(covered, error.numel())], 1)


def coverage(lower: Tensor, upper: Tensor, y: Tensor) -> Tensor:
    """Share of targets inside their closed interval; best when it equals the level of the intervals.

    Args:
        lower: (B,).
        upper: (B,).
        y: (B,).

    >>> coverage(torch.zeros(4), torch.ones(4), torch.tensor([0.0, 0.5, 1.0, 1.5]))
    tensor(0.7500)
    """
    low, high, target = _check_intervals(lower, upper, y)
    return like(((low <= target) & (target <= high)).double().mean(), lower, upper, y)


def mean_width(lower: Tensor, upper: Tensor) -> Tensor:
    """Mean length of the intervals, in the unit of the targets; infinite as soon as one of them is.

    Args:
        lower: (B,).
        upper: (B,).

    >>> mean_width(torch.tensor([0.0, 1.0]), torch.tensor([1.0, 4.0]))
    tensor(2.)
    """
    low, high = _check_bounds(lower, upper)
    return like((high - low).mean(), lower, upper)


def interval_score(lower: Tensor, upper: Tensor, y: Tensor, level: float = 0.95) -> Tensor:
    """Width plus a penalty for every miss, smallest for the true quantiles (Gneiting & Raftery, 2007):
    mean_i (u_i − l_i) + 2/α (l_i − y_i)₊ + 2/α (y_i − u_i)₊ with α = 1 − level.

    Args:
        lower: (B,).
        upper: (B,).
        y: (B,).
        level: Level of the intervals.

    >>> interval_score(torch.zeros(2), torch.ones(2), torch.tensor([0.5, 1.5]), level=0.5)
    tensor(2.)
    """
    alpha = 1 - checks.fraction("level", level)
    low, high, target = _check_intervals(lower, upper, y)
    miss = (low - target).clamp_min(0) + (target - high).clamp_min(0)
    return like((high - low + 2 / alpha * miss).mean(), lower, upper, y)


def check_gaussian(mean: Tensor, std: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return |y − mean| and the standard deviation, which may be infinite, in float64."""
    m, s, t = vector("mean", mean, finite=True), vector("std", std), vector("y", y, finite=True)
    same_length(mean=m, std=s, y=t)
    if (s < 0).any():
        raise DataError(f"Expected `std` to be at least 0, but its minimum is {s.min():g}; is it a logarithm?")
    return (t - m).abs(), s


def check_classes(probs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return probabilities in float64 and labels in int64; refuse what is not that."""
    probs, labels = checks.tensor("probs", probs), checks.tensor("labels", labels)
    if probs.ndim != 2 or labels.shape != probs.shape[:1]:
        raise ShapeError(
            f"Expected `probs` of shape (B, C) and `labels` of shape (B,), but got {tuple(probs.shape)} and "
            f"{tuple(labels.shape)}; move positions into the batch first."
        )
    if probs.numel() == 0:
        raise DataError("Expected at least one example and one class, but `probs` is empty.")
    p = probs.double()
    # written so that NaN fails too
    if not bool(((p >= 0) & (p <= 1 + 1e-3)).all() and ((p.sum(1) - 1).abs() < 1e-2).all()):
        raise DataError("Expected the rows of `probs` to be non-negative and to sum to 1; apply softmax to logits.")
    if labels.is_floating_point() or labels.dtype == torch.bool:
        raise DataError(f"Expected `labels` to be integers, but got {labels.dtype}; pass `labels.long()`.")
    if labels.min() < 0 or labels.max() >= probs.shape[1]:
        raise DataError(
            f"Expected `labels` from 0 to {probs.shape[1] - 1}, the classes of `probs`, but got values from "
            f"{int(labels.min())} to {int(labels.max())}; drop ignored positions first."
        )
    return p, labels.long()


def _bin_confidence(probs: Tensor, labels: Tensor, bins: int) -> tuple[Tensor, Tensor, Tensor]:
    """Bin, confidence and correctness (0 or 1) of every prediction: (B,) each."""
    p, y = check_classes(probs, labels)
    confidence, predicted = p.max(1)
    # an edge belongs to the bin below, also after float32 has made 0.60000002 of 0.6
    index = ((confidence * checks.integer("bins", bins, 1) - 1e-6).ceil() - 1).clamp(0, bins - 1).long()
    return index, confidence, (predicted == y).double()


def _central_radii(like: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    """Evenly spaced levels and the radii, in standard deviations, of the central intervals of a Gaussian: (L,) each."""
    nominal = torch.arange(1, checks.integer("levels", levels, 1) + 1, dtype=like.dtype, device=like.device) / (levels + 1)
    return nominal, torch.special.ndtri((1 + nominal) / 2)


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


def _check_intervals(lower: Tensor, upper: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    low, high = _check_bounds(lower, upper)
    target = vector("y", y, finite=True)
    same_length(lower=low, upper=high, y=target)
    return low, high, target
