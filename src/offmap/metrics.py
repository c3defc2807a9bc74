"""Metrics over a data set, as pure functions of tensors, computed in float64.

Scores are higher the more OOD, and may be infinite; so may the bounds of intervals. ID is short for in-distribution.
"""

import math
from collections.abc import Container
from functools import reduce
from typing import Literal

import torch
from torch import Tensor

from offmap import checks
from offmap.errors import DataError, ShapeError


def auroc(id_scores: Tensor, ood_scores: Tensor) -> Tensor:
    """Compute the probability that a random OOD score exceeds a random ID score, ties counted half.

    Pairs are counted in integers, in O((n + m) log n), so that only the last division rounds.

    Args:
        id_scores: (n,) of in-distribution examples.
        ood_scores: (m,) of OOD examples.

    >>> auroc(torch.tensor([0.1, 0.2, 0.6]), torch.tensor([0.5, 0.9]))
    tensor(0.8333)
    """
    ids, oods = _vector("id_scores", id_scores), _vector("ood_scores", ood_scores)
    ordered = ids.sort().values
    below = torch.searchsorted(ordered, oods).sum()  # pairs with s_i < s_j
    up_to = torch.searchsorted(ordered, oods, right=True).sum()  # pairs with s_i <= s_j
    return _like((below + up_to).double() / (2 * ids.numel() * oods.numel()), id_scores, ood_scores)


def fpr_at(id_scores: Tensor, ood_scores: Tensor, rate: float = 0.95, *, positive: Literal["id", "ood"] = "id") -> Tensor:
    """Compute the false positive rate at the tightest threshold that keeps `rate` of the positive class.

    Both conventions are points of scikit-learn's `roc_curve`, where the true positive rate first reaches `rate`.

    Args:
        id_scores: (n,) of in-distribution examples.
        ood_scores: (m,) of OOD examples.
        rate: Share of the positive class to keep, above 0 and at most 1.
        positive: "id": the threshold t is the ⌈rate·n⌉-th *smallest* ID score, and the result the share of OOD scores ≤ t, those
            that go unnoticed. This is the paper's convention (its authors' code interpolates between two scores and counts
            strictly below). "ood": t is the ⌈rate·m⌉-th *largest* OOD score, and the result the share of ID scores ≥ t, the false
            alarms, as OpenOOD 1.5 reports it.

    >>> ids, oods = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([2.5, 3.0, 5.0])
    >>> fpr_at(ids, oods, 0.75), fpr_at(ids, oods, 0.75, positive="ood")
    (tensor(0.6667), tensor(0.5000))
    """
    rate = checks.number("rate", rate, above=0, at_most=1)
    ids, oods = _vector("id_scores", id_scores), _vector("ood_scores", ood_scores)
    checks.one_of("positive", positive, ("id", "ood"))
    positives, negatives = (ids, oods) if positive == "id" else (-oods, -ids)
    k = math.ceil(rate * positives.numel() * (1 - 1e-12))  # 0.55 · 100 is 55.00000000000001
    return _like((negatives <= positives.kthvalue(k).values).double().mean(), id_scores, ood_scores)


def aupr_in(id_scores: Tensor, ood_scores: Tensor) -> Tensor:
    """Compute the average precision with the ID examples as the positive class, ranked by −score; chance is n / (n + m).

    Σ_k (R_k − R_(k−1)) P_k over the distinct thresholds, as scikit-learn has it; OpenOOD interpolates by trapezoids instead.

    Args:
        id_scores: (n,) of in-distribution examples.
        ood_scores: (m,) of OOD examples.

    >>> aupr_in(torch.tensor([0.1, 0.2, 0.6]), torch.tensor([0.5, 0.9]))
    tensor(0.9167)
    """
    ids, oods = _vector("id_scores", id_scores), _vector("ood_scores", ood_scores)
    return _like(_average_precision(-ids, -oods), id_scores, ood_scores)


def aupr_out(id_scores: Tensor, ood_scores: Tensor) -> Tensor:
    """Compute the average precision with the OOD examples as the positive class, ranked by score; chance is m / (n + m).

    Args:
        id_scores: (n,) of in-distribution examples.
        ood_scores: (m,) of OOD examples.

    >>> aupr_out(torch.tensor([0.1, 0.2, 0.6]), torch.tensor([0.5, 0.9]))
    tensor(0.8333)
    """
    ids, oods = _vector("id_scores", id_scores), _vector("ood_scores", ood_scores)
    return _like(_average_precision(oods, ids), id_scores, ood_scores)


def _average_precision(positives: Tensor, negatives: Tensor) -> Tensor:
    """Average over the positives the precision at their own score: each is one step 1/n of the recall."""
    counts = [(v.numel() - torch.searchsorted(v.sort().values, positives)).double() for v in (positives, negatives)]
    return (counts[0] / (counts[0] + counts[1])).mean()


def risk_coverage(scores: Tensor, losses: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the share k/n of examples that are answered, those of lowest score (B,), and the mean of their losses (B,).

    Ties count with their mean loss, so that the curve does not depend on the order of the data.

    Args:
        scores: (B,), rows with the lowest are answered first.
        losses: (B,), such as squared errors, or 1 for a wrong class and else 0.

    >>> coverage, risk = risk_coverage(torch.tensor([0.3, 0.1, 0.2]), torch.tensor([1.0, 0.0, 0.0]))
    >>> risk
    tensor([0.0000, 0.0000, 0.3333])
    """
    s, loss = _align_vectors(("losses",), scores=scores, losses=losses)
    ordered, order = s.sort()
    _, group, sizes = torch.unique_consecutive(ordered, return_inverse=True, return_counts=True)
    tied = torch.zeros_like(sizes, dtype=loss.dtype).index_add(0, group, loss[order]) / sizes
    k = torch.arange(1, loss.numel() + 1, dtype=loss.dtype, device=loss.device)
    return _like(k / loss.numel(), scores, losses), _like(tied[group].cumsum(0) / k, scores, losses)


def aurc(scores: Tensor, losses: Tensor) -> Tensor:
    """Compute the area under the risk-coverage curve: the mean over all shares of rows answered of their mean loss.

    The lower it is, the better the score ranks errors. Scores that tell nothing give the mean loss of all rows. It is the mean
    of the risks of `risk_coverage`.

    Args:
        scores: (n,), rows with the lowest are answered first.
        losses: (n,), such as squared errors, or 1 for a wrong class and else 0.

    >>> aurc(torch.tensor([0.3, 0.1, 0.2]), torch.tensor([1.0, 0.0, 0.0]))
    tensor(0.1111)
    """
    _, risk = risk_coverage(*_align_vectors(("losses",), scores=scores, losses=losses))
    return _like(risk.mean(), scores, losses)


def rank_correlation(a: Tensor, b: Tensor) -> Tensor:
    """Compute Spearman's ρ of two vectors (B,); ties share the mean of their ranks. NaN where one is constant.

    Args:
        a: (B,).
        b: (B,).

    >>> rank_correlation(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([9.0, 7.0, 8.0]))
    tensor(-0.5000)
    """
    centred: list[Tensor] = []
    for values in _align_vectors((), a=a, b=b):
        _, group, sizes = torch.unique(values, return_inverse=True, return_counts=True)
        ranks = (sizes.cumsum(0).double() - (sizes.double() - 1) / 2)[group]  # from 1 on
        centred.append(ranks - ranks.mean())
    norm = centred[0].square().sum().sqrt() * centred[1].square().sum().sqrt()
    return _like((centred[0] @ centred[1] / norm).clamp(-1, 1), a, b)  # rounding must not lead beyond


def expected_calibration_error(probs: Tensor, labels: Tensor, bins: int = 15) -> Tensor:
    """Average the gap between confidence and accuracy over equally wide bins of probabilities (B, C) (Guo et al., 2017):
    Σ_b |B_b|/n · |acc(B_b) − conf(B_b)| with the confidences B_b in ((b − 1)/bins, b/bins].

    Args:
        probs: (B, C), class probabilities.
        labels: (B,), class numbers.
        bins: How many bins, of which empty ones do not count.

    >>> expected_calibration_error(torch.tensor([[0.9, 0.1], [0.9, 0.1]]), torch.tensor([0, 1]))
    tensor(0.4000)
    """
    confidence, accuracy, size = confidence_curve(probs, labels, bins).unbind(1)
    return _like(((accuracy - confidence).abs() * size).sum() / size.sum(), probs)


def confidence_curve(probs: Tensor, labels: Tensor, bins: int = 10) -> Tensor:
    """Compute mean confidence, accuracy and number of examples in the non-empty bins of `expected_calibration_error`: (k, 3).

    Args:
        probs: (B, C), class probabilities.
        labels: (B,), class numbers.
        bins: How many bins, empty ones among them.

    >>> confidence_curve(torch.tensor([[0.9, 0.1], [0.9, 0.1]]), torch.tensor([0, 1]))
    tensor([[0.9000, 0.5000, 2.0000]], dtype=torch.float64)
    """
    p, y = _check_classes(probs, labels)
    confidence, predicted = p.max(1)
    # an edge belongs to the bin below, also after float32 has made 0.60000002 of 0.6
    index = ((confidence * checks.integer("bins", bins, 1) - 1e-6).ceil() - 1).clamp(0, bins - 1).long()
    size = torch.bincount(index, minlength=bins).double()
    pair = (confidence, (predicted == y).double())
    means = [torch.bincount(index, weights=values, minlength=bins) / size for values in pair]
    return torch.stack([*means, size], 1)[size > 0]


def ence(mean: Tensor, std: Tensor, y: Tensor, bins: int = 10) -> Tensor:
    """Compute the expected normalised calibration error, the relative gap between stated and observed error size
    (Levi et al., 2022): mean_b |RMV_b − RMSE_b| / RMV_b with the root mean variance RMV_b of group b.

    Groups of (nearly) equal size hold the examples sorted by σ; equal σ stay in order.

    Args:
        mean: (B,), predicted means.
        std: (B,), predicted standard deviations, positive and finite.
        y: (B,), targets.
        bins: How many groups.

    >>> ence(torch.zeros(4), torch.tensor([1.0, 1.0, 2.0, 2.0]), torch.tensor([1.0, -1.0, 3.0, 3.0]), bins=2)
    tensor(0.2500)
    """
    error, scale = _check_gaussian(mean, std, y)
    if (scale == 0).any() or scale.isinf().any():
        raise DataError("Expected `std` to be positive and finite, since errors are divided by it; clamp it first.")
    order = scale.argsort(stable=True)
    groups = checks.integer("bins", bins, 1, scale.numel())
    pairs = zip(error[order].tensor_split(groups), scale[order].tensor_split(groups), strict=True)
    gaps = [(e.square().mean().sqrt() / s.square().mean().sqrt() - 1).abs() for e, s in pairs]
    return _like(torch.stack(gaps).mean(), mean, std, y)


def quantile_ece(mean: Tensor, std: Tensor, y: Tensor, levels: int = 10) -> Tensor:
    """Average the gap between nominal and empirical coverage of the central Gaussian intervals at evenly spaced levels:
    mean_k |ℓ_k − c_k| with ℓ_k = k/(L + 1), and c_k the share of |y_i − μ_i| ≤ z_((1 + ℓ_k)/2) σ_i; σ may be infinite.

    Args:
        mean: (B,), predicted means.
        std: (B,), predicted standard deviations.
        y: (B,), targets.
        levels: L, how many levels.

    >>> quantile_ece(torch.zeros(2), torch.ones(2), torch.tensor([0.1, 0.7]), levels=1)
    tensor(0.)
    """
    nominal, covered, _ = coverage_curve(mean, std, y, levels).unbind(1)
    return _like((nominal - covered).abs().mean(), mean, std, y)


def coverage_curve(mean: Tensor, std: Tensor, y: Tensor, levels: int = 19) -> Tensor:
    """Compute level k/(L + 1), empirical coverage of the central Gaussian interval at it, and number of examples: (L, 3).

    Args:
        mean: (B,), predicted means.
        std: (B,), predicted standard deviations.
        y: (B,), targets.
        levels: L, how many levels.

    >>> coverage_curve(torch.zeros(2), torch.ones(2), torch.tensor([0.1, 0.7]), levels=1)
    tensor([[0.5000, 0.5000, 2.0000]], dtype=torch.float64)
    """
    error, scale = _check_gaussian(mean, std, y)
    nominal = torch.arange(1, checks.integer("levels", levels, 1) + 1, dtype=error.dtype, device=error.device) / (levels + 1)
    radii = torch.special.ndtri((1 + nominal) / 2)  # in standard deviations
    covered = torch.stack([(error <= radius * scale).double().mean() for radius in radii])
    return torch.stack([nominal, covered, torch.full_like(covered, error.numel())], 1)


def coverage(lower: Tensor, upper: Tensor, y: Tensor) -> Tensor:
    """Compute the share of targets (B,) inside their closed interval; best when it equals the level of the intervals.

    Args:
        lower: (B,), lower ends.
        upper: (B,), upper ends.
        y: (B,), targets.

    >>> coverage(torch.zeros(4), torch.ones(4), torch.tensor([0.0, 0.5, 1.0, 1.5]))
    tensor(0.7500)
    """
    low, high, target = _check_intervals(lower=lower, upper=upper, y=y)
    return _like(((low <= target) & (target <= high)).double().mean(), lower, upper, y)


def mean_width(lower: Tensor, upper: Tensor) -> Tensor:
    """Compute the mean length of intervals (B,), in the unit of the targets; infinite as soon as one of them is.

    Args:
        lower: (B,), lower ends.
        upper: (B,), upper ends.

    >>> mean_width(torch.tensor([0.0, 1.0]), torch.tensor([1.0, 4.0]))
    tensor(2.)
    """
    low, high = _check_intervals(lower=lower, upper=upper)
    return _like((high - low).mean(), lower, upper)


def _vector(name: str, values: Tensor, *, finite: bool = False) -> Tensor:
    """Return `values` in float64; refuse all but 1-D, non-empty tensors without NaN (and, if asked, without infinities)."""
    values = checks.tensor(name, values)
    if values.ndim != 1:
        raise ShapeError(f"Expected `{name}` to be 1-D, but got shape {tuple(values.shape)}; pass `{name}.flatten()`.")
    if values.numel() == 0:
        raise DataError(f"Expected `{name}` to hold at least one value, but it is empty.")
    bad = ~values.isfinite() if finite else values.isnan()
    if bad.any():
        expected, got = ("finite", "are not") if finite else ("free of NaN", "are NaN")
        count = f"{int(bad.sum())} of {values.numel()} values {got}"
        raise DataError(f"Expected `{name}` to be {expected}, but {count}; drop or repair them first.")
    return values.double().contiguous()  # searchsorted copies strided tensors, and warns


def _align_vectors(finite: Container[str], **vectors: Tensor) -> list[Tensor]:
    """Return the vectors in float64; refuse those of different lengths, by name."""
    checked = [_vector(name, values, finite=name in finite) for name, values in vectors.items()]
    lengths = [len(values) for values in checked]
    if len(set(lengths)) > 1:
        names = ", ".join(f"`{name}`" for name in vectors)
        raise ShapeError(f"Expected {names} of one length, but got {lengths}; they must describe the same examples.")
    return checked


def _like(result: Tensor, *inputs: Tensor) -> Tensor:
    """Convert a float64 result to the common dtype of the inputs, at least float32."""
    return result.to(reduce(torch.promote_types, (values.dtype for values in inputs), torch.float32))


def _check_classes(probs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return probabilities in float64 and labels in int64; refuse what is not that."""
    probs, labels = checks.tensor("probs", probs), checks.tensor("labels", labels)
    if probs.ndim != 2 or labels.shape != probs.shape[:1]:
        shapes = f"{tuple(probs.shape)} and {tuple(labels.shape)}; move positions into the batch first"
        raise ShapeError(f"Expected `probs` of shape (B, C) and `labels` of shape (B,), but got {shapes}.")
    if probs.numel() == 0:
        raise DataError("Expected at least one example and one class, but `probs` is empty.")
    p = probs.double()
    # written so that NaN fails too
    if not bool(((p >= 0) & (p <= 1 + 1e-3)).all() and ((p.sum(1) - 1).abs() < 1e-2).all()):
        raise DataError("Expected the rows of `probs` to be non-negative and to sum to 1; apply softmax to logits.")
    if labels.is_floating_point() or labels.dtype == torch.bool:
        raise DataError(f"Expected `labels` to be integers, but got {labels.dtype}; pass `labels.long()`.")
    if labels.min() < 0 or labels.max() >= probs.shape[1]:
        got = f"values from {int(labels.min())} to {int(labels.max())}; drop ignored positions first"
        raise DataError(f"Expected `labels` from 0 to {probs.shape[1] - 1}, the classes of `probs`, but got {got}.")
    return p, labels.long()


def _check_gaussian(mean: Tensor, std: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return |y − mean| and the standard deviation, which may be infinite, in float64."""
    m, s, t = _align_vectors(("mean", "y"), mean=mean, std=std, y=y)
    if (s < 0).any():
        raise DataError(f"Expected `std` to be at least 0, but its minimum is {s.min():g}; is it a logarithm?")
    return (t - m).abs(), s


def _check_intervals(**vectors: Tensor) -> list[Tensor]:
    """Return lower and upper bounds, and targets if there are any, in float64; refuse empty intervals."""
    checked = low, high, *_ = _align_vectors(("y",), **vectors)
    empty = (low > high) | (low == torch.inf) | (high == -torch.inf)
    if empty.any():
        count = f"{int(empty.sum())} of {low.numel()} intervals are not so"
        raise DataError(f"Expected `lower` to be at most `upper`, with real numbers between them, but {count}; swap the bounds.")
    return checked
