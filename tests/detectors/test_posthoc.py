"""`offmap.detect`: a Scorer with a threshold on the user's own classifier, and what it refuses."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import offmap
from offmap.errors import ConfigError, DataError, ModelError, ShapeError
from trained import classes, classifier, regression, regressor


def images(n: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Pixels from 0 to 1 that are brighter in one of three channels."""
    source = torch.Generator().manual_seed(seed)
    y = torch.randint(3, (n,), generator=source)
    x = 0.5 * torch.rand(n, 3, 6, 6, generator=source)
    return x + 0.5 * nn.functional.one_hot(y, 3)[:, :, None, None], y


def eye() -> nn.Sequential:
    """Right on all of them: the last matrix reads the mean of each channel."""
    model = nn.Sequential(nn.Identity(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 3))
    with torch.no_grad():
        model[3].weight.copy_(20 * torch.eye(3))
        model[3].bias.fill_(-10)
    return model


def test_three_lines_give_a_verdict() -> None:
    train, valid, test = classes(300), classes(200, 1), classes(200, 2)
    detector = offmap.detect(classifier(), train, valid, method="knn", k=5)
    result = detector(test[0])
    assert isinstance(detector, offmap.Scorer)
    torch.testing.assert_close(result.score, detector.score(test[0]))
    assert torch.equal(result.ood, result.score > detector.threshold)
    assert 0.005 < float(result.ood.float().mean()) < 0.12
    assert torch.equal(result.label, classifier()(test[0]).argmax(1))
    torch.testing.assert_close(result.probs, classifier()(test[0]).softmax(1).detach())
    assert result.mean is None


def test_false_alarms_on_the_calibration_data_are_at_most_those_asked_for() -> None:
    valid = classes(199, 1)
    for rate in (0.05, 0.2):
        detector = offmap.detect(classifier(), classes(100), valid, false_alarms=rate)
        assert int(detector(valid[0]).ood.sum()) == int(rate * 200 - 1e-9)
        other = detector.calibrate(classes(99, 3), rate)
        assert other.threshold != detector.threshold
        torch.testing.assert_close(other.score(valid[0]), detector.score(valid[0]))


def test_the_p_value_is_the_share_of_id_rows_with_at_least_its_score() -> None:
    valid, new = classes(50, 1), classes(20, 2)[0]
    detector = offmap.detect(classifier(), classes(100), valid)
    own = detector.score(valid[0])
    slow = [(1 + int((own >= s).sum())) / 51 for s in detector.score(new)]
    torch.testing.assert_close(detector(new).p_value, torch.tensor(slow))


def test_every_form_of_data_gives_the_same_detector() -> None:
    (x, y), valid = classes(120), classes(60, 1)
    forms = [(x, y), (x.numpy(), y.numpy()), TensorDataset(x, y), DataLoader(TensorDataset(x, y), batch_size=50)]
    new = classes(30, 2)[0]
    results = [offmap.detect(classifier(), form, valid, method="vim").score(new) for form in forms]
    for result in results[1:]:
        torch.testing.assert_close(result, results[0])
    detector = offmap.detect(classifier(), (x, y), valid, method="vim")
    torch.testing.assert_close(detector.score(DataLoader(TensorDataset(new, new[:, 0]), batch_size=7)), results[0])
    torch.testing.assert_close(detector.score(np.asarray(new)), results[0])


def test_all_detectors_together_are_what_each_is_alone() -> None:
    train, valid, new = classes(300), classes(100, 1), 3 * classes(30, 2)[0]
    together = offmap.detect_all(classifier(), train, valid)
    assert len(together) == 19
    for name, detector in together.items():
        alone = offmap.detect(classifier(), train, valid, method=name)
        torch.testing.assert_close(detector.score(new), alone.score(new))
        assert detector.threshold == pytest.approx(alone.threshold)
    table = offmap.evaluate(together, classes(50, 3), {"far": new})
    assert len(table.rows) == 19


def test_without_validation_data_a_tenth_is_set_aside_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    detector = offmap.detect(classifier(), classes(300), method="energy")
    assert "No validation data: 30 rows of `train`, which the model has seen, set the threshold" in caplog.text
    assert len(detector.calibration.scores) == 30
    assert detector.calibration.seen
    assert "uncalibrated: the model was trained on them" in repr(detector)
    assert not detector.calibrate(classes(40, 1)).calibration.seen


def test_more_rows_than_wanted_are_a_random_part() -> None:
    x, y = classes(300)
    order = y.argsort()
    detector = offmap.detect(classifier(), (x[order], y[order]), classes(50, 1), method="knn", k=1, rows=60)
    assert len(detector.state["rows"]) == 60
    offmap.detect(classifier(), (x[order], y[order]), classes(50, 1), method="mds", rows=60)  # all classes are among them


def test_rows_without_a_class_are_left_out() -> None:
    x, y = classes(100)
    some = torch.where(torch.arange(100) < 30, -100, y)
    detector = offmap.detect(classifier(), (x, some), classes(50, 1), method="knn", k=1)
    assert len(detector.state["rows"]) == 70


def test_images_of_another_shape_are_refused() -> None:
    detector = offmap.detect(eye(), images(100), images(50, 1))
    for x, message in (
        (torch.rand(4, 6, 6, 3), r"images of shape \(3, 6, 6\).*have \(6, 6, 3\). Channels come first: `x.movedim\(3, 1\)`"),
        (torch.rand(4, 1, 6, 6), r"have \(1, 6, 6\). Bring them to 3 channels"),
        (torch.rand(4, 3, 8, 8), r"have \(3, 8, 8\). Resize them"),
        (torch.rand(3, 6, 6), r"have \(6, 6\). Pass a batch of images"),
    ):
        with pytest.raises(ShapeError, match=message):
            detector.score(x)
    with pytest.raises(ShapeError, match=r"but the validation inputs have \(1, 6, 6\)"):
        offmap.detect(eye(), images(100), (torch.rand(9, 1, 6, 6), torch.zeros(9).long()))
    with pytest.raises(ModelError, match=r"failed on inputs of shape \(8, 4, 6, 6\)"):
        offmap.detect(eye(), (torch.rand(9, 4, 6, 6), torch.zeros(9).long()), images(50, 1))


def test_bytes_are_refused_and_bytes_as_floats_are_noticed(caplog: pytest.LogCaptureFixture) -> None:
    (x, y), valid = images(100), images(50, 1)
    raw = (255 * x).round()
    detector = offmap.detect(eye(), (x, y), valid)
    assert caplog.text == ""
    detector.score(raw[:5])
    assert "The inputs range from" in caplog.text
    assert "were they scaled alike?" in caplog.text
    caplog.clear()
    detector.score(x[:5])
    detector.score(torch.zeros(2, 3, 6, 6))
    assert caplog.text == ""
    with pytest.raises(DataError, match=r"but the inputs are torch.uint8. Scale them alike, for example with `x.float"):
        detector.score(raw.to(torch.uint8))
    with pytest.raises(DataError, match="Expected images in floating-point numbers, but got torch.uint8 from"):
        offmap.detect(eye(), (raw.to(torch.uint8), y), valid)
    large = offmap.detect(eye(), (raw, y), (255 * valid[0], valid[1]))  # right all the same: nothing to say
    assert caplog.text == ""
    large.score(x[:5])
    assert "were they scaled alike?" in caplog.text


def test_a_model_that_only_guesses_is_noticed(caplog: pytest.LogCaptureFixture) -> None:
    (x, y), valid = images(100), images(50, 1)
    offmap.detect(eye(), (x, (y + 1) % 3), valid)
    assert "The model is right on 0.0 % of the training rows" in caplog.text
    assert "were they scaled so in training?" in caplog.text


def test_too_few_rows_give_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        detector = offmap.detect(classifier(), classes(60), classes(10, 1))
    assert detector.threshold == torch.inf
    assert "10 calibration rows are too few for a false alarm rate of 0.05" in caplog.text
    with pytest.raises(ConfigError, match="Expected `k` to be a whole number from 1 to 39"):
        offmap.detect(classifier(), classes(40), classes(30, 1), method="knn", k=40)
    offmap.detect(classifier(), classes(60), classes(30, 1), method="knn", k=50)
    assert "With k = 50, the k-th nearest row of some in-distribution inputs is of another class" in caplog.text


@pytest.mark.parametrize(("fewest", "k"), [(2, 1), (40, 1), (100, 1), (199, 1), (500, 5), (5000, 50), (7000, 50)])
def test_k_of_knn_is_a_hundredth_of_the_smallest_class(caplog: pytest.LogCaptureFixture, fewest: int, k: int) -> None:
    x = classes(2 * fewest + 9)[0]
    y = torch.tensor([0] * fewest + [2] * (fewest + 9))  # none of class 1: it does not count
    detector = offmap.detect(classifier(), (x, y), classes(50, 1), method="knn", rows=50_000)
    assert f"knn with k={k} of " in repr(detector)
    assert "of another class" not in caplog.text
    asked = offmap.detect(classifier(), (x, y), classes(50, 1), method="knn", rows=50_000, k=k)
    assert detector.score(x[:20]).equal(asked.score(x[:20]))


def test_bad_input_is_refused() -> None:
    train, valid = classes(100), classes(50, 1)
    detector = offmap.detect(classifier(), train, valid)
    with pytest.raises(ConfigError, match="Expected `method` to be one of .*did you mean 'energy'"):
        offmap.detect(classifier(), train, valid, method="enregy")
    with pytest.raises(ConfigError, match=r"Expected options of 'knn' to be one of \['k'\].*, but got 'kk'"):
        offmap.detect(classifier(), train, valid, method="knn", kk=3)
    with pytest.raises(ConfigError, match="Expected `false_alarms` strictly between 0 and 1, such as 0.05, but got 5"):
        offmap.detect(classifier(), train, valid, false_alarms=5)
    with pytest.raises(ModelError, match="Expected one trained torch.nn.Module, but got list"):
        offmap.detect([classifier()], train, valid)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ModelError, match="two or more classes"):
        offmap.detect(regressor(), regression(50), regression(20, 1))
    with pytest.raises(ShapeError, match="integer targets"):
        offmap.detect(classifier(), (train[0], train[0][:, 0]), valid)
    with pytest.raises(DataError, match="Expected targets from 0 to 2 for 3 classes"):
        offmap.detect(classifier(), (train[0], train[1] + 1), valid)
    with pytest.raises(DataError, match="Expected at least one input, but got none"):
        detector.score(torch.zeros(0, 3))
    with pytest.raises(DataError, match="row 1 of the inputs holds NaN"):
        detector.score(torch.tensor([[0.0, 0.0, 0.0], [float("nan"), 0.0, 0.0]]))
    with pytest.raises(ModelError, match=r"failed on inputs of shape \(2, 4\)"):
        detector.score(torch.zeros(2, 4))
