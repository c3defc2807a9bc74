"""How well a score separates in-distribution examples from others. Scores are higher the more OOD; infinities are allowed."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from offmap import checks
from offmap.metrics._checks import like, share, vector


def auroc(id_scores: Tensor, ood_scores: Tensor) -> Tensor:
    r"""Probability that a random OOD score exceeds a random in-distribution one, ties counted half.

    .. math:: \frac{1}{nm} \sum_{i,j} 1[s_j > s_i] + \tfrac12\, 1[s_j = s_i]

    Shapes: `id_scores` (n,), `ood_scores` (m,) -> (). One sort and two look-ups, O((n + m) log n); the pairs are
    counted in integers, so no rounding enters before the last division.

    >>> auroc(torch.tensor([0.1, 0.2, 0.6]), torch.tensor([0.5, 0.9]))
    tensor(0.8333)
    """
    ids, oods = vector("id_scores", id_scores), vector("ood_scores", ood_scores)
    ordered = ids.sort().values
    below = torch.searchsorted(ordered, oods).sum()  # pairs with s_i < s_j
    up_to = torch.searchsorted(ordered, oods, right=True).sum()  # pairs with s_i <= s_j
    return like((below + up_to).double() / (2 * ids.numel() * oods.numel()), id_scores, ood_scores)


def fpr_at(id_scores: Tensor, ood_scores: Tensor, rate: float = 0.95, *, positive: Literal["id", "ood"] = "id") -> Tensor:
    r"""False positive rate at the tightest threshold that keeps `rate` of the positive class.

    .. math:: t_\mathrm{id} = s^\mathrm{id}_{(\lceil \mathrm{rate} \cdot n \rceil)}, \qquad
              \mathrm{FPR}_\mathrm{id} = \frac1m \#\{j : s_j \le t_\mathrm{id}\}

    - `positive="id"`: t is the ⌈rate·n⌉-th *smallest* in-distribution score, an observed value without interpolation;
      the result is the share of OOD scores ≤ t: those that go unnoticed while `rate` of the in-distribution ones pass. This is
      the paper's convention (its authors' code interpolates linearly between the two scores around t and counts
      strictly below, which can move the OOD scores that lie between those two).
    - `positive="ood"`: t is the ⌈rate·m⌉-th *largest* OOD score; the result is the share of in-distribution scores ≥ t:
      the false alarms while `rate` of the OOD examples are caught. OpenOOD 1.5 reports this one.

    Both are the points of scikit-learn's `roc_curve` where the true positive rate first reaches `rate`.
    Shapes: `id_scores` (n,), `ood_scores` (m,) -> ().

    >>> fpr_at(torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([2.5, 3.0, 5.0]), 0.75)
    tensor(0.6667)
    >>> fpr_at(torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([2.5, 3.0, 5.0]), 0.75, positive="ood")
    tensor(0.5000)
    """
    rate = share("rate", rate, one=True)
    ids, oods = vector("id_scores", id_scores), vector("ood_scores", ood_scores)
    checks.one_of("positive", positive, ("id", "ood"))
    kept, others = (ids, oods) if positive == "id" else (-oods, -ids)
    k = math.ceil(rate * kept.numel() * (1 - 1e-12))  # 0.55 · 100 is 55.00000000000001
    threshold = kept.kthvalue(k).values
    return like((others <= threshold).double().mean(), id_scores, ood_scores)


def aupr_in(id_scores: Tensor, ood_scores: Tensor) -> Tensor:
    r"""Average precision with the in-distribution examples as the positive class, ranked by −score.

    .. math:: \mathrm{AP} = \sum_k (R_k - R_{k-1})\, P_k

    over the distinct thresholds, as `sklearn.metrics.average_precision_score`: no interpolation between points, unlike
    the trapezoids of OpenOOD. Chance is n / (n + m). Shapes: `id_scores` (n,), `ood_scores` (m,) -> ().

    >>> aupr_in(torch.tensor([0.1, 0.2, 0.6]), torch.tensor([0.5, 0.9]))
    tensor(0.9167)
    """
    ids, oods = vector("id_scores", id_scores), vector("ood_scores", ood_scores)
    return like(_average_precision(-ids, -oods), id_scores, ood_scores)


def aupr_out(id_scores: Tensor, ood_scores: Tensor) -> Tensor:
    r"""Average precision with the OOD examples as the positive class, ranked by score.

    .. math:: \mathrm{AP} = \sum_k (R_k - R_{k-1})\, P_k

    As `aupr_in` with the roles exchanged; chance is m / (n + m). Shapes: `id_scores` (n,), `ood_scores` (m,) -> ().

    >>> aupr_out(torch.tensor([0.1, 0.2, 0.6]), torch.tensor([0.5, 0.9]))
    tensor(0.8333)
    """
    ids, oods = vector("id_scores", id_scores), vector("ood_scores", ood_scores)
    return like(_average_precision(oods, ids), id_scores, ood_scores)


def _average_precision(positives: Tensor, negatives: Tensor) -> Tensor:
    """Mean over the positives of the precision at their own score: each is one step 1/n of the recall."""
    true = _at_least(positives, positives)
    false = _at_least(negatives, positives)
    return (true / (true + false)).mean()


def _at_least(values: Tensor, thresholds: Tensor) -> Tensor:
    below = torch.searchsorted(values.sort().values, thresholds)
    return (values.numel() - below).double()
