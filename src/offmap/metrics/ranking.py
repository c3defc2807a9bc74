"""Orders: what is gained by refusing the most uncertain examples, and how methods rank over tasks."""

from __future__ import annotations

import torch
from torch import Tensor

from offmap import checks
from offmap.errors import DataError, ShapeError
from offmap.metrics._checks import like, same_length, vector


def risk_coverage(scores: Tensor, losses: Tensor) -> tuple[Tensor, Tensor]:
    r"""Mean loss of the k examples with the lowest scores, against the share k/n of examples that are answered.

    .. math:: \mathrm{coverage}_k = \frac kn, \qquad \mathrm{risk}_k = \frac1k \sum_{i \le k} \ell_{(i)}

    Examples that tie in score count with their mean loss: the expectation over a random order among them, so that the
    curve does not depend on the order of the data. Shapes: `scores`, `losses` (B,) -> coverage (B,), risk (B,).

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
    risk = tied[group].cumsum(0) / k
    return like(k / loss.numel(), scores, losses), like(risk, scores, losses)


def aurc(scores: Tensor, losses: Tensor) -> Tensor:
    r"""Area under the risk-coverage curve: the mean risk over all coverages (Geifman & El-Yaniv, 2017).

    .. math:: \frac1n \sum_k \mathrm{risk}_k

    Shapes: `scores`, `losses` (B,) -> ().

    >>> aurc(torch.tensor([0.3, 0.1, 0.2]), torch.tensor([1.0, 0.0, 0.0]))
    tensor(0.1111)
    """
    _, risk = risk_coverage(vector("scores", scores), losses)
    return like(risk.mean(), scores, losses)


def mean_ranks(table: Tensor, higher_is_better: bool) -> Tensor:
    r"""Rank of each method among all, averaged over tasks: 1 is best, ties share the mean of their places.

    .. math:: r_m = \frac1T \sum_t 1 + \#\{j : x_{jt} \succ x_{mt}\} + \tfrac12 \#\{j \ne m : x_{jt} = x_{mt}\}

    Shapes: `table` (methods, tasks) -> (methods,).

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
    r"""Spearman's ρ, the correlation of the ranks of two lists of numbers; equals share the mean of their places.

    .. math:: \rho = \mathrm{corr}(\mathrm{rank}\,a, \mathrm{rank}\,b)

    NaN where one of the lists is constant. Shapes: `a`, `b` (B,) -> ().

    >>> rank_correlation(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([9.0, 7.0, 8.0]))
    tensor(-0.5000)
    """
    first, second = vector("a", a), vector("b", b)
    same_length(a=first, b=second)
    centred = [r - r.mean() for r in (_ranks(first), _ranks(second))]
    norm = centred[0].square().sum().sqrt() * centred[1].square().sum().sqrt()
    return like(centred[0] @ centred[1] / norm, a, b)


def _ranks(values: Tensor) -> Tensor:
    """Places from 1 on in rising order, equals at the mean of theirs: (B,) -> (B,)."""
    _, group, sizes = torch.unique(values, return_inverse=True, return_counts=True)
    last = sizes.cumsum(0).double()
    return (last - (sizes.double() - 1) / 2)[group]
