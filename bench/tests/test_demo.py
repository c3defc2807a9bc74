"""The demo tells what was run, and runs the same anywhere."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from offmap.metrics import auroc
from offmap_bench.demo import run as plans
from offmap_bench.demo import story
from offmap_bench.demo.run import run


@pytest.fixture(scope="module")
def result():
    """The moons in a hurry."""
    plan = replace(plans.quick(plans.MOONS), steps=20, grid=8)
    return run(plan, 0)


def test_every_method_has_scores_seconds_and_a_view(result):
    assert tuple(result.evaluation.scores) == plans.METHODS
    assert set(result.seconds) == set(plans.METHODS)
    assert set(result.views) == {*plans.METHODS} - {plans.JOINED, plans.NEAREST} | {"MaxWEnt-SVD, clipped at 2"}
    for view in result.views.values():
        assert view["entropy"].shape == (8, 8)
        assert view["entropy"].max() <= story.TOP + 1e-6


def test_the_table_holds_the_numbers_of_the_run(result):
    table = story.tabulate(result)
    assert table.columns == ["method", "AUROC", "FPR@95", "accuracy", "fit, s"]
    for row in table.rows:
        scores = result.evaluation.scores[row["method"]]
        area = 100 * float(auroc(scores["test"], scores["off the moons"]))
        assert row["AUROC"] == f"{area:.1f}"
    assert [row["method"] for row in table.rows if row["fit, s"].startswith("+")] == list(story.ON_TOP)
    assert table.rows[-1]["accuracy"] == "–"


def test_the_same_seed_gives_the_same_scores(result):
    again = run(result.plan, 0)
    for name in (plans.PLAIN, plans.DROPOUT, plans.SVD):
        for part, scores in result.evaluation.scores[name].items():
            torch.testing.assert_close(again.evaluation.scores[name][part], scores)


def test_the_number_of_threads_is_left_as_it_was(result):
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with pytest.raises(ZeroDivisionError):
            run(replace(result.plan, task=lambda: 1 // 0), 0)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
