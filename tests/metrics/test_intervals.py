"""Intervals: hand counted coverage, monotone in the radius, and a score that the true quantiles minimise."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from offmap.errors import ConfigError, DataError, ShapeError
from offmap.metrics import coverage, interval_score, mean_width

targets = st.lists(st.floats(-10, 10), min_size=1, max_size=12).map(lambda v: torch.tensor(v, dtype=torch.float64))


def test_coverage_counts_closed_intervals() -> None:
    lower, upper = torch.tensor([0.0, 0.0, 0.0, 0.0, -torch.inf]), torch.tensor([1.0, 1.0, 1.0, 1.0, torch.inf])
    y = torch.tensor([0.0, 1.0, -0.01, 1.01, 1e30])
    assert coverage(lower, upper, y).item() == pytest.approx(3 / 5)


@settings(deadline=None)
@given(targets, st.floats(0, 5), st.floats(0, 5))
def test_coverage_and_width_are_monotone_in_the_radius(y: Tensor, radius: float, more: float) -> None:
    centre = torch.zeros_like(y)
    narrow, wide = (centre - radius, centre + radius), (centre - radius - more, centre + radius + more)
    assert coverage(*narrow, y) <= coverage(*wide, y)
    assert mean_width(*narrow) <= mean_width(*wide)
    assert coverage(*narrow, y).item() == pytest.approx(sum(abs(v) <= radius for v in y.tolist()) / len(y))


def test_width_of_a_point_is_zero_and_of_an_unbounded_interval_infinite() -> None:
    zero = torch.zeros(2)
    assert mean_width(zero, zero).item() == 0.0
    assert mean_width(zero, torch.tensor([0.0, torch.inf])).item() == torch.inf
    assert mean_width(torch.tensor([1e30, 0.0]), torch.tensor([2e30, 0.0])).item() == pytest.approx(5e29)


@settings(deadline=None)
@given(targets, targets, st.sampled_from([0.5, 0.8, 0.95]))
def test_interval_score_matches_the_definition(y: Tensor, ends: Tensor, level: float) -> None:
    n = min(len(y), len(ends))
    y, ends = y[:n], ends[:n]
    lower, upper = -ends.abs(), ends.abs() / 2
    total = 0.0
    for low, high, target in zip(lower.tolist(), upper.tolist(), y.tolist(), strict=True):
        miss = low - target if target < low else max(target - high, 0.0)
        total += high - low + 2 / (1 - level) * miss
    assert interval_score(lower, upper, y, level).item() == pytest.approx(total / n, rel=1e-9)


def test_interval_score_is_smallest_at_the_true_quantiles() -> None:
    y = (torch.arange(2000, dtype=torch.float64) + 0.5) / 2000  # uniform on [0, 1]
    ends = [i / 40 for i in range(41)]
    scores = {
        (low, high): interval_score(torch.full_like(y, low), torch.full_like(y, high), y, level=0.8).item()
        for low in ends for high in ends if low <= high
    }  # fmt: skip
    assert min(scores, key=lambda ends: scores[ends]) == (0.1, 0.9)


def test_infinite_intervals_never_miss_but_score_infinitely() -> None:
    y = torch.zeros(3)
    lower, upper = torch.full((3,), -torch.inf), torch.full((3,), torch.inf)
    assert coverage(lower, upper, y).item() == 1.0
    assert interval_score(lower, upper, y).item() == torch.inf


def test_results_are_in_the_dtype_of_the_inputs() -> None:
    zero, one = torch.zeros(2), torch.ones(2)
    assert coverage(zero, one, zero).dtype == mean_width(zero, one).dtype == torch.float32
    assert coverage(zero, one, zero.double()).dtype == mean_width(zero, one.double()).dtype == torch.float64


def without_targets(lower: Tensor, upper: Tensor, y: Tensor) -> Tensor:
    return mean_width(lower, upper)


@pytest.mark.parametrize("metric", [coverage, interval_score, without_targets])
@pytest.mark.parametrize(("lower", "upper"), [(1.0, 0.0), (torch.inf, torch.inf), (-torch.inf, -torch.inf), (torch.inf, 0.0)])
def test_empty_intervals_are_refused(metric: Callable[..., Tensor], lower: float, upper: float) -> None:
    low, high = torch.tensor([0.0, lower]), torch.tensor([0.0, upper])
    with pytest.raises(DataError, match=r"`lower` to be at most `upper`, .* but 1 of 2 intervals are not so; swap"):
        metric(low, high, torch.zeros(2))


@pytest.mark.parametrize("metric", [coverage, interval_score, without_targets])
def test_bad_bounds_are_refused_by_name(metric: Callable[..., Tensor]) -> None:
    zero, nan = torch.zeros(3), torch.tensor([0.0, torch.nan, 0.0])
    with pytest.raises(DataError, match=r"`lower` to be free of NaN, but 1 of 3 values are NaN"):
        metric(nan, zero, zero)
    with pytest.raises(DataError, match=r"`upper` to be free of NaN, but 1 of 3 values are NaN"):
        metric(zero, nan, zero)
    with pytest.raises(DataError, match=r"`lower` to hold at least one value, but it is empty"):
        metric(zero[:0], zero[:0], zero[:0])
    with pytest.raises(ShapeError, match=r"`upper` to be 1-D, but got shape \(3, 1\); pass `upper\.flatten\(\)`"):
        metric(zero, zero[:, None], zero)
    with pytest.raises(ShapeError, match=r"`lower`, `upper` of one length, but got \[3, 2\]"):
        metric(zero, zero[:2], zero)


@pytest.mark.parametrize("metric", [coverage, interval_score])
def test_bad_targets_are_refused_by_name(metric: Callable[..., Tensor]) -> None:
    zero = torch.zeros(3)
    with pytest.raises(DataError, match=r"`y` to be finite, but 3 of 3 values are not"):
        metric(zero, zero, zero + torch.inf)
    with pytest.raises(ShapeError, match=r"`lower`, `upper`, `y` of one length, but got \[3, 3, 2\]"):
        metric(zero, zero, zero[:2])


@pytest.mark.parametrize("level", [0.0, 1.0, 95, float("nan")])
def test_impossible_levels_are_refused(level: float) -> None:
    with pytest.raises(ConfigError, match=r"`level` strictly between 0 and 1, such as 0\.95, but got"):
        interval_score(torch.zeros(2), torch.ones(2), torch.zeros(2), level)
