"""A diagnosis on one self-contained page."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

import offmap
import trained
from offmap.diagnosis import Diagnosis
from offmap.errors import FileError
from offmap.posterior.predictive import History
from offmap.report.diagnosis import MOST_PANELS, risk_limits, select_layers, trace_panels, write_diagnosis
from pages import check_page


@pytest.fixture(scope="module")
def diagnosis() -> Diagnosis:
    nets = [trained.regressor(m, log_variance=True) for m in range(2)]
    data = trained.regression(60), trained.regression(40, 1)
    guard = offmap.fit(nets, *data, steps=20, check_every=10, draws=4, risk_draws=4)
    return offmap.diagnose(guard, data[0])


def test_the_page_is_self_contained_and_described(diagnosis: Diagnosis, tmp_path: Path):
    path = write_diagnosis(diagnosis, tmp_path / "page.html", title="A & B")
    text = path.read_text(encoding="utf-8")
    labels = check_page(text).labels
    assert len(labels) == len(diagnosis.layers) + 3
    assert any("Mean φ over input amplitude of 0.weight, 3 directions: ρ −" in label for label in labels)
    assert "<title>A &amp; B</title>" in text
    assert "τ" in text


def test_a_closed_form_has_one_check_and_a_history_may_be_missing(diagnosis: Diagnosis, tmp_path: Path):
    guard = trained.quick(trained.regressor(), trained.regression())
    single = offmap.diagnose(guard, trained.regression())
    assert len(trace_panels(single.history)) == 3
    bare = Diagnosis(diagnosis.layers, History(), {"b": "a bias"})
    assert trace_panels(bare.history) == []
    write_diagnosis(bare, tmp_path / "page.html")
    assert "no history: the fit kept none" in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_of_many_layers_some_are_drawn_the_first_and_the_last_among_them(diagnosis: Diagnosis):
    first, last = diagnosis.layers
    drawn = select_layers([first, *[last] * 60, first])
    assert len(drawn) == MOST_PANELS
    assert drawn[0] is drawn[-1] is first
    assert select_layers([]) == []


def test_risks_far_above_the_threshold_are_cut_and_nothing_finite_has_no_limits():
    assert risk_limits(np.array([[0.0], [1.2]]), [1.0]) == pytest.approx((-0.05, 1.25))
    assert risk_limits(np.array([[math.inf]]), [1.0]) is None


def test_a_missing_folder_is_found_out_first(diagnosis: Diagnosis, tmp_path: Path):
    with pytest.raises(FileError, match="the folder .*/no does not exist"):
        write_diagnosis(diagnosis, tmp_path / "no" / "page.html")
