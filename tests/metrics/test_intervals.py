"""Intervals: hand counted coverage, and monotone in the radius."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from offmap.errors import DataError, ShapeError
from offmap.metrics import coverage, mean_width

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


def test_infinite_intervals_never_miss() -> None:
    y = torch.zeros(3)
    lower, upper = torch.full((3,), -torch.inf), torch.full((3,), torch.inf)
    assert coverage(lower, upper, y).item() == 1.0


def test_results_are_in_the_dtype_of_the_inputs() -> None:
    zero, one = torch.zeros(2), torch.ones(2)
    assert coverage(zero, one, zero).dtype == mean_width(zero, one).dtype == torch.float32
    assert coverage(zero, one, zero.double()).dtype == mean_width(zero, one.double()).dtype == torch.float64


def without_targets(lower: Tensor, upper: Tensor, y: Tensor) -> Tensor:
    return mean_width(lower, upper)


@pytest.mark.parametrize("metric", [coverage, without_targets])
@pytest.mark.parametrize(("lower", "upper"), [(1.0, 0.0), (torch.inf, torch.inf), (-torch.inf, -torch.inf), (torch.inf, 0.0)])
def test_empty_intervals_are_refused(metric: Callable[..., Tensor], lower: float, upper: float) -> None:
    low, high = torch.tensor([0.0, lower]), torch.tensor([0.0, upper])
    with pytest.raises(DataError, match=r"`lower` to be at most `upper`, .* but 1 of 2 intervals are not so; swap"):
        metric(low, high, torch.zeros(2))


@pytest.mark.parametrize("metric", [coverage, without_targets])
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
    with pytest.raises(ShapeError, match=r"`lower`, `upper`.* of one length, but got \[3, 2"):
        metric(zero, zero[:2], zero)


def test_bad_targets_are_refused_by_name() -> None:
    zero = torch.zeros(3)
    with pytest.raises(DataError, match=r"`y` to be finite, but 3 of 3 values are not"):
        coverage(zero, zero, zero + torch.inf)
    with pytest.raises(ShapeError, match=r"`lower`, `upper`, `y` of one length, but got \[3, 3, 2\]"):
        coverage(zero, zero, zero[:2])
