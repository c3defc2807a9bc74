"""Panels of experiments: bins of histograms."""

from __future__ import annotations

import numpy as np
import pytest

from offmap_bench.report.panels import score_bins


def test_bins_are_logarithmic_when_scores_span_decades():
    bins = score_bins([np.array([1e-4, 1.0, np.inf])], count=4)
    np.testing.assert_allclose(bins, [1e-4, 1e-3, 1e-2, 1e-1, 1])


@pytest.mark.parametrize("scores", [[np.zeros(3)], [np.full(2, np.inf)], [np.array([-1.0, 5.0])], [np.full(4, 2.0)]])
def test_bins_rise_for_any_scores(scores):
    bins = score_bins(scores)
    assert np.isfinite(bins).all()
    assert (np.diff(bins) > 0).all()


def test_scores_below_the_least_are_drawn_there():
    bins = score_bins([np.array([1e-30, 0.5])], least=1e-6)
    assert bins[0] == pytest.approx(1e-6)
