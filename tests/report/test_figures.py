"""Figures say what the numbers say."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch

from offmap.errors import ConfigError
from offmap.metrics import auroc
from offmap.report import figures, style

RNG = np.random.default_rng(0)


@pytest.mark.parametrize("ties", [False, True])
def test_area_under_the_roc_curve_is_the_auroc(ties):
    familiar, strange = RNG.normal(size=80), RNG.normal(1, size=60)
    if ties:
        familiar, strange = familiar.round(), strange.round()
    alarms, catches = figures.roc(familiar, strange)
    area = float(auroc(torch.from_numpy(familiar), torch.from_numpy(strange)))
    assert np.trapezoid(catches, alarms) == pytest.approx(area, abs=1e-12)


def test_roc_curve_runs_from_nothing_to_everything():
    alarms, catches = figures.roc(np.array([0.0, 1.0]), np.array([np.inf, 0.5]))
    assert (alarms[0], catches[0], alarms[-1], catches[-1]) == (0, 0, 1, 1)
    assert (np.diff(alarms) >= 0).all()
    assert (np.diff(catches) >= 0).all()


def test_bins_are_logarithmic_when_scores_span_decades():
    bins = figures.score_bins([np.array([1e-4, 1.0, np.inf])], count=4)
    np.testing.assert_allclose(bins, [1e-4, 1e-3, 1e-2, 1e-1, 1])


@pytest.mark.parametrize("scores", [[np.zeros(3)], [np.full(2, np.inf)], [np.array([-1.0, 5.0])], [np.full(4, 2.0)]])
def test_bins_rise_for_any_scores(scores):
    bins = figures.score_bins(scores)
    assert np.isfinite(bins).all()
    assert (np.diff(bins) > 0).all()


def test_scores_below_the_least_are_drawn_there():
    bins = figures.score_bins([np.array([1e-30, 0.5])], least=1e-6)
    assert bins[0] == pytest.approx(1e-6)


def test_the_same_figure_is_the_same_text():
    def draw() -> str:
        return style.themed(figures.roc_panel([figures.roc(np.arange(5.0), np.arange(3.0, 9.0))]), "a")

    assert draw() == draw()


def test_figures_take_the_colours_of_the_page():
    svg = style.themed(figures.roc_panel([figures.roc(np.arange(5.0), np.arange(3.0, 9.0))] * 8), "a")
    assert svg.startswith("<svg")
    for name in ("soft", "line", *(f"series{i}" for i in range(8))):
        assert f"var(--{name})" in svg
    assert not [light for light, _ in style.COLOURS.values() if light in svg]


def test_without_matplotlib_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"matplotlib is needed here and is not installed: pip install 'offmap\[demo\]'"):
        figures.roc_panel([])


def test_light_colours_differ_so_that_each_can_be_found():
    lights = [light for light, _ in style.COLOURS.values()]
    assert len(set(lights)) == len(lights)


def test_coordinates_are_rounded_and_words_are_not():
    svg = '<svg><path d="M 1.23456 2.5"/><text x="3.98765">0.0123</text></svg>'
    assert style.themed(svg, "a") == '<svg><path d="M 1.23 2.5"/><text x="3.98">0.0123</text></svg>'
