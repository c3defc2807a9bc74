"""Curves of calibration, against counting by hand."""

from __future__ import annotations

import math

import pytest
import torch
from scipy.stats import norm
from torch import Tensor

from offmap.errors import ConfigError
from offmap.metrics import confidence_curve, coverage_curve, expected_calibration_error


def make_classes(seed: int, rows: int = 60, classes: int = 3) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    probs = torch.randn(rows, classes, generator=generator, dtype=torch.float64).mul(2).softmax(1)
    return probs, torch.randint(classes, (rows,), generator=generator)


@pytest.mark.parametrize("bins", [1, 4, 10])
@pytest.mark.parametrize("seed", range(3))
def test_confidence_accuracy_and_size_of_every_bin_are_counted(seed: int, bins: int):
    probs, labels = make_classes(seed)
    expected: list[list[float]] = []
    for b in range(bins):
        rows = [i for i, p in enumerate(probs.tolist()) if b / bins < max(p) <= (b + 1) / bins]
        if rows:
            confidence = sum(max(probs[i].tolist()) for i in rows) / len(rows)
            accuracy = sum(int(probs[i].argmax() == labels[i]) for i in rows) / len(rows)
            expected.append([confidence, accuracy, len(rows)])
    torch.testing.assert_close(confidence_curve(probs, labels, bins), torch.tensor(expected, dtype=torch.float64))


def test_ten_bins_are_the_default():
    probs, labels = make_classes(0)
    assert torch.equal(confidence_curve(probs, labels), confidence_curve(probs, labels, 10))


def test_the_calibration_error_is_the_gap_of_the_curve():
    probs, labels = make_classes(1)
    confidence, accuracy, size = confidence_curve(probs, labels, 15).unbind(1)
    gap = ((confidence - accuracy).abs() * size).sum() / size.sum()
    torch.testing.assert_close(expected_calibration_error(probs, labels, 15), gap)


def test_a_confidence_a_little_above_one_is_in_the_last_bin():
    """Rounding in half precision does that, and it is let through up to a thousandth."""
    probs, labels = torch.tensor([[1.0009, 0.0], [0.95, 0.05]]), torch.tensor([0, 1])
    assert confidence_curve(probs, labels, 10).tolist() == [pytest.approx([0.97545, 0.5, 2.0])]
    assert float(expected_calibration_error(probs, labels, 10)) == pytest.approx(0.47545)


@pytest.mark.parametrize("levels", [1, 4, 19])
def test_coverage_at_every_level_is_counted(levels: int):
    generator = torch.Generator().manual_seed(levels)
    mean, y = (torch.randn(40, generator=generator, dtype=torch.float64) for _ in range(2))
    std = torch.rand(40, generator=generator, dtype=torch.float64) + 0.2
    curve = coverage_curve(mean, std, y, levels)
    assert curve.shape == (levels, 3)
    for k, (level, observed, count) in enumerate(curve.tolist(), 1):
        radius = norm.ppf((1 + k / (levels + 1)) / 2)
        rows = zip(mean.tolist(), std.tolist(), y.tolist(), strict=True)
        inside = sum(abs(target - middle) <= radius * scale for middle, scale, target in rows)
        assert (level, observed, count) == (pytest.approx(k / (levels + 1)), pytest.approx(inside / 40), 40)


def test_nineteen_levels_are_the_default():
    curve = coverage_curve(torch.zeros(3), torch.ones(3), torch.tensor([0.1, 1.0, 5.0]))
    assert curve[:, 0].tolist() == pytest.approx([k / 20 for k in range(1, 20)])
    assert not math.isnan(float(curve.sum()))


@pytest.mark.parametrize("bad", [0, -1, 1.5, True])
def test_bins_and_levels_are_counts(bad: int):
    with pytest.raises(ConfigError, match="Expected `bins` to be a whole number ≥ 1, but got"):
        confidence_curve(*make_classes(0), bins=bad)
    with pytest.raises(ConfigError, match="Expected `levels` to be a whole number ≥ 1, but got"):
        coverage_curve(torch.zeros(2), torch.ones(2), torch.zeros(2), levels=bad)
