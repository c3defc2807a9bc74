"""Calibration metrics against scipy, loops over bins and hand counted cases."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy.stats import norm
from torch import Tensor

from offmap.errors import ConfigError, DataError, ShapeError
from offmap.metrics import confidence_curve, ence, expected_calibration_error, quantile_ece

CLASSES = [expected_calibration_error, confidence_curve]
GAUSSIAN = [ence, quantile_ece]


def random_classes(n: int, classes: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    probs = (2 * torch.randn(n, classes, generator=g, dtype=torch.float64)).softmax(1)
    return probs, torch.randint(classes, (n,), generator=g)


def random_gaussian(n: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    mean = torch.randn(n, generator=g, dtype=torch.float64)
    std = 0.1 + torch.rand(n, generator=g, dtype=torch.float64)
    return mean, std, mean + 1.5 * std * torch.randn(n, generator=g, dtype=torch.float64)


def slow_ece(probs: Tensor, labels: Tensor, bins: int) -> float:
    total = 0.0
    for b in range(bins):
        members = [i for i in range(len(labels)) if b / bins < probs[i].max() <= (b + 1) / bins]
        if members:
            accuracy = np.mean([probs[i].argmax().item() == labels[i].item() for i in members])
            confidence = np.mean([probs[i].max().item() for i in members])
            total += len(members) / len(labels) * abs(float(accuracy - confidence))
    return total


def slow_quantile_ece(mean: Tensor, scale: Tensor, y: Tensor, levels: int) -> float:
    gaps = []
    for k in range(1, levels + 1):
        nominal = k / (levels + 1)
        lower, upper = norm.interval(nominal, loc=mean.numpy(), scale=scale.numpy())
        gaps.append(abs(nominal - np.mean((lower <= y.numpy()) & (y.numpy() <= upper))))
    return float(np.mean(gaps))


@pytest.mark.parametrize("bins", [1, 5, 15])
@pytest.mark.parametrize("classes", [2, 4])
def test_ece_matches_the_loop_over_bins(bins: int, classes: int) -> None:
    probs, labels = random_classes(200, classes)
    got = expected_calibration_error(probs, labels, bins)
    assert got.item() == pytest.approx(slow_ece(probs, labels, bins), abs=1e-12)


def test_ece_of_perfect_confidence_is_the_error_rate() -> None:
    probs = torch.eye(4)[torch.tensor([0, 1, 2, 3])]
    assert expected_calibration_error(probs, torch.tensor([0, 1, 2, 3])).item() == 0.0
    assert expected_calibration_error(probs, torch.tensor([0, 1, 2, 0])).item() == 0.25


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("confidence", [0.6, 0.7, 0.8, 0.9])
def test_confidence_on_an_edge_falls_into_the_bin_below(confidence: float, dtype: torch.dtype) -> None:
    # wrong at the edge, right just below it: in one bin the two cancel, in two bins they do not
    below = confidence - 0.05
    probs = torch.tensor([[confidence, 1 - confidence], [below, 1 - below]], dtype=dtype)
    got = expected_calibration_error(probs, torch.tensor([1, 0]), bins=10)
    assert got.item() == pytest.approx(abs(1 - confidence - below) / 2, abs=1e-6)


def test_confidence_that_rounding_lifts_above_one_falls_into_the_last_bin() -> None:
    # wrong and sure beside right and nearly so: in one bin the two cancel
    probs = torch.tensor([[1.0005, 0.0], [0.95, 0.05]], dtype=torch.float64)
    got = expected_calibration_error(probs, torch.tensor([1, 0]), bins=10)
    assert got.item() == pytest.approx((1.0005 - 0.05) / 2, abs=1e-12)


@pytest.mark.parametrize(("n", "bins"), [(100, 10), (103, 10), (7, 7), (30, 1)])
def test_ence_matches_the_loop_over_sorted_groups(n: int, bins: int) -> None:
    mean, std, y = random_gaussian(n)
    order = np.argsort(std.numpy())
    gaps = []
    for group in np.array_split(order, bins):
        stated = math.sqrt(np.mean(std.numpy()[group] ** 2))
        observed = math.sqrt(np.mean((y - mean).numpy()[group] ** 2))
        gaps.append(abs(stated - observed) / stated)
    assert ence(mean, std, y, bins).item() == pytest.approx(np.mean(gaps), abs=1e-12)


def test_ence_is_zero_when_errors_are_as_large_as_stated() -> None:
    std = torch.linspace(0.1, 3, 40, dtype=torch.float64)
    signs = torch.ones(40, dtype=torch.float64)
    signs[::2] = -1
    assert ence(torch.zeros(40), std, signs * std).item() == pytest.approx(0.0, abs=1e-12)
    assert ence(torch.zeros(40), std / 2, signs * std).item() == pytest.approx(1.0, abs=1e-12)


def test_ence_does_not_see_the_unit_or_the_order() -> None:
    mean, std, y = random_gaussian(64)
    shuffle = torch.randperm(64, generator=torch.Generator().manual_seed(3))
    expected = ence(mean, std, y)
    torch.testing.assert_close(ence(1000 * mean, 1000 * std, 1000 * y), expected)
    torch.testing.assert_close(ence(mean[shuffle], std[shuffle], y[shuffle]), expected)


def test_ence_keeps_equal_std_in_the_order_given() -> None:
    error = torch.tensor([1.0, 2.0, 4.0]).repeat_interleave(32)
    assert ence(torch.zeros(96), torch.ones(96), error, bins=3).item() == pytest.approx((0 + 1 + 3) / 3)


@pytest.mark.parametrize("levels", [1, 9, 10])
def test_quantile_ece_matches_scipy_intervals(levels: int) -> None:
    mean, std, y = random_gaussian(150)
    got = quantile_ece(mean, std, y, levels)
    assert got.item() == pytest.approx(slow_quantile_ece(mean, std, y, levels), abs=1e-12)


def test_quantile_ece_of_exact_normal_quantiles_is_zero() -> None:
    n = 1100  # a multiple of 11: every level k/11 holds exactly 100 k of the quantiles
    y = torch.special.ndtri((torch.arange(n, dtype=torch.float64) + 0.5) / n)
    assert quantile_ece(torch.zeros(n), torch.ones(n), y).item() == pytest.approx(0.0, abs=1e-12)
    # far too narrow, nothing is covered: the mean nominal level; far too wide, everything is
    assert quantile_ece(torch.full((n,), 99.0), torch.ones(n), y).item() == pytest.approx(0.5)
    assert quantile_ece(torch.zeros(n), torch.full((n,), torch.inf), y).item() == pytest.approx(0.5)


def test_zero_std_covers_exact_predictions_only() -> None:
    y = torch.tensor([0.0, 1.0])
    assert quantile_ece(torch.zeros(2), torch.zeros(2), y, levels=1).item() == 0.0  # one of two is covered, as promised
    assert quantile_ece(y, torch.zeros(2), y, levels=1).item() == 0.5


def test_quantile_ece_does_not_depend_on_the_unit() -> None:
    mean, std, y = random_gaussian(150)
    torch.testing.assert_close(quantile_ece(mean / 100, std / 100, y / 100), quantile_ece(mean, std, y))


@pytest.mark.parametrize("metric", GAUSSIAN)
def test_result_is_float32_for_float32(metric: Callable[..., Tensor]) -> None:
    mean, std, y = (v.float() for v in random_gaussian(20))
    assert metric(mean, std, y).dtype == torch.float32
    assert metric(mean, std, y.double()).dtype == torch.float64


HALF, SOFTMAX = [[0.5, 0.5]], r"non-negative and to sum to 1; apply softmax to logits"
BAD_CLASSES: list[tuple[Tensor, Tensor, type[Exception], str]] = [
    (
        torch.ones(3),
        torch.zeros(3).long(),
        ShapeError,
        r"`probs` of shape \(B, C\) and `labels` of shape \(B,\)",
    ),
    (torch.ones(3, 1), torch.zeros(2).long(), ShapeError, r"but got \(3, 1\) and \(2,\); move positions into"),
    (torch.ones(3, 1), torch.zeros(4).long(), ShapeError, r"but got \(3, 1\) and \(4,\); move positions into"),
    (torch.ones(0, 2), torch.zeros(0).long(), DataError, r"one example and one class, but `probs` is empty"),
    (torch.tensor([[2.0, -1.0]]), torch.tensor([0]), DataError, SOFTMAX),
    (torch.tensor([[0.5, 0.2]]), torch.tensor([0]), DataError, SOFTMAX),
    (torch.tensor([[0.5, torch.nan]]), torch.tensor([0]), DataError, SOFTMAX),
    (torch.tensor(HALF), torch.tensor([0.0]), DataError, r"to be integers, but got torch.float32; pass"),
    (torch.tensor(HALF), torch.tensor([True]), DataError, r"to be integers, but got torch.bool; pass"),
    (torch.tensor(HALF), torch.tensor([2]), DataError, r"from 0 to 1, the classes of `probs`, but .* from 2 to 2"),
    (torch.tensor(HALF), torch.tensor([-100]), DataError, r"from -100 to -100; drop ignored positions first"),
]


@pytest.mark.parametrize("metric", CLASSES)
@pytest.mark.parametrize(("probs", "labels", "error", "message"), BAD_CLASSES)
def test_bad_classes_are_refused(
    metric: Callable[..., Tensor], probs: Tensor, labels: Tensor, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        metric(probs, labels)


@pytest.mark.parametrize("metric", GAUSSIAN)
def test_bad_gaussians_are_refused(metric: Callable[..., Tensor]) -> None:
    zero, one = torch.zeros(12), torch.ones(12)
    with pytest.raises(ShapeError, match=r"`mean`, `std`, `y` of one length, but got \[12, 12, 11\]; they must"):
        metric(zero, one, zero[1:])
    with pytest.raises(ShapeError, match=r"`std` to be 1-D, but got shape \(12, 1\)"):
        metric(zero, one[:, None], zero)
    with pytest.raises(DataError, match=r"`mean` to be finite, but 12 of 12 values are not; drop or repair"):
        metric(zero + torch.inf, one, zero)
    with pytest.raises(DataError, match=r"`y` to be finite, but 12 of 12 values are not"):
        metric(zero, one, zero + torch.nan)
    with pytest.raises(DataError, match=r"`std` to be free of NaN, but 12 of 12 values are NaN"):
        metric(zero, one + torch.nan, zero)
    with pytest.raises(DataError, match=r"`std` to be at least 0, but its minimum is -2\.5; is it a logarithm"):
        metric(zero, one - 3.5, zero)


@pytest.mark.parametrize("std", [0.0, torch.inf])
def test_ence_refuses_std_that_it_cannot_divide_by(std: float) -> None:
    with pytest.raises(DataError, match=r"`std` to be positive and finite, since errors are divided by it; clamp it"):
        ence(torch.zeros(10), torch.full((10,), std), torch.zeros(10))


@pytest.mark.parametrize("bins", [0, -3, 13])
def test_ence_refuses_empty_groups(bins: int) -> None:
    with pytest.raises(ConfigError, match=rf"`bins` to be a whole number from 1 to 12, but got {bins}"):
        ence(torch.zeros(12), torch.ones(12), torch.zeros(12), bins)


def test_no_bins_and_no_levels_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"`bins` to be a whole number ≥ 1, but got 0"):
        expected_calibration_error(torch.ones(1, 1), torch.tensor([0]), bins=0)
    with pytest.raises(ConfigError, match=r"`levels` to be a whole number ≥ 1, but got 0"):
        quantile_ece(torch.zeros(2), torch.ones(2), torch.zeros(2), levels=0)
