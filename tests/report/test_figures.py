"""Figures show what the numbers say."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch

from offmap.errors import ConfigError
from offmap.metrics import auroc
from offmap.report.curves import roc
from offmap.report.figures import COLOURS, draw_svg, series, themed

RNG = np.random.default_rng(0)


def lines(count: int) -> str:
    """The SVG of lines in the colours of series."""

    def draw(axes):
        for position in range(count):
            axes.plot([0, 1], [0, position], color=series(position)[0])
        axes.set(xlabel="x")

    return draw_svg(draw, width=3, height=2, margins=(0.3, 0.3, 0.1, 0.1))


@pytest.mark.parametrize("ties", [False, True])
def test_area_under_the_roc_curve_is_the_auroc(ties):
    id_scores, ood_scores = RNG.normal(size=80), RNG.normal(1, size=60)
    if ties:
        id_scores, ood_scores = id_scores.round(), ood_scores.round()
    alarms, catches = roc(id_scores, ood_scores)
    area = float(auroc(torch.from_numpy(id_scores), torch.from_numpy(ood_scores)))
    assert np.trapezoid(catches, alarms) == pytest.approx(area, abs=1e-12)


def test_roc_curve_runs_from_nothing_to_everything():
    alarms, catches = roc(np.array([0.0, 1.0]), np.array([np.inf, 0.5]))
    assert (alarms[0], catches[0], alarms[-1], catches[-1]) == (0, 0, 1, 1)
    assert (np.diff(alarms) >= 0).all()
    assert (np.diff(catches) >= 0).all()


def test_the_same_figure_is_the_same_text():
    def draw() -> str:
        return themed(lines(2), "a")

    assert draw() == draw()


def test_figures_take_the_colours_of_the_page():
    svg = themed(lines(8), "a")
    assert svg.startswith("<svg")
    for name in ("soft", "line", *(f"series{i}" for i in range(8))):
        assert f"var(--{name})" in svg
    assert not [light for light, _ in COLOURS.values() if light in svg]


def test_without_matplotlib_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"matplotlib is needed here and is not installed: pip install 'offmap\[figures\]'"):
        lines(1)


def test_light_colours_differ_so_that_each_can_be_found():
    lights = [light for light, _ in COLOURS.values()]
    assert len(set(lights)) == len(lights)


def test_coordinates_are_rounded_and_words_are_not():
    svg = '<svg><path d="M 1.23456 2.5"/><text x="3.98765">0.0123</text></svg>'
    assert themed(svg, "a") == '<svg><path d="M 1.23 2.5"/><text x="3.98">0.0123</text></svg>'
