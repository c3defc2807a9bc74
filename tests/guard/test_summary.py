"""What a guard says about itself."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import offmap
from offmap.detector import Calibration, concat_results
from offmap.likelihoods import Prediction
from trained import classes, classifier, quick, regression, regressor
from zoo import Through


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
    q, rows = guard.predictive.q, guard.summary().rows
    for row in rows:
        s = q.scale()[row["parameter"]]
        assert row["φ min"] == pytest.approx(s.min().item())
        assert row["φ max"] == pytest.approx(s.max().item())
        assert row["φ median"] == pytest.approx(s.median().item())
        assert row["entropy"] == pytest.approx(float(s.double().log().sum()) + s.numel() * math.log(2 * math.sqrt(3)), rel=1e-5)
    assert sum(row["entropy"] for row in rows) == pytest.approx(float(q.entropy()), rel=1e-4)
    assert sum(row["share"] for row in rows) == pytest.approx(1.0)


def test_parameters_that_are_not_random_are_listed_as_such() -> None:
    guard = quick(regressor(), regression(40, 0), regression(40, 1), params="2.weight")
    rows = guard.summary().rows
    assert [row["random"] for row in rows] == [False, False, True, False]
    assert [row["why"] for row in rows] == ["not picked by `params`"] * 2 + ["", "not picked by `params`"]


def test_parameters_that_are_not_rotated_say_why() -> None:
    table = Through(
        lambda s, x: s.head(s.table(x).mean(1)), table=nn.Embedding(5, 4), head=nn.Linear(4, 2), spare=nn.Linear(1, 1)
    )
    data = torch.randint(5, (40, 3), generator=torch.Generator().manual_seed(0)), torch.zeros(40)
    rows = {row["parameter"]: row for row in quick(table, data, data).summary().rows}
    assert {name: (row["basis"], row["why"]) for name, row in rows.items()} == {
        "table.weight": ("identity", "looked up by index: its inputs already lie along its axes"),
        "head.weight": ("svd", ""),
        "head.bias": ("identity", "a bias, nothing to rotate"),
        "spare.weight": ("fixed", "no input reaches it"),
        "spare.bias": ("fixed", "no input reaches it"),
    }
    plain = quick(regressor(), regression(40, 0), regression(40, 1), basis="identity").summary()
    assert {row["why"] for row in plain.rows} == {"basis='identity'"}


def test_blocks_pieces_and_the_memory_of_bases_are_shown() -> None:
    net = nn.Sequential(nn.Conv1d(4, 6, 3, groups=2), nn.Flatten(), nn.Linear(12, 2))
    data = torch.randn(40, 4, 4, generator=torch.Generator().manual_seed(0)), torch.zeros(40)
    summary = quick(net, data, data, fan_in_limit=6).summary()
    rows = {row["parameter"]: row for row in summary.rows}
    assert rows["0.weight"]["basis"] == "svd, 2 blocks"
    assert rows["2.weight"]["basis"] == "svd, 2 pieces of its fan-in"
    assert rows["0.weight"]["basis MB"] == pytest.approx(2 * 6 * 6 * 4 / 1e6)
    assert "bases 0.000576 MB" in str(summary)


def test_notes_tell_threshold_clip_calibration_and_entropy() -> None:
    guard = quick([classifier(0), classifier(1)], classes(40, 0), classes(40, 1))
    text = str(guard.summary())
    assert f"threshold {guard.threshold:.4g} · clip {guard.clip} · 8 draws · 2 members" in text
    assert "at most 5 % false alarms, by 40 calibration rows (approximate: `valid` also chose τ and the clip)" in text
    assert f"with d = {guard.predictive.q.dimension}; the fit finished" in text
    weights = [f"{name} {weight:.2f}" for name, weight in guard.assess().weights.items()]
    assert [words.split()[0] for words in weights][:4] == ["disagreement", "energy", "gen", "inputs"]
    assert f"score 'default': {', '.join(weights)}; layers 2.weight; holds 40 training rows" in text
    exact = str(guard.calibrate(classes(30, 3), 0.1).summary())
    assert "at most 10 % false alarms, by 30 calibration rows (exact: separate calibration data)" in exact


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
    span = f"between {low:.4g} and {high:.4g}" if members > 1 else f"{low:.4g}"
    assert f"entropy of the weights {span} nats" in str(guard.summary())


def test_notes_name_what_other_scores_compare() -> None:
    def notes(**options: Any) -> str:
        return str(quick(regressor(), regression(40, 0), regression(40, 1), **options).summary())

    equal = "disagreement 0.25, inputs 0.25, layers 0.25, whitened 0.25"
    assert f"score 'equal': {equal}; layers 2.weight; holds 40 training rows" in notes(score="equal")
    pinned = notes(score={"inputs": 3, "disagreement": 1})
    assert "score 'weighted': inputs 0.75, disagreement 0.25; holds 40 training rows" in pinned
    assert "score 'paper': the draws' outputs alone\n" in notes(score="paper")
    assert "score: your own function of the outputs" in notes(score=lambda outputs: outputs.amax(0)[:, 0])
    few = quick(regressor(), tuple(t[:2] for t in regression(40, 0)), regression(40, 1))
    assert "score 'paper': the draws' outputs alone" in str(few.summary())


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
    whole = concat_results(parts)
    assert whole.mean.tolist() == [1.0, 2.0, 3.0]
    assert whole.std is whole.probs is whole.label is None


def test_the_repr_of_a_guard_is_two_lines_without_data() -> None:
    train, valid = regression(60, 0), regression(40, 1)
    guard = quick(regressor(), train, valid)
    ensemble = offmap.combine([guard, quick(regressor(1), train, valid)], valid)
    distilled = offmap.distill(guard, train, valid, rows=100)
    data = classes(200, 0), classes(60, 1)
    sorter = quick(classifier(), *data, likelihood="categorical")
    for detector in (guard, ensemble, distilled, sorter, *offmap.detect_all(classifier(), *data).values()):
        text = repr(detector)
        assert len(text) < 200
        assert text.count("\n") == 1
        assert text.startswith(type(detector).__name__)
        assert f"threshold {detector.threshold:.4g}" in text
        assert "tensor" not in text


def test_the_repr_of_results_names_shapes_of_many_numbers_and_shows_few() -> None:
    guard = quick(regressor(targets=2), regression(60, 0, 2), regression(60, 1, 2))
    rows = regression(900, 2, 2)
    evaluation = offmap.evaluate(guard, rows, {"far": 9 * rows[0]})
    records = [guard(rows[0]), guard.predict(rows[0]), guard.interval(rows[0]), guard.calibration, offmap.diagnose(guard, rows)]
    for record in [*records, evaluation, *evaluation.details.values(), *offmap.diagnose(guard, rows).layers]:
        assert "\n" not in repr(record)
        assert len(repr(record)) < 3000
    assert "mean=tensor of (900, 2), std=tensor of (900, 2), score=tensor of (900,)" in repr(guard(rows[0]))
    few = guard.interval(rows[0][:1])
    assert repr(few) == f"Interval(lower={few.lower}, upper={few.upper})"
