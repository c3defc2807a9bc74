"""What a guard says about itself."""

from __future__ import annotations

import math

import pytest
import torch

from offmap.guarding.answer import Calibration, joined
from offmap.likelihoods import Prediction
from trained import classes, classifier, quick, regression, regressor


def test_every_parameter_has_a_row() -> None:
    guard = quick(regressor(), regression(40, 0), regression(40, 1))
    table = guard.summary()
    assert [row["parameter"] for row in table.rows] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert [row["shape"] for row in table.rows] == [(12, 3), (12,), (1, 12), (1,)]
    assert [row["basis"] for row in table.rows] == ["svd", "identity", "svd", "identity"]
    text = str(table)
    for name in ("0.weight", "0.bias", "2.weight", "2.bias"):
        assert name in text


def test_widths_are_those_of_the_distribution() -> None:
    guard = quick(regressor(), regression(40, 0), regression(40, 1))
    scale = guard.predictive.q.scale()
    total = sum(float(s.double().log().sum()) for s in scale.values())
    for row in guard.summary().rows:
        s = scale[row["parameter"]]
        assert row["φ min"] == pytest.approx(s.min().item())
        assert row["φ max"] == pytest.approx(s.max().item())
        assert row["φ median"] == pytest.approx(s.median().item())
        assert row["share of Σ log φ"] == pytest.approx(float(s.double().log().sum()) / total)
    assert sum(row["share of Σ log φ"] for row in guard.summary().rows) == pytest.approx(1.0)


def test_parameters_that_are_not_random_are_listed_as_such() -> None:
    guard = quick(regressor(), regression(40, 0), regression(40, 1), where="2.weight")
    assert [row["random"] for row in guard.summary().rows] == [False, False, True, False]


def test_notes_tell_threshold_clip_calibration_and_entropy() -> None:
    guard = quick([classifier(0), classifier(1)], classes(40, 0), classes(40, 1))
    text = str(guard.summary())
    assert f"threshold {guard.threshold:.4g} · clip {guard.clip} · 8 draws · 2 member(s)" in text
    assert "false alarms 0.05 on 40 calibration rows (approximate: `valid` also chose τ and the clip)" in text
    assert f"with d = {guard.predictive.q.dimension}; fit finished" in text
    exact = str(guard.calibrate(classes(30, 3), 0.1).summary())
    assert "false alarms 0.1 on 30 calibration rows (exact: separate calibration data)" in exact


@pytest.mark.parametrize("members", [1, 3])
def test_entropy_of_the_mixture_lies_between_its_bounds(members: int) -> None:
    guard = quick([regressor(s) for s in range(members)], regression(40, 0), regression(40, 1))
    q = guard.predictive.q
    each = [
        sum(float(s[m].double().log().sum()) for s in q.scale().values()) + q.dimension * math.log(2 * math.sqrt(3))
        for m in range(members)
    ]
    low, high = q.mixture_entropy_bounds()
    assert low.item() == pytest.approx(sum(each) / members, rel=1e-5)
    assert high.item() == pytest.approx(sum(each) / members + math.log(members), rel=1e-5)
    assert f"entropy of the mixture between {low:.4g} and {high:.4g} nats" in str(guard.summary())


def test_noise_without_a_density_is_said_to_have_no_entropy() -> None:
    guard = quick(regressor(), regression(40, 0), regression(40, 1), noise="rademacher")
    assert "Rademacher noise has no density, so its weight entropy is not defined" in str(guard.summary())


def test_calibration_alone_knows_its_threshold() -> None:
    scores = torch.arange(20.0, 0.0, -1.0)
    assert Calibration(scores, scores).threshold == 20.0
    assert Calibration(scores[:18], scores[:18]).threshold == math.inf
    assert Calibration(scores, scores, false_alarms=0.5).threshold == 11.0


def test_joined_answers_keep_order_and_missing_fields() -> None:
    parts = [Prediction(mean=torch.tensor([1.0, 2.0])), Prediction(mean=torch.tensor([3.0]))]
    whole = joined(parts)
    assert whole.mean.tolist() == [1.0, 2.0, 3.0]
    assert whole.std is whole.probs is whole.label is None
