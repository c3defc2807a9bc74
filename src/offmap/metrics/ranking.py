"""Metrics of an order: how well scores separate in-distribution (ID) from OOD examples, what refusing uncertain ones gains,
how methods rank over tasks. Scores are higher the more OOD; infinities are allowed.
"""

import math
from typing import Literal

import torch
from torch import Tensor

from offmap import checks
from offmap.errors import DataError, ShapeError
from offmap.metrics._checks import like, same_length, vector


def auroc(id_scores: Tensor, ood_scores: Tensor) -> Tensor:
    """Probability that a random OOD score exceeds a random ID score, ties counted half.

    Pairs are counted in integers, in O((n + m) log n), so that only the last division rounds.

    Args:
        id_scores: (n,) of in-distribution examples.
        ood_scores: (m,) of OOD examples.

    >>> auroc(torch.tensor([0.1, 0.2, 0.6]), torch.tensor([0.5, 0.9]))
    tensor(0.8333)
    """
    ids, oods = vector("id_scores", id_scores), vector("ood_scores", ood_scores)
    ordered = ids.sort().values
    below = torch.searchsorted(ordered, oods).sum()  # pairs with s_i < s_j
    up_to = torch.searchsorted(ordered, oods, right=True).sum()  # pairs with s_i <= s_j
    return like((below + up_to).double() / (2 * ids.numel() * oods.numel()), id_scores, ood_scores)


def fpr_at(id_scores: Tensor, ood_scores: Tensor, rate: float = 0.95, *, positive: Literal["id", "ood"] = "id") -> Tensor:
    """False positive rate at the tightest threshold that keeps `rate` of the positive class.

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
    ids, oods = vector("id_scores", id_scores), vector("ood_scores", ood_scores)
    checks.one_of("positive", positive, ("id", "ood"))
    positives, negatives = (ids, oods) if positive == "id" else (-oods, -ids)
    k = math.ceil(rate * positives.numel() * (1 - 1e-12))  # 0.55 · 100 is 55.00000000000001
    return like((negatives <= positives.kthvalue(k).values).double().mean(), id_scores, ood_scores)


def aupr_in(id_scores: Tensor, ood_scores: Tensor) -> Tensor:
    """Average precision with the ID examples as the positive class, ranked by −score; chance is n / (n + m).

    Σ_k (R_k − R_(k−1)) P_k over the distinct thresholds, as scikit-learn has it; OpenOOD interpolates by trapezoids instead.

    Args:
        id_scores: (n,) of in-distribution examples.
        ood_scores: (m,) of OOD examples.

    >>> aupr_in(torch.tensor([0.1, 0.2, 0.6]), torch.tensor([0.5, 0.9]))
    tensor(0.9167)
    """
    ids, oods = vector("id_scores", id_scores), vector("ood_scores", ood_scores)
    return like(_average_precision(-ids, -oods), id_scores, ood_scores)


def aupr_out(id_scores: Tensor, ood_scores: Tensor) -> Tensor:
    """Average precision with the OOD examples as the positive class, ranked by score; chance is m / (n + m).

    Args:
        id_scores: (n,) of in-distribution examples.
        ood_scores: (m,) of OOD examples.

    >>> aupr_out(torch.tensor([0.1, 0.2, 0.6]), torch.tensor([0.5, 0.9]))
    tensor(0.8333)
    """
    ids, oods = vector("id_scores", id_scores), vector("ood_scores", ood_scores)
    return like(_average_precision(oods, ids), id_scores, ood_scores)


def risk_coverage(scores: Tensor, losses: Tensor) -> tuple[Tensor, Tensor]:
    """Mean loss of the k examples of lowest score (risk), against the share k/n of examples that are answered (coverage).

    Ties count with their mean loss, so that the curve does not depend on the order of the data. Returns coverage (B,), risk (B,).

    Args:
        scores: (B,) of all examples.
        losses: (B,), such as errors.

    >>> coverage, risk = risk_coverage(torch.tensor([0.3, 0.1, 0.2]), torch.tensor([1.0, 0.0, 0.0]))
    >>> risk
    tensor([0.0000, 0.0000, 0.3333])
    """
    s, loss = vector("scores", scores), vector("losses", losses, finite=True)
    same_length(scores=s, losses=loss)
    ordered, order = s.sort()
    _, group, sizes = torch.unique_consecutive(ordered, return_inverse=True, return_counts=True)
    tied = torch.zeros_like(sizes, dtype=loss.dtype).index_add(0, group, loss[order]) / sizes
    k = torch.arange(1, loss.numel() + 1, dtype=loss.dtype, device=loss.device)
    return like(k / loss.numel(), scores, losses), like(tied[group].cumsum(0) / k, scores, losses)


def aurc(scores: Tensor, losses: Tensor) -> Tensor:
    """Area under the risk-coverage curve: the mean risk over all coverages (Geifman & El-Yaniv, 2017).

    Args:
        scores: (B,) of all examples.
        losses: (B,), such as errors.

    >>> aurc(torch.tensor([0.3, 0.1, 0.2]), torch.tensor([1.0, 0.0, 0.0]))
    tensor(0.1111)
    """
    _, risk = risk_coverage(vector("scores", scores), losses)
    return like(risk.mean(), scores, losses)


def mean_ranks(table: Tensor, higher_is_better: bool) -> Tensor:
    """Rank of each method among all, averaged over tasks: 1 is best, ties share the mean of their ranks.

    Args:
        table: (methods, tasks), complete.
        higher_is_better: Whether the largest value of a task has rank 1.

    >>> mean_ranks(torch.tensor([[0.9, 0.8], [0.7, 0.8], [0.5, 0.6]]), higher_is_better=True)
    tensor([1.2500, 1.7500, 3.0000])
    """
    table = checks.tensor("table", table)
    if table.ndim != 2:
        raise ShapeError(f"Expected `table` of shape (methods, tasks), but got {tuple(table.shape)}.")
    if table.numel() == 0:
        raise DataError(f"Expected at least one method and one task, but got a table of shape {tuple(table.shape)}.")
    if table.isnan().any():
        raise DataError(
            f"Expected `table` to be complete, but {int(table.isnan().sum())} of {table.numel()} cells are NaN; "
            "drop the tasks that lack a method."
        )
    values = table.double() if higher_is_better else -table.double()
    better = (values > values[:, None]).sum(1)  # (methods, methods, tasks): column j against row m
    tied = (values == values[:, None]).sum(1) - 1
    return like((1 + better + tied / 2).mean(1), table)


def rank_correlation(a: Tensor, b: Tensor) -> Tensor:
    """Spearman's ρ, the correlation of ranks; ties share the mean of their ranks. NaN where `a` or `b` is constant.

    Args:
        a: (B,).
        b: (B,).

    >>> rank_correlation(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([9.0, 7.0, 8.0]))
    tensor(-0.5000)
    """
    first, second = vector("a", a), vector("b", b)
    same_length(a=first, b=second)
    centred = [ranks - ranks.mean() for ranks in (_ranks(first), _ranks(second))]
    norm = centred[0].square().sum().sqrt() * centred[1].square().sum().sqrt()
    return like(centred[0] @ centred[1] / norm, a, b)


def _average_precision(positives: Tensor, negatives: Tensor) -> Tensor:
    """Mean over the positives of the precision at their own score: each is one step 1/n of the recall."""
    true, false = _count_at_least(positives, positives), _count_at_least(negatives, positives)
    return (true / (true + false)).mean()


def _count_at_least(values: Tensor, thresholds: Tensor) -> Tensor:
    return (values.numel() - torch.searchsorted(values.sort().values, thresholds)).double()


def _ranks(values: Tensor) -> Tensor:
    """Ranks from 1 on in rising order, the mean of their ranks for ties: (B,) -> (B,)."""
    _, group, sizes = torch.unique(values, return_inverse=True, return_counts=True)
    return (sizes.cumsum(0).double() - (sizes.double() - 1) / 2)[group]
