"""A head that learned a guard's score: on its scale, in its order, from in-distribution data alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import offmap
from offmap.errors import ConfigError, DataError, ModelError
from offmap.export.distill import fit_whitening, make_ood_rows, train_head
from offmap.export.onnx import open_session
from offmap.metrics import auroc
from offmap.model.params import all_params
from offmap_bench.nets.lenet import lenet
from trained import classes, classifier, inputs, quick, regression, regressor

TRAIN, VALID = regression(200, 0), regression(100, 1)


@pytest.fixture(scope="module")
def guard() -> offmap.Guard:
    return quick(regressor(), TRAIN, VALID)


@pytest.fixture(scope="module")
def one(guard: offmap.Guard) -> offmap.DistilledGuard:
    return offmap.distill(guard, TRAIN, VALID, rows=3000)


def ranks(values: Tensor) -> Tensor:
    return values.argsort().argsort().double()


def test_it_orders_rows_as_the_guard_does(guard: offmap.Guard, one: offmap.DistilledGuard) -> None:
    x = inputs(400, 5) * torch.linspace(0.5, 3, 400).unsqueeze(1)
    order = torch.stack([ranks(guard.score(x)), ranks(one.score(x))])
    assert torch.corrcoef(order)[0, 1] > 0.95
    near, far = inputs(300, 6), inputs(300, 7) + torch.tensor([3.0, -2.0, 0.0])
    assert auroc(one.score(near), one.score(far)) > 0.97 * auroc(guard.score(near), guard.score(far))


def test_far_rows_rank_as_the_guards_do_in_log_units_also_in_onnx_runtime(
    guard: offmap.Guard, one: offmap.DistilledGuard, tmp_path: Path
) -> None:
    x = torch.cat([scale * inputs(60, 5) for scale in (1, 3, 10, 30, 100, 300, 1000)])
    expected, score = guard.score(x), one.score(x)
    assert torch.corrcoef(torch.stack([ranks(expected), ranks(score)]))[0, 1] > 0.95
    assert len(score.unique()) == len(score)
    ratio = (score / expected)[180:]  # from thirty times the data on
    assert ratio.min() > 1 / 3
    assert ratio.max() < 3
    assert one.score(1e12 * x).max() < 10 * expected.max()
    path = one.export(tmp_path / "far.onnx", inputs(4, 2)).path
    (exported,) = open_session(str(path)).run(["score"], {"input": x.numpy()})
    torch.testing.assert_close(torch.from_numpy(exported), score, rtol=1e-4, atol=1e-4)


def test_results_are_the_base_models_with_a_verdict(one: offmap.DistilledGuard) -> None:
    x = torch.cat([inputs(5, 4), 20 + inputs(5, 4)])
    result = one(x)
    torch.testing.assert_close(result.mean, one.guard.predictive.model.module(x).squeeze(1))  # pyright: ignore
    assert torch.equal(result.score, one.score(x))
    assert torch.equal(result.ood, result.score > one.threshold)
    assert result.ood[5:].all()
    assert (result.p_value[5:] < 0.05).all()
    torch.testing.assert_close(one.predict(x).mean, result.mean)


def test_false_alarms_are_as_rare_as_asked(one: offmap.DistilledGuard) -> None:
    other = one.calibrate(regression(999, 8), 0.2)
    assert 0.15 < float((other.score(inputs(2000, 9)) > other.threshold).double().mean()) < 0.25


def test_the_same_seed_gives_the_same_head_and_leaves_random_numbers_alone(
    guard: offmap.Guard, one: offmap.DistilledGuard
) -> None:
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    again = offmap.distill(guard, TRAIN, VALID, rows=3000)
    assert torch.equal(torch.rand(3), expected)
    x = inputs(20, 3)
    assert torch.equal(again.score(x), one.score(x))


def test_a_tenth_of_train_stands_in_for_valid_with_a_warning(guard: offmap.Guard, caplog: pytest.LogCaptureFixture) -> None:
    head = offmap.distill(guard, TRAIN, rows=200)
    assert "No validation data" in caplog.text
    assert len(head.calibration.scores) == len(TRAIN[0]) // 10
    assert head.calibration.seen
    assert "uncalibrated" in repr(head)


def test_the_model_and_the_guard_are_left_as_they_were(guard: offmap.Guard) -> None:
    model = guard.predictive.model.module  # pyright: ignore[reportAttributeAccessIssue]
    before, scores = {n: t.clone() for n, t in all_params(model).items()}, guard.score(inputs(9, 2))
    offmap.distill(guard, TRAIN, VALID, rows=200)
    assert all(torch.equal(t, before[n]) for n, t in all_params(model).items())
    assert torch.equal(guard.score(inputs(9, 2)), scores)


def test_rows_alone_and_in_a_batch_get_one_score(one: offmap.DistilledGuard) -> None:
    x = inputs(7, 11)
    alone = torch.cat([one.score(row.unsqueeze(0)) for row in x])
    torch.testing.assert_close(alone, one.score(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("suffix", [".onnx", ".pt2"])
def test_exported_graphs_give_the_same_numbers(suffix: str, one: offmap.DistilledGuard, tmp_path: Path) -> None:
    info = one.export(tmp_path / f"q{suffix}", inputs(4, 2))
    assert info.outputs == ("mean", "std", "score", "ood", "p_value", "threshold")
    if suffix == ".onnx":
        x = torch.cat([inputs(6, 12), 9 + inputs(3, 12)])
        mean, score, ood = open_session(str(info.path)).run(["mean", "score", "ood"], {"input": x.numpy()})
        result = one(x)
        torch.testing.assert_close(torch.from_numpy(score), result.score, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(torch.from_numpy(mean), result.mean, rtol=1e-4, atol=1e-4)
        assert ood.tolist() == result.ood.tolist()


@pytest.mark.parametrize(
    ("make", "data"),
    [
        (lambda: [classifier(0), classifier(1)], classes),
        (lambda: lenet(3), lambda n, seed: (torch.rand(n, 1, 28, 28), torch.arange(n) % 3)),
    ],
    ids=["ensemble", "images"],
)
def test_classifiers_of_tables_and_images_work_too(make: Any, data: Any) -> None:
    train, valid = data(60, 0), data(40, 1)
    made = offmap.distill(quick(make(), train, valid), train, valid, rows=300)
    result = made(valid[0])
    assert result.probs is not None
    assert result.probs.shape == (40, 3)
    assert result.score.isfinite().all()


def test_a_score_of_the_outputs_alone_is_learned_as_well() -> None:
    guard = quick(regressor(), TRAIN, VALID, score="epistemic")
    made = offmap.distill(guard, TRAIN, VALID, rows=3000)
    x = inputs(200, 5) * torch.linspace(0.5, 3, 200).unsqueeze(1)
    assert torch.corrcoef(torch.stack([ranks(guard.score(x)), ranks(made.score(x))]))[0, 1] > 0.9


def test_whitened_features_are_uncorrelated_and_flat_ones_stay_small() -> None:
    x = inputs(500, 1, features=4) @ torch.tensor([[3.0, 1, 0, 0], [0, 1, 0, 0], [0, 0, 0.5, 0], [0, 0, 0, 1e-6]])
    turn, shift = fit_whitening(x)
    white = x.double() @ turn + shift
    spread = (white.mT @ white / len(x)).diagonal()
    torch.testing.assert_close(white.mT @ white / len(x), spread.diag(), atol=1e-9, rtol=0)
    torch.testing.assert_close(spread.sort().values[1:], torch.ones(3, dtype=torch.float64))
    assert spread.min() < 1e-6


def test_the_whitening_in_the_first_layer_changes_no_number_near_and_far() -> None:
    x, scores = 5 + 3 * inputs(300, 1), inputs(300, 2)[:, 0]
    head = train_head(x, scores, x, scores)
    turn, shift = fit_whitening(x)
    rows = torch.cat([x, 100 * x])
    scale, log_radius = head.split(rows)
    white = scale * (rows.double() @ turn + shift)
    hidden = white @ torch.linalg.inv(turn) @ head.first.weight.double().mT + head.first.bias
    expected = head.centre + head.unit * head.after_first(hidden.float(), log_radius.float())
    torch.testing.assert_close(head(rows), expected, rtol=1e-3, atol=1e-3)


def test_ood_rows_lie_near_between_and_far_and_depend_on_the_seed_alone() -> None:
    rows = inputs(50, 1)
    made = make_ood_rows(rows, 600)
    assert made.shape == (600, 3)
    assert torch.equal(made, make_ood_rows(rows, 600))
    assert not torch.equal(made, make_ood_rows(rows, 600, 1))
    near = torch.cdist(made, rows).amin(1)
    assert near.min() < 0.05
    assert near.max() > 1.0
    flat = torch.cat([rows, torch.full((50, 1), 7.0)], 1)
    assert (make_ood_rows(flat, 600)[:, 3] == 7.0).all()  # a column that never changes


IDS = nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(8, 1))


def test_rows_of_another_width_are_refused(one: offmap.DistilledGuard) -> None:
    with pytest.raises(ModelError, match=r"Sequential failed on inputs of shape \(4, 2\): .*Check that the data have the form"):
        one.score(torch.zeros(4, 2))


def test_what_cannot_be_taught_is_refused_with_the_remedy(guard: offmap.Guard) -> None:
    with pytest.raises(ConfigError, match=r"this one allows NaN\. Export the guard itself"):
        offmap.distill(replace(guard, place=replace(guard.place, allow_nan=True)), TRAIN, VALID)
    with pytest.raises(ConfigError, match="Expected a Guard"):
        offmap.distill(regressor(), TRAIN, VALID)  # pyright: ignore
    with pytest.raises(ConfigError, match="`rows` to be a whole number ≥ 100"):
        offmap.distill(guard, TRAIN, VALID, rows=5)
    with pytest.raises(DataError, match="at least 20 training rows"):
        offmap.distill(guard, regression(10), VALID)
    with pytest.raises(ConfigError, match="`false_alarms` strictly between 0 and 1"):
        offmap.distill(guard, TRAIN, VALID, rows=100, false_alarms=2)
    ids = torch.arange(60).reshape(30, 2) % 9, torch.linspace(0, 1, 30)
    with pytest.raises(DataError, match="one floating-point tensor.*but got a tensor of torch.int64.*last-layer"):
        offmap.distill(quick(IDS, ids, ids), ids, ids)
    texts = DataLoader([({"input_ids": torch.ones(length).long()}, 0) for length in (2, 2, 3, 3)], batch_size=2)
    with pytest.raises(DataError, match="but got dict.*ids, masks or several inputs do not mix"):  # not: of one shape
        offmap.distill(guard, texts, VALID)
