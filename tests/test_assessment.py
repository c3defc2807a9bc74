"""What a guard says of its own sight: kinds of shift, what is not seen, how errors are ranked, and when it cannot be told."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import offmap
from offmap.assessment import KINDS, Assessment, Shift, can_assess, mean_terms
from offmap.errors import ConfigError
from trained import classes, classifier, inputs, quick, regression, regressor


@pytest.fixture(scope="module")
def guard() -> offmap.Guard:
    return quick(regressor(), regression(120, 0), regression(120, 1))


def shift(kind: str, auroc: float, flagged: float = 10.0, **terms: float) -> Shift:
    return Shift(kind, f"a {kind}", auroc, flagged, terms)


def test_a_regression_is_assessed_by_every_kind_of_shift(guard: offmap.Guard) -> None:
    assessment = guard.assess()
    assert isinstance(assessment, offmap.Assessment)
    assert list(assessment.kinds()) == ["beyond", "between", "cluster", "corruption"]
    assert sum(map(len, assessment.kinds().values())) == len(assessment.shifts)
    for each in assessment.shifts:
        assert 0 <= each.auroc <= 100
        assert 0 <= each.flagged <= 100
        assert all(0 <= value <= 100 for value in each.terms.values())
        assert set(each.terms) <= set(assessment.weights)
    assert 50 < assessment.auroc < 100
    assert sum(assessment.weights.values()) == pytest.approx(1)
    assert list(assessment.weights) == list(guard.terms(inputs(2)))
    assert assessment.false_alarms == 0.05


def test_classes_are_left_out_of_a_classification() -> None:
    assessment = quick(classifier(), classes(120, 0), classes(60, 1)).assess()
    assert len(assessment.kinds()["class"]) == 3
    assert "energy" in assessment.weights


def test_values_of_one_column_alone_are_not_mixed_into_the_same_rows() -> None:
    x = torch.linspace(-1, 1, 120)[:, None]
    net = torch.nn.Sequential(torch.nn.Linear(1, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
    assessed = quick(net, (x[::2], x[::2]), (x[1::2], x[1::2])).assess()
    assert "corruption" not in assessed.kinds()


def test_the_table_has_a_row_per_kind_with_means_and_the_worst(guard: offmap.Guard) -> None:
    assessment = guard.assess()
    rows = {row["shift"]: row for row in assessment.table().rows}
    assert list(rows) == [KINDS[kind] for kind in assessment.kinds()]
    for kind, shifts in assessment.kinds().items():
        row = rows[KINDS[kind]]
        assert row["tried"] == len(shifts)
        assert float(row["AUROC"]) == pytest.approx(sum(s.auroc for s in shifts) / len(shifts), abs=0.05)
        assert float(row["flagged"].removesuffix(" %")) == pytest.approx(sum(s.flagged for s in shifts) / len(shifts), abs=0.5)
        assert float(row["worst"]) == pytest.approx(min(s.auroc for s in shifts), abs=0.5)
        best, value = row["best term"].rsplit(" ", 1)
        assert float(value) == pytest.approx(max(mean_terms(shifts).values()), abs=0.05)
        assert mean_terms(shifts)[best] == max(mean_terms(shifts).values())
    assert str(assessment) == repr(assessment) == str(assessment.table())


def test_shifts_that_are_not_seen_are_named_the_worst_first() -> None:
    shifts = [shift("beyond", 99.0), shift("between", 70.0, 4.4), shift("cluster", 40.0, 0.0), shift("group", 80.0)]
    assessment = Assessment(shifts, {"inputs": 1.0}, {}, 0.05)
    assert assessment.blind() == [
        "a cluster: 40 % AUROC, 0 % flagged, hardly seen",
        "a between: 70 % AUROC, 4 % flagged, not reliably seen",
    ]
    assert assessment.notes() == ["Not reliably seen: 2 of 4 shifts", *(f"  {words}" for words in assessment.blind())]
    assert assessment.auroc == pytest.approx((99 + 70 + 40 + 80) / 4)


def test_many_shifts_that_are_not_seen_are_counted() -> None:
    notes = Assessment([shift("beyond", 50.0 + i) for i in range(8)], {"inputs": 1.0}, {}, 0.05).notes()
    assert notes[0] == "Not reliably seen: 8 of 8 shifts"
    assert len(notes) == 7
    assert notes[-1] == "  and 3 more"


def test_kinds_count_the_same_however_many_shifts_they_have() -> None:
    assessment = Assessment([shift("beyond", 90.0)] * 3 + [shift("group", 50.0)], {"inputs": 1.0}, {}, 0.05)
    assert assessment.auroc == pytest.approx(70)


def test_all_that_was_tried_is_seen() -> None:
    assessment = Assessment([shift("beyond", 80.0, inputs=80.0)], {"inputs": 1.0}, {}, 0.05)
    assert assessment.blind() == []
    assert assessment.notes() == ["All shifts that were tried are seen reliably."]


def test_terms_that_only_some_shifts_have_are_averaged_over_those() -> None:
    assert mean_terms([shift("beyond", 80.0, a=80.0), shift("beyond", 80.0, a=60.0, b=50.0)]) == {"a": 70.0, "b": 50.0}


@pytest.mark.parametrize(
    ("errors", "best"),
    [
        ({}, None),
        ({"inputs": 0.5, "score": math.nan}, None),
        ({"inputs": 0.5, "score": 0.45}, None),
        ({"inputs": math.nan, "score": 0.1}, None),
        ({"inputs": 0.5, "energy": 0.2, "score": 0.1}, "inputs"),
    ],
)
def test_a_term_that_ranks_errors_much_better_than_the_score_is_named(errors: dict[str, float], best: str | None) -> None:
    assessment = Assessment([shift("beyond", 99.0)], {"inputs": 1.0}, errors, 0.05)
    assert assessment.best_ranking == best
    notes = assessment.error_notes()
    assert (len(notes) == 2) == (best is not None)
    if best is not None:
        assert notes == [
            "The score ranks the model's errors with correlation +0.10.",
            "The term 'inputs' ranks them much better, +0.50: to find errors rather than OOD inputs, use "
            "`guard.terms(x)['inputs']`.",
        ]


def test_errors_are_ranked_against_validation_rows(guard: offmap.Guard) -> None:
    assessment = guard.assess()
    assert set(assessment.errors) == {*assessment.weights, "score"}
    assert all(-1 <= value <= 1 for value in assessment.errors.values())
    assert f"The score ranks the model's errors with correlation {assessment.errors['score']:+.2f}." in str(assessment)


def test_columns_are_named_where_the_guard_knows_them(guard: offmap.Guard) -> None:
    numbers = {s.name for s in guard.assess().shifts}
    assert "beyond the data, outer half of column 2" in numbers
    names = {s.name for s in replace(guard, about={"inputs": ["speed", "load", "wear"]}).assess().shifts}
    assert {"beyond the data, outer half of column `wear`", "between the data, inner half of column `speed`"} <= names
    assert not any("column 0" in name for name in names)
    assert len(names) == len(numbers)


def test_the_number_of_a_column_is_not_the_beginning_of_another() -> None:
    x = torch.randn(80, 12, generator=torch.Generator().manual_seed(0))
    data = (x, x[:, 0])
    guard = quick(torch.nn.Linear(12, 1), data, (x[:40] + 0.01, x[:40, 0]))
    names = [f"name{i}" for i in range(12)]
    told = [s.name for s in guard.assess().shifts if " of column " in s.name]
    named = [s.name for s in replace(guard, about={"inputs": names}).assess().shifts if " of column " in s.name]
    for number, name in zip(told, named, strict=True):
        assert name.endswith(f"`name{number.rsplit(' ', 1)[1]}`")


@pytest.mark.parametrize("score", ["paper", "epistemic"])
def test_a_score_that_compares_with_no_rows_cannot_be_assessed(score: str) -> None:
    guard = quick(regressor(), regression(60, 0), regression(60, 1), score=score)
    assert not can_assess(guard)
    with pytest.raises(ConfigError) as raised:
        guard.assess()
    assert str(raised.value) == (
        f"Expected a guard that compares with training rows, as score='default' does, to assess, but got score '{score}'. Fit "
        "with score='default', and pass training rows."
    )


def test_a_score_of_the_users_cannot_be_assessed() -> None:
    guard = quick(regressor(), regression(60, 0), regression(60, 1), score=lambda outputs: outputs.var(0))
    with pytest.raises(ConfigError, match="to assess, but got score 'of your own'. Fit with score='default'"):
        guard.assess()


@pytest.mark.parametrize("score", ["equal", "distance", {"inputs": 1.0, "disagreement": 3.0}])
def test_other_scores_that_join_terms_can_be_assessed(score: Any) -> None:
    assessment = quick(regressor(), regression(60, 0), regression(60, 1), score=score).assess()
    if score == "equal":
        assert set(assessment.weights.values()) == {1 / len(assessment.weights)}
    elif score == "distance":
        assert "disagreement" not in assessment.weights
    else:
        assert assessment.weights == {"inputs": 0.25, "disagreement": 0.75}


def test_an_assessment_survives_a_file_to_the_bit(guard: offmap.Guard, tmp_path: Path) -> None:
    replace(guard, about={"inputs": ["a", "b", "c"]}).save(tmp_path / "guard")
    again = offmap.load(tmp_path / "guard", regressor())
    assert again.assess() == replace(guard, about={"inputs": ["a", "b", "c"]}).assess()


def test_groups_are_left_out_in_turn() -> None:
    sites = [f"site {int(value)}" for value in (regression(120, 0)[0][:, 0] > 0)]
    guard = quick(regressor(), regression(120, 0), regression(60, 1), groups=sites)
    groups = guard.assess().kinds()["group"]
    assert {s.name for s in groups} == {"group site 0", "group site 1"}
    with pytest.raises(
        ConfigError, match="Expected `valid`, for rows of `train` stand in for it, where `groups` names the group"
    ):
        quick(regressor(), regression(120, 0), groups=sites)


def test_too_few_rows_to_try_anything_are_mentioned() -> None:
    assessment = quick(regressor(), regression(20, 0), regression(4, 1)).assess()
    assert (list(assessment.shifts), assessment.blind()) == ([], [])
    assert math.isnan(assessment.auroc)
    assert str(assessment) == "Nothing was tried: there are too few training rows to leave some out."


def test_too_few_rows_to_leave_some_out_are_mentioned() -> None:
    assessment = quick(regressor(), regression(20, 0), regression(20, 1)).assess()
    assert list(assessment.kinds()) == ["corruption"]
    assert assessment.sight_notes()[-1] == "No training rows were left out: there are too few of them."


def test_an_assessment_is_plain_values_for_json(guard: offmap.Guard) -> None:
    assessment = guard.assess()
    record = json.loads(json.dumps(assessment.to_dict()))
    assert set(record) == {"auroc", "kinds", "blind", "weights", "errors", "false_alarms"}
    assert record["auroc"] == assessment.auroc
    assert set(record["kinds"]) == set(assessment.kinds())
    for kind, shifts in assessment.kinds().items():
        assert record["kinds"][kind] == {
            "tried": len(shifts),
            "auroc": pytest.approx(sum(s.auroc for s in shifts) / len(shifts)),
            "worst": min(s.auroc for s in shifts),
            "flagged": pytest.approx(sum(s.flagged for s in shifts) / len(shifts)),
        }
    assert (record["blind"], record["weights"]) == (assessment.blind(), assessment.weights)
