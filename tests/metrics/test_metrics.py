"""What all metrics share: each says which way it improves."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from offmap import metrics
from offmap.metrics import HIGHER_IS_BETTER

LOW, HIGH, ONES, SURE = torch.arange(4.0), torch.arange(4.0) + 2, torch.ones(4), torch.eye(4)
RIGHT, WRONG = torch.arange(4), torch.arange(4).flip(0)
NORMAL = torch.special.ndtri((torch.arange(4) + 0.5) / 4)

BETTER_AND_WORSE: dict[str, tuple[tuple[Any, ...], tuple[Any, ...]]] = {
    "auroc": ((LOW, HIGH), (HIGH, LOW)),
    "aupr_in": ((LOW, HIGH), (HIGH, LOW)),
    "aupr_out": ((LOW, HIGH), (HIGH, LOW)),
    "fpr_at": ((LOW, HIGH), (HIGH, LOW)),
    "expected_calibration_error": ((SURE, RIGHT), (SURE, WRONG)),
    "brier": ((SURE, RIGHT), (SURE, WRONG)),
    "ence": ((0 * ONES, ONES, ONES, 2), (0 * ONES, ONES, 3 * ONES, 2)),
    "quantile_ece": ((0 * ONES, ONES, NORMAL), (0 * ONES, ONES, 9 * ONES)),
    "mean_width": ((LOW, LOW + 1), (LOW, LOW + 2)),
    "interval_score": ((LOW, LOW + 1, LOW), (LOW, LOW + 2, LOW)),
    "aurc": ((LOW, LOW), (LOW, -LOW + 3)),
}
"""What a better and a worse method would be judged by: scores, predictions or intervals for the same examples."""


@pytest.mark.parametrize("name", BETTER_AND_WORSE)
def test_a_better_method_is_better_in_the_direction_that_the_metric_says(name: str) -> None:
    better, worse = (getattr(metrics, name)(*given) for given in BETTER_AND_WORSE[name])
    assert better != worse
    assert bool(better > worse) is HIGHER_IS_BETTER[name]


def test_the_best_method_has_the_lowest_mean_rank() -> None:
    ranks = metrics.mean_ranks(torch.tensor([[0.9, 0.8], [0.7, 0.6]]), higher_is_better=True)
    assert bool(ranks[0] > ranks[1]) is HIGHER_IS_BETTER["mean_ranks"]


def test_every_metric_says_which_way_is_better() -> None:
    curves = {"risk_coverage", "confidence_curve", "coverage_curve", "HIGHER_IS_BETTER"}
    assert set(HIGHER_IS_BETTER) == set(metrics.__all__) - curves
    between = {name for name, higher in HIGHER_IS_BETTER.items() if higher is None}
    assert between == {"coverage", "rank_correlation"} == set(HIGHER_IS_BETTER) - set(BETTER_AND_WORSE) - {"mean_ranks"}
