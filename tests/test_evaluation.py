"""Scorers × data sets, against numbers computed by hand, by loops and by scikit-learn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score, roc_auc_score
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import offmap
from offmap.data import Place, as_batches, load_rows
from offmap.errors import ConfigError, DataError, ModelError, ShapeError
from offmap.evaluation import measure_errors
from offmap_bench.methods import deep_ensemble
from trained import binary, binary_classifier, classes, classifier, inputs, quick, regression, regressor

DETECTION = {"auroc", "fpr95", "aupr_in", "aupr_out"}


@dataclass(frozen=True)
class First:
    """Scores by the first feature."""

    sign: float = 1.0

    def score(self, x: Tensor) -> Tensor:
        return self.sign * x[:, 0]


def column(*values: float) -> Tensor:
    return torch.tensor(values)[:, None]


@pytest.fixture(scope="module")
def guard() -> offmap.Guard:
    return quick(regressor(), regression(60, 0), regression(60, 1), calibration=regression(99, 2))


# ----------------------------------------------------------------------------------------------------------- detection


def test_detection_by_hand() -> None:
    # in-distribution 1, 2, 3, 4; OOD 2.5, 3, 5: of 12 pairs 2 + 2.5 + 4 are in order, ties counted half
    evaluation = offmap.evaluate(First(), (column(1, 2, 3, 4), torch.zeros(4)), {"far": column(2.5, 3, 5)})
    (row,) = evaluation.rows
    assert (row["scorer"], row["set"]) == ("guard", "far")
    assert row["auroc"] == pytest.approx(8.5 / 12)
    # 95 % of four in-distribution rows are four: t = 4, and 2.5 and 3 are at or below it
    assert row["fpr95"] == pytest.approx(2 / 3)
    assert row["aupr_in"] == pytest.approx(average_precision_score([1, 1, 1, 1, 0, 0, 0], [-1, -2, -3, -4, -2.5, -3, -5]))
    assert row["aupr_out"] == pytest.approx(average_precision_score([0, 0, 0, 0, 1, 1, 1], [1, 2, 3, 4, 2.5, 3, 5]))
    assert evaluation.scores["guard"]["test"].tolist() == [1, 2, 3, 4]
    assert evaluation.scores["guard"]["far"].tolist() == [2.5, 3, 5]


def test_false_positive_rate_both_ways() -> None:
    id_scores, ood_scores = torch.arange(1.0, 101.0), torch.arange(60.5, 160.5)
    data = (id_scores[:, None], torch.zeros(100))
    one = offmap.evaluate(First(), data, {"far": ood_scores[:, None]}).rows[0]["fpr95"]
    other = offmap.evaluate(First(), data, {"far": ood_scores[:, None]}, positive="ood").rows[0]["fpr95"]
    # OOD rows at or below the 95th of 100 in-distribution ones: 60.5 … 94.5
    assert one == pytest.approx(0.35)
    # in-distribution rows at or above the 95th largest OOD one, 65.5: 66 … 100
    assert other == pytest.approx(0.35)
    skewed = offmap.evaluate(First(), data, {"far": ood_scores[50:, None]}).rows[0]["fpr95"]
    assert skewed == pytest.approx(0.0)
    assert offmap.evaluate(First(), data, {"far": ood_scores[:2, None]}, positive="ood").rows[0]["fpr95"] == pytest.approx(0.4)
    assert offmap.evaluate(First(), data, {"far": ood_scores[:2, None]}).rows[0]["fpr95"] == pytest.approx(1.0)


def test_many_scorers_and_sets_give_a_row_each(guard: offmap.Guard) -> None:
    sets = {"far": 5 * inputs(30, 5), "near": inputs(40, 6)}
    evaluation = offmap.evaluate({"ours": guard, "first": First(), "last": First(-1.0)}, regression(50, 3), sets)
    assert [(r["scorer"], r["set"]) for r in evaluation.rows] == [
        ("ours", "test"), ("ours", "far"), ("ours", "near"),
        ("first", "far"), ("first", "near"), ("last", "far"), ("last", "near"),
    ]  # fmt: skip
    assert {name: {s: len(v) for s, v in scores.items()} for name, scores in evaluation.scores.items()} == {
        name: {"test": 50, "far": 30, "near": 40} for name in ("ours", "first", "last")
    }
    by = {(r["scorer"], r["set"]): r for r in evaluation.rows}
    assert by["first", "far"]["auroc"] == pytest.approx(1 - by["last", "far"]["auroc"])
    for (name, label), row in by.items():
        if label == "test":
            continue
        scores = evaluation.scores[name]
        truth = np.r_[np.zeros(50), np.ones(len(scores[label]))]
        both = torch.cat([scores["test"], scores[label]]).numpy()
        assert row["auroc"] == pytest.approx(roc_auc_score(truth, both), abs=1e-6)
        assert row["aupr_out"] == pytest.approx(average_precision_score(truth, both), abs=1e-6)
        assert row["aupr_in"] == pytest.approx(average_precision_score(1 - truth, -both), abs=1e-6)
    assert torch.equal(evaluation.scores["ours"]["far"], guard.score(sets["far"]))


def test_table_is_the_rows(guard: offmap.Guard) -> None:
    evaluation = offmap.evaluate(guard, regression(50, 3), {"far": 5 * inputs(30, 5)})
    table = evaluation.table()
    assert list(table.rows) == evaluation.rows
    lines = str(evaluation).splitlines()
    assert len(lines) == 3
    assert lines[0].split()[:3] == ["scorer", "set", "nll"]
    assert "far" in lines[2]


FORMS: dict[str, Any] = {
    "tensor": lambda x: x,
    "array": lambda x: x.double().numpy(),
    "pair": lambda x: (x, torch.zeros(len(x))),
    "unlabelled data set": TensorDataset,
    "labelled data set": lambda x: TensorDataset(x, torch.zeros(len(x))),
    "unlabelled loader": lambda x: DataLoader(TensorDataset(x), batch_size=7),
    "labelled loader": lambda x: DataLoader(TensorDataset(x, torch.zeros(len(x))), batch_size=7),
    "dict": lambda x: {"input": x},
    "labelled dict": lambda x: {"input": x, "labels": torch.zeros(len(x))},
}


@pytest.mark.parametrize("form", FORMS)
def test_ood_data_come_in_every_form_with_and_without_targets(form: str, guard: offmap.Guard) -> None:
    x = 5 * inputs(30, 5)
    evaluation = offmap.evaluate(guard, regression(50, 3), {"far": FORMS[form](x)})
    torch.testing.assert_close(evaluation.scores["guard"]["far"], guard.score(x), rtol=1e-4, atol=0)


@pytest.mark.parametrize("form", ["loader", "data set", "arrays", "dict"])
def test_id_data_come_in_every_form(form: str, guard: offmap.Guard) -> None:
    x, y = regression(50, 3)
    data = {
        "loader": DataLoader(TensorDataset(x, y), batch_size=50),
        "data set": TensorDataset(x, y),
        "arrays": (x.numpy(), y.numpy()),
        "dict": {"input": x, "result": y},
    }[form]
    one = offmap.evaluate(guard, data, {"far": 5 * x}, target="result").rows[0]
    assert one == offmap.evaluate(guard, (x, y), {"far": 5 * x}).rows[0]


# ------------------------------------------------------------------------------------------------------------- quality


@pytest.mark.parametrize("prefix", ["", "wide_"])
def test_regression_quality_by_hand(guard: offmap.Guard, prefix: str) -> None:
    x, y = regression(50, 3)
    row = offmap.evaluate(guard, (x, y), {"far": 5 * x}).rows[0]
    prediction = guard.predict(x, clip=guard.clip if prefix == "" else None)
    mean, std = prediction.mean.double(), prediction.std.double()
    assert row[f"{prefix}rmse"] == pytest.approx((mean - y).square().mean().sqrt().item(), rel=1e-4)
    law = torch.distributions.Normal(mean, std)
    assert row[f"{prefix}nll"] == pytest.approx(-law.log_prob(y.double()).mean().item(), rel=1e-4)
    inside = (y - mean).abs() <= 1.959964 * std
    assert row[f"{prefix}coverage"] == pytest.approx(inside.float().mean().item())
    assert row[f"{prefix}width"] == pytest.approx((2 * 1.959964 * std).mean().item(), rel=1e-5)
    levels = np.arange(1, 11) / 11
    between = 2 * (law.cdf(y.double()) - 0.5).abs()
    gaps = [abs(level - (between <= level).double().mean().item()) for level in levels]
    assert row[f"{prefix}ece"] == pytest.approx(np.mean(gaps), abs=1e-6)


def test_conformal_coverage_and_width_by_hand(guard: offmap.Guard) -> None:
    x, y = regression(50, 3)
    row = offmap.evaluate(guard, (x, y), {"far": 5 * x}).rows[0]
    interval = guard.interval(x, 0.95)
    assert row["conformal_coverage"] == pytest.approx(((interval.lower <= y) & (y <= interval.upper)).float().mean().item())
    assert row["conformal_width"] == pytest.approx((interval.upper - interval.lower).mean().item(), rel=1e-5)


@pytest.mark.parametrize("kind", ["classes", "binary", "binary column"])
def test_classification_quality_by_hand(kind: str) -> None:
    net, data = (classifier, classes) if kind == "classes" else (binary_classifier, binary)
    sorter = quick(net(), data(60, 0), data(60, 1), calibration=data(99, 2))
    x, y = data(50, 3)
    given = y[:, None] if kind == "binary column" else y
    row = offmap.evaluate(sorter, (x, given), {"far": 5 * x}).rows[0]
    y = y.long()
    probs = sorter.predict(x).probs
    assert row["accuracy"] == pytest.approx((probs.argmax(1) == y).float().mean().item())
    assert row["nll"] == pytest.approx(-probs[torch.arange(50), y].log().mean().item(), rel=1e-4)
    confidence, predicted = probs.max(1)
    gap = 0.0
    for low in np.arange(15) / 15:
        chosen = (confidence > low) & (confidence <= low + 1 / 15)
        if chosen.any():
            gap += chosen.float().mean().item() * abs((predicted == y)[chosen].float().mean() - confidence[chosen].mean()).item()
    assert row["ece"] == pytest.approx(gap, abs=1e-5)
    chosen = sorter.prediction_set(x, 0.95)
    assert row["conformal_coverage"] == pytest.approx(chosen[torch.arange(50), y].float().mean().item())
    assert row["conformal_width"] == pytest.approx(chosen.sum(1).float().mean().item())
    assert "rmse" not in row
    assert {"wide_nll", "wide_accuracy", "wide_ece"} <= set(row)


def test_several_targets_are_pooled() -> None:
    made = quick(regressor(targets=2), regression(60, 0, 2), regression(60, 1, 2))
    x, y = regression(50, 3, 2)
    row = offmap.evaluate(made, (x, y), {"far": 5 * x}).rows[0]
    assert row["rmse"] == pytest.approx((made.predict(x).mean - y).square().mean().sqrt().item(), rel=1e-4)
    assert 0.8 < row["conformal_coverage"] <= 1.0


def test_deep_ensembles_and_maxwent_stand_in_one_table() -> None:
    train, valid, test = regression(60, 0), regression(60, 1), regression(50, 3)
    nets = [regressor(s) for s in range(3)]
    place = Place(torch.device("cpu"), torch.float32)
    rows, held = as_batches(train, place, name="train"), load_rows(as_batches(valid, place, name="valid"))
    law = offmap.Gaussian(noise=torch.tensor([0.1]))
    trained = deep_ensemble.fit(nets, rows, held, likelihood=law, config=deep_ensemble.Config(steps=20, check_every=10))
    scorers = {
        "deep ensemble": offmap.guard(trained, valid),
        "one net": offmap.guard(
            deep_ensemble.fit(nets[0], rows, held, likelihood=law, config=deep_ensemble.Config(steps=5)), valid
        ),
        "maxwent": quick(nets, train, valid),
        "maxwent svd x1": quick(nets[0], train, valid, basis="svd"),
    }
    evaluation = offmap.evaluate(scorers, test, {"far": 5 * inputs(40, 5)})
    assert [r["scorer"] for r in evaluation.rows] == [name for name in scorers for _ in range(2)]
    for row in evaluation.rows:
        assert set(row) >= DETECTION if row["set"] == "far" else {"nll", "rmse", "wide_rmse"} <= set(row)
        assert all(np.isfinite(v) for v in row.values() if isinstance(v, float))
    by = {(r["scorer"], r["set"]): r for r in evaluation.rows}
    assert by["maxwent", "far"]["auroc"] > 0.9
    # nothing is clipped in an ensemble of plain models
    assert by["deep ensemble", "test"]["rmse"] == by["deep ensemble", "test"]["wide_rmse"]


# ----------------------------------------------------------------------------------------------------------- bad input


def test_what_cannot_be_evaluated_is_refused(guard: offmap.Guard) -> None:
    test, far = regression(50, 3), {"far": 5 * inputs(30, 5)}
    with pytest.raises(DataError, match="at least one scorer and one OOD data set in `ood`, but got none"):
        offmap.evaluate(guard, test, {})
    with pytest.raises(DataError, match="at least one scorer"):
        offmap.evaluate({}, test, far)
    with pytest.raises(DataError, match="Expected `ood` to be a dict of data sets by name, but got tuple"):
        offmap.evaluate(guard, test, test)
    with pytest.raises(DataError, match="other than 'test', which is the in-distribution one's. Rename it"):
        offmap.evaluate(guard, test, {"test": far["far"]})
    with pytest.raises(ConfigError, match="Expected scorers with a `score` method, but 'guard' is of type str"):
        offmap.evaluate("guard", test, far)
    with pytest.raises(ConfigError, match="Expected scorers with a `score` method, but 'b' is of type Sequential"):
        offmap.evaluate({"a": guard, "b": regressor()}, test, far)
    with pytest.raises(ConfigError, match="Expected `positive` to be one of .'id', 'ood'.*but got 'odd'"):
        offmap.evaluate(guard, test, far, positive="odd")


def test_id_data_that_do_not_fit_are_refused(guard: offmap.Guard) -> None:
    far = {"far": 5 * inputs(30, 5)}
    with pytest.raises(DataError, match="Expected finite inputs, but row 0 of `test`"):
        offmap.evaluate(guard, (inputs(5) * torch.nan, torch.zeros(5)), far)
    with pytest.raises(ShapeError, match=r"for the gaussian likelihood, but got targets \(50, 2\)"):
        offmap.evaluate(guard, regression(50, 3, 2), far)
    with pytest.raises(DataError, match="at least one example in `test`, but it is empty"):
        offmap.evaluate(guard, (inputs(0), torch.zeros(0)), far)
    sorter = quick(classifier(), classes(60, 0), classes(60, 1))
    x, y = classes(50, 3)
    with pytest.raises(DataError, match="but `test` holds values from 1 to 3"):
        offmap.evaluate(sorter, (x, y + 1), far)


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        (inputs(0), DataError, "Expected at least one input, but got none"),
        (DataLoader(TensorDataset(inputs(0))), DataError, "Expected at least one example in `far`, but it is empty"),
        (inputs(9) * torch.inf, DataError, "Expected finite inputs"),
        (inputs(9, features=4), ModelError, r"failed on inputs of shape \(9, 4\)"),
        ("far", DataError, "Expected tensors or arrays with one row per example"),
    ],
)
def test_ood_data_that_do_not_fit_are_refused(guard: offmap.Guard, data: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        offmap.evaluate(guard, regression(50, 3), {"far": data})


# -------------------------------------------------------------------------------------------- how errors are ranked

ERRORS = {"error", "error_unflagged", "aurc"}


def errors_by_hand(guard: offmap.Guard, x: Tensor, losses: Tensor) -> dict[str, float]:
    """Mean loss of all rows, of those that are not flagged, and the mean over shares of the mean loss of the lowest scores."""
    scores, losses = guard.score(x), losses.double()
    order = scores.argsort()
    risks = [float(losses[order[: k + 1]].mean()) for k in range(len(order))]
    kept = losses[scores <= guard.threshold]
    return {"error": float(losses.mean()), "error_unflagged": float(kept.mean()), "aurc": float(np.mean(risks))}


def row_of(evaluation: offmap.Evaluation, label: str) -> dict[str, Any]:
    return next(row for row in evaluation.rows if row["set"] == label)


def test_errors_of_a_regression_are_measured_on_test_data_and_ood_sets_with_targets(guard: offmap.Guard) -> None:
    (x, y), (far, z) = regression(50, 3), regression(40, 5)
    far = 2 * far
    evaluation = offmap.evaluate(guard, (x, y), {"far": (far, z), "bare": far})
    for label, rows, targets in (("test", x, y), ("far", far, z)):
        expected = errors_by_hand(guard, rows, (guard.predict(rows).mean - targets).square())
        found = row_of(evaluation, label)
        assert {name: found[name] for name in ERRORS} == pytest.approx(expected, rel=1e-5)
    assert not ERRORS & set(row_of(evaluation, "bare"))
    assert {n: row_of(evaluation, "bare")[n] for n in DETECTION} == {n: row_of(evaluation, "far")[n] for n in DETECTION}


def test_errors_of_a_classification_are_shares_of_wrong_labels() -> None:
    sorter = quick(classifier(), classes(60, 0), classes(60, 1), calibration=classes(99, 2))
    (x, y), (near, z) = classes(50, 3), classes(40, 5)
    evaluation = offmap.evaluate(sorter, (x, y), {"near": (near + 0.3, z)})
    expected = errors_by_hand(sorter, near + 0.3, sorter.predict(near + 0.3).label != z)
    found = row_of(evaluation, "near")
    assert {name: found[name] for name in ERRORS} == pytest.approx(expected)
    assert row_of(evaluation, "test")["error"] == pytest.approx(1 - row_of(evaluation, "test")["accuracy"])


LABELLED: dict[str, Any] = {
    "arrays": lambda x, y: (x.double().numpy(), y.numpy()),
    "data set": TensorDataset,
    "loader": lambda x, y: DataLoader(TensorDataset(x, y), batch_size=7),
    "dict": lambda x, y: {"input": x, "labels": y},
    "loader of dicts": lambda x, y: DataLoader([{"input": a, "labels": b} for a, b in zip(x, y, strict=True)], batch_size=7),
}


@pytest.mark.parametrize("form", LABELLED)
def test_targets_of_ood_data_are_read_in_every_form(form: str, guard: offmap.Guard) -> None:
    x, y = regression(40, 5)
    found = row_of(offmap.evaluate(guard, regression(50, 3), {"far": LABELLED[form](2 * x, y)}), "far")
    pair = row_of(offmap.evaluate(guard, regression(50, 3), {"far": (2 * x, y)}), "far")
    assert {name: found[name] for name in ERRORS} == pytest.approx({name: pair[name] for name in ERRORS}, rel=1e-4)


@pytest.mark.parametrize(
    "targets",
    [torch.zeros(40, 2), torch.full((40,), torch.nan), torch.zeros(39), ["a"] * 40, None],
    ids=["shape", "nan", "rows", "words", "none"],
)
def test_ood_targets_of_another_task_are_left_aside(targets: Any, guard: offmap.Guard) -> None:
    x = 2 * inputs(40, 5)
    evaluation = offmap.evaluate(guard, regression(50, 3), {"far": (x, targets)})
    assert set(row_of(evaluation, "far")) == {"scorer", "set", *DETECTION}
    assert torch.equal(evaluation.scores["guard"]["far"], guard.score(x))


def test_ood_labels_that_are_no_classes_of_the_model_are_left_aside() -> None:
    sorter = quick(classifier(), classes(60, 0), classes(60, 1))
    x, y = classes(40, 5)
    for labels in (y + 1, y - 1, torch.full_like(y, -100)):
        assert not ERRORS & set(row_of(offmap.evaluate(sorter, classes(50, 3), {"far": (3 * x, labels)}), "far"))


def test_rows_without_a_target_do_not_count_as_errors() -> None:
    sorter = quick(classifier(), classes(60, 0), classes(60, 1))
    x, y = classes(40, 5)
    some = y.masked_fill(torch.arange(40) % 2 == 0, -100)
    evaluation = offmap.evaluate(sorter, classes(50, 3), {"some": (x, some), "odd": (x[1::2], y[1::2])})
    assert {n: row_of(evaluation, "some")[n] for n in ERRORS} == {n: row_of(evaluation, "odd")[n] for n in ERRORS}


def test_scorers_that_predict_nothing_have_no_errors() -> None:
    (row,) = offmap.evaluate(First(), (column(1, 2, 3), torch.zeros(3)), {"far": (column(4, 5), torch.zeros(2))}).rows
    assert not ERRORS & set(row)


def test_errors_are_measured_where_all_is_flagged_where_losses_overflow_and_where_there_are_none() -> None:
    scores = torch.tensor([1.0, 2.0])
    flagged = measure_errors(scores, torch.tensor([0.0, 1.0]), 0.5)
    assert (flagged["error"], flagged["aurc"]) == (0.5, 0.25)
    assert np.isnan(flagged["error_unflagged"])
    assert measure_errors(scores, torch.tensor([0.0, torch.inf]), 1.5) == {
        "error": np.inf, "error_unflagged": 0.0, "aurc": np.inf
    }  # fmt: skip
    assert measure_errors(scores, torch.full((2,), torch.nan), 1.5) == {}


# ----------------------------------------------------------------------------------------------------- kept for a page


def test_examples_are_the_rows_at_either_end() -> None:
    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    y = torch.arange(40.0)
    loader = DataLoader(TensorDataset(x), batch_size=7)
    details = offmap.evaluate(First(), (x, y), {"far": loader}).details["guard"]
    order = x[:, 0].argsort().tolist()
    for label in ("test", "far"):
        kept = details.examples[label]
        assert [e.index for e in kept] == [*order[:5], *order[-5:]]
        for example in kept:
            assert torch.equal(example.inputs, x[[example.index]])
            assert example.score == float(x[example.index, 0])
    assert [float(e.target) for e in details.examples["test"]] == [float(e.index) for e in details.examples["test"]]
    assert all(e.target is None for e in details.examples["far"])


def test_examples_do_not_keep_the_data_alive() -> None:
    x = torch.randn(1000, 3, generator=torch.Generator().manual_seed(0))
    details = offmap.evaluate(First(), (x, torch.zeros(1000)), {"far": x}).details["guard"]
    assert all(e.inputs.untyped_storage().nbytes() == 12 for kept in details.examples.values() for e in kept)


@pytest.mark.parametrize(("features", "kept"), [(1, True), (2, True), (3, False)])
def test_points_are_kept_where_they_can_be_drawn(features: int, kept: bool) -> None:
    x = inputs(500, 0, features)
    points = offmap.evaluate(First(), (x, x[:, 0]), {"far": 5 * x[:20]}).points
    assert set(points) == ({"test", "far"} if kept else set())
    if kept:
        assert points["test"].inputs.shape == (300, features)
        assert torch.equal(points["test"].inputs[:, 0], points["test"].targets)
        assert torch.equal(points["far"].inputs, 5 * x[:20])


def test_losses_and_reliability_of_a_regression_by_hand(guard: offmap.Guard) -> None:
    x, y = regression(50, 3)
    evaluation = offmap.evaluate(guard, (x, y), {"far": 5 * x})
    details = evaluation.details["guard"]
    torch.testing.assert_close(details.losses, (guard.predict(x).mean - y).square())
    assert details.losses.mean().sqrt().item() == pytest.approx(evaluation.rows[0]["rmse"], rel=1e-5)
    for name, clip in (("own", guard.clip), ("wide", None)):
        predicted = guard.predict(x, clip=clip)
        law = torch.distributions.Normal(predicted.mean.double(), predicted.std.double())
        between = 2 * (law.cdf(y.double()) - 0.5).abs()
        for level, share, rows in details.reliability[name].tolist():
            assert share == pytest.approx((between <= level).double().mean().item(), abs=1e-9)
            assert rows == 50


def test_losses_and_reliability_of_a_classification_by_hand() -> None:
    sorter = quick(classifier(), classes(60, 0), classes(60, 1))
    x, y = classes(50, 3)
    details = offmap.evaluate(sorter, (x, y), {"far": 5 * x}).details["guard"]
    confidence, predicted = sorter.predict(x).probs.max(1)
    assert torch.equal(details.losses, (predicted != y).double())
    assert details.reliability["own"][:, 2].sum() == 50
    for stated, right, rows in details.reliability["own"].tolist():
        low = np.ceil(10 * stated) / 10 - 0.1
        chosen = (confidence > low) & (confidence <= low + 0.1)
        assert rows == int(chosen.sum())
        assert stated == pytest.approx(confidence[chosen].double().mean().item(), abs=1e-6)
        assert right == pytest.approx((predicted == y)[chosen].double().mean().item())
