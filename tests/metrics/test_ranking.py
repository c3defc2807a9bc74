"""Risk-coverage curves against all orders of tied examples, and rank correlation against scipy."""

from __future__ import annotations

from itertools import pairwise, permutations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import spearmanr

from offmap.errors import DataError, ShapeError
from offmap.metrics import aurc, rank_correlation, risk_coverage

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
def test_risk_at_full_coverage_is_the_mean_loss(pairs: list[tuple[int, float]]) -> None:
    scores = torch.tensor([float(s) for s, _ in pairs], dtype=torch.float64)
    losses = torch.tensor([loss for _, loss in pairs], dtype=torch.float64)
    _, risk = risk_coverage(scores, losses)
    torch.testing.assert_close(risk[-1], losses.mean())


@settings(deadline=None)
@given(examples)
def test_aurc_is_the_mean_risk_over_all_shares_and_every_order_of_ties(pairs: list[tuple[int, float]]) -> None:
    scores, losses = [s for s, _ in pairs], [loss for _, loss in pairs]
    area = aurc(torch.tensor(scores), torch.tensor(losses, dtype=torch.float64))
    assert float(area) == pytest.approx(np.mean(slow_risk(scores, losses)), abs=1e-9)


def test_aurc_of_scores_that_tell_nothing_is_the_mean_loss_and_the_best_order_has_the_least() -> None:
    losses = torch.rand(50, generator=torch.Generator().manual_seed(0))
    assert float(aurc(torch.zeros(50), losses)) == pytest.approx(float(losses.mean()), rel=1e-6)
    assert aurc(losses, losses) < aurc(losses.roll(1), losses) < aurc(-losses, losses)
    assert aurc(losses, losses > 0.5).dtype == torch.float32


def test_errors_as_booleans_and_infinite_scores_are_counted() -> None:
    scores = torch.tensor([torch.inf, 0.0, -torch.inf, torch.inf])
    wrong = torch.tensor([True, False, False, False])
    _, risk = risk_coverage(scores, wrong)
    assert risk.tolist() == pytest.approx([0, 0, 0.5 / 3, 0.25])
    assert risk.dtype == torch.float32


def test_bad_scores_and_losses_are_refused_by_name() -> None:
    good, nan = torch.zeros(3), torch.tensor([0.0, torch.nan, 0.0])
    with pytest.raises(DataError, match=r"`scores` to be free of NaN, but 1 of 3 values are NaN"):
        risk_coverage(nan, good)
    with pytest.raises(DataError, match=r"`losses` to be finite, but 1 of 3 values are not"):
        risk_coverage(good, nan)
    with pytest.raises(DataError, match=r"`scores` to hold at least one value, but it is empty"):
        risk_coverage(good[:0], good[:0])
    with pytest.raises(ShapeError, match=r"`losses` to be 1-D, but got shape \(3, 1\)"):
        risk_coverage(good, good[:, None])
    with pytest.raises(ShapeError, match=r"`scores`, `losses` of one length, but got \[3, 2\]; they must describe"):
        risk_coverage(good, good[:2])
    with pytest.raises(DataError, match=r"`losses` to be finite, but 1 of 3 values are not"):
        aurc(good, nan)
    with pytest.raises(DataError, match=r"`scores` to hold at least one value, but it is empty"):
        aurc(good[:0], good[:0])


@pytest.mark.parametrize("seed", range(4))
def test_rank_correlation_is_scipys_also_with_ties(seed: int):
    generator = torch.Generator().manual_seed(seed)
    a = torch.randint(6, (30,), generator=generator).double()
    b = a.neg() + 3 * torch.rand(30, generator=generator).double().round(decimals=1)
    assert float(rank_correlation(a, b)) == pytest.approx(float(spearmanr(a, b).statistic))


def test_rank_correlation_stays_within_one_for_any_number_of_rows():
    for n in range(2, 300):
        a = torch.arange(n, dtype=torch.float64)
        assert -1.0 <= float(rank_correlation(a, -a.exp())) <= float(rank_correlation(a, 2 * a)) <= 1.0


def test_rank_correlation_sees_order_alone_and_is_undefined_for_constants():
    a = torch.rand(20, generator=torch.Generator().manual_seed(0))
    assert float(rank_correlation(a, -a.exp())) == pytest.approx(-1)
    assert rank_correlation(a, torch.ones(20)).isnan()
