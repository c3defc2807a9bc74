"""Split conformal: ranks by exact fractions, coverage by enumeration of every position, p-values by counting."""

from __future__ import annotations

from fractions import Fraction
from itertools import permutations
from math import ceil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from offmap.conformal import quantile, rank
from offmap.detector import Calibration
from offmap.errors import ConfigError, DataError, ShapeError


def test_rank_is_exact_for_every_percent_where_floats_are_not() -> None:
    naive_misses = 0
    for n in range(1, 400):
        for percent in range(1, 100):
            exact = ceil(Fraction(percent, 100) * (n + 1))
            naive_misses += ceil(percent / 100 * (n + 1)) != exact
            assert rank(n, percent / 100) == exact
    assert naive_misses > 0  # else the care is for nothing


@pytest.mark.parametrize(
    ("n", "level", "k"),
    [
        (19, 0.95, 19),
        (18, 0.95, 19),
        (99, 0.55, 55),
        (9, 1 - 0.7, 3),
        (9, 0.1 + 0.2, 3),
        (1, 0.5, 1),
        (1, 0.51, 2),
        (1, 1e-300, 1),
        (10**9 - 1, 0.95, 950_000_000),
        (10**9 - 1, 0.95 * (1 + 5e-12), 950_000_001),  # twelve digits, and no fewer
    ],
)
def test_rank_of_known_cases(n: int, level: float, k: int) -> None:
    assert rank(n, level) == k


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 6])
@pytest.mark.parametrize("level", [0.1, 0.3, 0.5, 0.6, 0.75, 0.8, 0.9])
def test_marginal_coverage_is_exactly_rank_over_n_plus_one(n: int, level: float) -> None:
    # n + 1 exchangeable scores: each is equally likely to be the new one
    values = torch.tensor([0.3, -1.0, 2.0, 7.5, 0.1, 4.0, 3.0][: n + 1])
    covered = 0
    for new in range(n + 1):
        calibration = torch.cat([values[:new], values[new + 1 :]])
        covered += int(values[new] <= quantile(calibration, level))
    assert covered == rank(n, level)
    assert Fraction(covered, n + 1) >= Fraction(str(level))
    assert Fraction(covered - 1, n + 1) < Fraction(str(level))  # and no wider than it must be


@settings(deadline=None)
@given(st.lists(st.integers(0, 3), min_size=2, max_size=8), st.sampled_from([0.2, 0.5, 0.8, 0.9]))
def test_ties_only_raise_coverage(values: list[int], level: float) -> None:
    scores = torch.tensor(values)
    covered = sum(bool(scores[i] <= quantile(torch.cat([scores[:i], scores[i + 1 :]]), level)) for i in range(len(values)))
    assert covered >= rank(len(values) - 1, level)


def p_value(calibration: Tensor, scores: Tensor) -> Tensor:
    return Calibration(calibration).p_value(scores)


@settings(deadline=None)
@given(st.lists(st.integers(0, 5), min_size=2, max_size=9))
def test_p_values_of_exchangeable_scores_are_valid_at_every_level(values: list[int]) -> None:
    scores = torch.tensor(values, dtype=torch.float64)
    n = len(values) - 1
    p = [p_value(torch.cat([scores[:i], scores[i + 1 :]]), scores[i : i + 1]).item() for i in range(n + 1)]
    for k in range(1, n + 2):  # P(p <= k/(n+1)) <= k/(n+1)
        assert sum(v <= k / (n + 1) + 1e-9 for v in p) <= k


def test_p_values_without_ties_are_exactly_uniform() -> None:
    for order in permutations([0.0, 1.0, 2.0, 3.0]):
        values = torch.tensor(order, dtype=torch.float64)
        p = [p_value(torch.cat([values[:i], values[i + 1 :]]), values[i]).item() for i in range(4)]
        assert sorted(p) == [0.25, 0.5, 0.75, 1.0]


@settings(deadline=None)
@given(st.lists(st.integers(-4, 4), min_size=1, max_size=12), st.lists(st.integers(-5, 5), min_size=1, max_size=12))
def test_p_value_counts_calibration_scores_at_least_as_large(calibration: list[int], scores: list[int]) -> None:
    counted = [(1 + sum(c >= s for c in calibration)) / (len(calibration) + 1) for s in scores]
    got = p_value(torch.tensor(calibration).double(), torch.tensor(scores).double())
    torch.testing.assert_close(got, torch.tensor(counted, dtype=torch.float64))


@settings(deadline=None)
@given(st.lists(st.floats(-10, 10), min_size=1, max_size=12), st.floats(0.01, 0.99))
def test_score_above_the_quantile_is_score_with_a_small_p_value(calibration: list[float], level: float) -> None:
    scores = torch.tensor(calibration, dtype=torch.float64)
    n, q = len(calibration), quantile(Calibration(scores).raised, level)
    for s in [*calibration, -11.0, 11.0]:
        alarms = p_value(scores, torch.tensor([s], dtype=torch.float64)).item() * (n + 1)
        # s > q: fewer than n − k + 1 calibration scores reach s
        assert (s > q.item()) == (round(alarms) <= n - rank(n, level) + 1 and rank(n, level) <= n)


def test_quantile_is_the_kth_smallest_per_column() -> None:
    scores = torch.randn(20, 3, generator=torch.Generator().manual_seed(0))
    expected = torch.stack([torch.tensor(sorted(scores[:, k].tolist())[14]) for k in range(3)])
    assert torch.equal(quantile(scores, 0.7), expected)  # rank(20, 0.7) = 15
    assert torch.equal(quantile(scores[:, 1], 0.7), expected[1])


def test_quantile_is_infinite_when_the_set_is_too_small() -> None:
    assert torch.equal(quantile(torch.zeros(18), 0.95), torch.tensor(torch.inf))
    assert torch.equal(quantile(torch.zeros(19), 0.95), torch.tensor(0.0))
    assert torch.equal(quantile(torch.zeros(3, 2, dtype=torch.float64), 0.95), torch.full((2,), torch.inf).double())


def test_infinite_scores_are_ordered_like_numbers() -> None:
    calibration = torch.tensor([-torch.inf, 0.0, torch.inf])
    assert torch.equal(quantile(calibration, 0.75), torch.tensor(torch.inf))
    assert torch.equal(quantile(calibration, 0.5), torch.tensor(0.0))
    got = p_value(calibration, torch.tensor([torch.inf, -torch.inf]))
    assert torch.equal(got, torch.tensor([0.5, 1.0]))


def test_p_value_keeps_the_shape_and_accepts_strides_and_mixed_dtypes() -> None:
    calibration = torch.tensor([1.0, 2.0, 3.0])
    scores = torch.tensor([[0.0, 1.0], [2.0, 3.5]], dtype=torch.float64).mT  # not contiguous
    got = p_value(calibration, scores)
    assert torch.equal(got, torch.tensor([[1.0, 0.75], [1.0, 0.25]], dtype=torch.float64))
    assert p_value(calibration, torch.zeros(0)).shape == (0,)


@pytest.mark.parametrize("level", [0.0, 1.0, -0.1, 95, float("nan")])
def test_levels_outside_zero_and_one_are_refused(level: float) -> None:
    with pytest.raises(ConfigError, match=r"`level` strictly between 0 and 1, such as 0\.95, but got"):
        rank(10, level)
    with pytest.raises(ConfigError, match=r"`level` strictly between 0 and 1, such as 0\.95, but got"):
        quantile(torch.arange(10.0), level)


def test_empty_calibration_is_refused() -> None:
    message = r"at least one calibration score, but got 0; pass calibration data\."
    with pytest.raises(DataError, match=message):
        rank(0, 0.9)
    with pytest.raises(DataError, match=message):
        quantile(torch.zeros(0, 2), 0.9)


def test_nan_is_refused_by_name_and_number() -> None:
    with pytest.raises(DataError, match=r"`scores` without NaN, but got 2 of 3; look for overflow"):
        quantile(torch.tensor([1.0, torch.nan, torch.nan]), 0.5)


def test_wrong_shapes_are_refused() -> None:
    with pytest.raises(ShapeError, match=r"`scores` of shape \(n,\) or \(n, K\), but got \(2, 3, 4\); flatten"):
        quantile(torch.zeros(2, 3, 4), 0.5)
    with pytest.raises(ShapeError, match=r"`scores` of shape \(n,\) or \(n, K\), but got \(\); flatten"):
        quantile(torch.tensor(1.0), 0.5)
