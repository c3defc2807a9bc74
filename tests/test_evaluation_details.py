"""What an evaluation keeps beyond its numbers, for a page to show: examples, points, losses and reliability."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import offmap
from trained import classes, classifier, inputs, quick, regression, regressor


class First:
    """Scores by the first feature."""

    def score(self, x: Tensor) -> Tensor:
        return x[:, 0]


@pytest.fixture(scope="module")
def guard() -> offmap.Guard:
    return quick(regressor(), regression(60, 0), regression(60, 1), calibration=regression(99, 2))


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
