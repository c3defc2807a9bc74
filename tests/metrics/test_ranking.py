"""Risk-coverage curves against all orders of tied examples, and mean ranks against scipy."""

from __future__ import annotations

from itertools import pairwise, permutations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import rankdata, spearmanr
from torch import Tensor

from offmap.errors import DataError, ShapeError
from offmap.metrics import aurc, mean_ranks, rank_correlation, risk_coverage

examples = st.lists(st.tuples(st.integers(0, 2), st.floats(0, 10)), min_size=1, max_size=6)


def slow_risk(scores: list[int], losses: list[float]) -> list[float]:
    """Mean over all orders that sort the scores of the running mean loss."""
    curves = []
    for order in permutations(range(len(scores))):
        if all(scores[a] <= scores[b] for a, b in pairwise(order)):
            curves.append(np.cumsum([losses[i] for i in order]) / np.arange(1, len(order) + 1))
    return np.mean(curves, axis=0).tolist()


@settings(deadline=None)
@given(examples)
def test_risk_is_the_expectation_over_every_order_of_ties(pairs: list[tuple[int, float]]) -> None:
    scores, losses = [s for s, _ in pairs], [loss for _, loss in pairs]
    coverage, risk = risk_coverage(torch.tensor(scores), torch.tensor(losses, dtype=torch.float64))
    assert coverage.tolist() == pytest.approx([(k + 1) / len(pairs) for k in range(len(pairs))])
    assert risk.tolist() == pytest.approx(slow_risk(scores, losses), abs=1e-9)


@settings(deadline=None)
@given(examples)
def test_risk_at_full_coverage_is_the_mean_loss_and_aurc_the_mean_risk(pairs: list[tuple[int, float]]) -> None:
    scores = torch.tensor([float(s) for s, _ in pairs], dtype=torch.float64)
    losses = torch.tensor([loss for _, loss in pairs], dtype=torch.float64)
    _, risk = risk_coverage(scores, losses)
    torch.testing.assert_close(risk[-1], losses.mean())
    torch.testing.assert_close(aurc(scores, losses), risk.mean())


def test_ranking_by_the_loss_itself_is_best_and_by_its_opposite_worst() -> None:
    losses = torch.randn(6, generator=torch.Generator().manual_seed(0)).abs()
    areas = [aurc(torch.tensor(order), losses).item() for order in permutations(range(6))]
    assert aurc(losses, losses).item() == pytest.approx(min(areas), abs=1e-6)
    assert aurc(-losses, losses).item() == pytest.approx(max(areas), abs=1e-6)
    assert aurc(torch.zeros(6), losses).item() == pytest.approx(losses.mean().item(), abs=1e-6)


def test_errors_as_booleans_and_infinite_scores_are_counted() -> None:
    scores = torch.tensor([torch.inf, 0.0, -torch.inf, torch.inf])
    wrong = torch.tensor([True, False, False, False])
    _, risk = risk_coverage(scores, wrong)
    assert risk.tolist() == pytest.approx([0, 0, 0.5 / 3, 0.25])
    assert aurc(scores, wrong).item() == pytest.approx((0.5 / 3 + 0.25) / 4)
    assert risk.dtype == aurc(scores, wrong).dtype == torch.float32


def test_bad_scores_and_losses_are_refused_by_name() -> None:
    good, nan = torch.zeros(3), torch.tensor([0.0, torch.nan, 0.0])
    for metric in (risk_coverage, aurc):
        with pytest.raises(DataError, match=r"`scores` to be free of NaN, but 1 of 3 values are NaN"):
            metric(nan, good)
        with pytest.raises(DataError, match=r"`losses` to be finite, but 1 of 3 values are not"):
            metric(good, nan)
        with pytest.raises(DataError, match=r"`scores` to hold at least one value, but it is empty"):
            metric(good[:0], good[:0])
        with pytest.raises(ShapeError, match=r"`losses` to be 1-D, but got shape \(3, 1\)"):
            metric(good, good[:, None])
        with pytest.raises(ShapeError, match=r"`scores`, `losses` of one length, but got \[3, 2\]; they must describe"):
            metric(good, good[:2])


tables = st.integers(1, 5).flatmap(
    lambda tasks: st.lists(st.lists(st.integers(0, 3), min_size=tasks, max_size=tasks), min_size=1, max_size=5)
).map(lambda rows: torch.tensor(rows, dtype=torch.float64))  # fmt: skip


@settings(deadline=None)
@given(tables, st.booleans())
def test_mean_ranks_agree_with_scipy(table: Tensor, higher: bool) -> None:
    signed = -table.numpy() if higher else table.numpy()
    expected = rankdata(signed, method="average", axis=0).mean(1)
    assert mean_ranks(table, higher_is_better=higher).tolist() == pytest.approx(expected.tolist())


@settings(deadline=None)
@given(tables)
def test_ranks_turn_around_with_the_direction(table: Tensor) -> None:
    both = mean_ranks(table, higher_is_better=True) + mean_ranks(table, higher_is_better=False)
    torch.testing.assert_close(both, torch.full_like(both, len(table) + 1))


def test_infinite_cells_rank_last_or_first() -> None:
    table = torch.tensor([[torch.inf], [0.0], [-torch.inf]])
    assert mean_ranks(table, higher_is_better=True).tolist() == [1, 2, 3]
    assert mean_ranks(table, higher_is_better=False).tolist() == [3, 2, 1]


def test_bad_tables_are_refused() -> None:
    with pytest.raises(ShapeError, match=r"`table` of shape \(methods, tasks\), but got \(3,\)"):
        mean_ranks(torch.zeros(3), higher_is_better=True)
    with pytest.raises(DataError, match=r"at least one method and one task, but got a table of shape \(3, 0\)"):
        mean_ranks(torch.zeros(3, 0), higher_is_better=True)
    with pytest.raises(DataError, match=r"`table` to be complete, but 2 of 4 cells are NaN; drop the tasks that lack"):
        mean_ranks(torch.tensor([[0.0, torch.nan], [torch.nan, 1.0]]), higher_is_better=True)


@pytest.mark.parametrize("seed", range(4))
def test_rank_correlation_is_scipys_also_with_ties(seed: int):
    generator = torch.Generator().manual_seed(seed)
    a = torch.randint(6, (30,), generator=generator).double()
    b = a.neg() + 3 * torch.rand(30, generator=generator).double().round(decimals=1)
    assert float(rank_correlation(a, b)) == pytest.approx(float(spearmanr(a, b).statistic))


def test_rank_correlation_sees_order_alone_and_is_undefined_for_constants():
    a = torch.rand(20, generator=torch.Generator().manual_seed(0))
    assert float(rank_correlation(a, -a.exp())) == pytest.approx(-1)
    assert rank_correlation(a, torch.ones(20)).isnan()
