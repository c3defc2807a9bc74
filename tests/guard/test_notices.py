"""What `fit` notices in the first batches: one sentence with the remedy, logged and kept, and none on sound data."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset

import offmap
from offmap.data import Place, as_batches
from offmap.data.batches import without_augmentation
from trained import binary, binary_classifier, classes, classifier, inputs, model, quick, regression, regressor

REGRESSED = (
    r"All targets are 0 or 1 in floating-point numbers, and are fitted as a regression: if they are classes, pass {}; if not"
)


def change_inputs(data: tuple[Tensor, Tensor], change: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    return data[0], change(data[1])


def one_hot(y: Tensor) -> Tensor:
    return nn.functional.one_hot(y, 3).float()


def pair(make: Callable[..., tuple[Tensor, Tensor]], change: Callable[[Tensor], Tensor] = lambda y: y) -> Any:
    return tuple(change_inputs(make(60, seed), change) for seed in (0, 1))


SUSPECT: dict[str, tuple[Callable[[], Any], str]] = {
    "0/1 floats": (
        lambda: (binary_classifier(), pair(binary, Tensor.float)), REGRESSED.format('`likelihood="bernoulli"`')
    ),
    "0/1 floats and two outputs": (
        lambda: (nn.Sequential(binary_classifier(), nn.Linear(1, 2)), pair(binary, Tensor.float)),
        REGRESSED.format(r"`y.long\(\)`")
    ),
    "one-hot floats": (lambda: (classifier(), pair(classes, one_hot)), REGRESSED.format(r"their numbers, `y.argmax\(1\)`")),
    "softmax": (
        lambda: (nn.Sequential(classifier(), nn.Softmax(1)), pair(classes)),
        r"pass the model without its final softmax, or `output_fn="
    ),
    "sigmoid": (
        lambda: (nn.Sequential(binary_classifier(), nn.Sigmoid()), pair(binary)), "pass the model without its final sigmoid, or"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SUSPECT)
def test_suspect_targets_and_outputs_are_told_with_the_remedy(case: str, caplog: pytest.LogCaptureFixture) -> None:
    build, message = SUSPECT[case]
    net, (train, valid) = build()
    with caplog.at_level(logging.WARNING):
        guard = quick(net, train, valid)
    (note,) = guard.notes
    assert re.search(message, note)
    assert caplog.messages.count(note) == 1
    assert note in str(guard.summary())


def test_the_remedies_work() -> None:
    (x, y), valid = pair(classes)
    logs = quick(classifier(), (x, y), valid)
    soft = nn.Sequential(classifier(), nn.Softmax(1))
    log = quick(soft, (x, y), valid, output_fn=lambda out: out.clamp_min(1e-30).log())
    assert not log.notes
    torch.testing.assert_close(log.predict(x).probs, logs.predict(x).probs, rtol=0.2, atol=0.05)
    train, held = pair(binary, Tensor.float)
    assert not quick(binary_classifier(), train, held, likelihood="bernoulli").notes
    assert not quick(binary_classifier(), train, held, likelihood="gaussian").notes


def counts(n: int, seed: int) -> tuple[Tensor, Tensor]:
    x, y = regression(n, seed)
    return x, y.clamp(0, 2).round()


SOUND: dict[str, Callable[[], Any]] = {
    "counts": lambda: (regressor(), pair(counts)),
    "few floats": lambda: (regressor(), tuple(change_inputs(binary(8, seed), Tensor.float) for seed in (0, 1))),
    "soft labels": lambda: (classifier(), pair(classes, lambda y: 0.8 * one_hot(y) + 0.2 / 3)),
    "probabilities regressed": lambda: (nn.Sequential(regressor(), nn.Sigmoid()), pair(regression, torch.sigmoid)),
    "log-softmax": lambda: (nn.Sequential(classifier(), nn.LogSoftmax(1)), pair(classes)),
    "logits": lambda: (classifier(), pair(classes)),
    "logits of yes and no": lambda: (binary_classifier(), pair(binary)),
    # a weak model of a frequent class: all logits lie between 0 and 1
    "small positive logits": lambda: (
        model(inputs(60), torch.full((60, 1), 0.6)), pair(lambda n, seed: (inputs(n, seed), inputs(n, seed)[:, 0] > -0.35))
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SOUND)
def test_sound_data_raise_no_alarm(case: str) -> None:
    net, (train, valid) = SOUND[case]()
    assert not quick(net, train, valid).notes


class Images(Dataset[Any]):
    """Eight by eight images of two classes, with a transform as torchvision's data sets have it."""

    def __init__(self, n: int, seed: int, transform: Callable[[Tensor], Tensor]) -> None:
        self.y = torch.arange(n) * 2 // n  # sorted by class
        self.x = torch.randn(n, 1, 8, 8, generator=torch.Generator().manual_seed(seed)) + 2.0 * self.y.view(-1, 1, 1, 1)
        self.transform = transform

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        return self.transform(self.x[row]), self.y[row]


def noisy(image: Tensor) -> Tensor:
    return image + torch.randn(()) if torch.rand(()) < 0.5 else image


def plain(image: Tensor) -> Tensor:
    return image - 1.0


def images_net() -> nn.Sequential:
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 2))
    weight, bias = net.parameters()
    with torch.no_grad():
        weight.copy_(torch.tensor([-1.0, 1.0]).view(2, 1).expand(2, 64) / 8)
        bias.zero_()
    return net


def loader(data: Dataset[Any]) -> DataLoader[Any]:
    return DataLoader(data, batch_size=32, shuffle=True)


@pytest.mark.parametrize("wrap", [loader, lambda data: Subset(data, range(64)), lambda data: data])
def test_augmented_training_rows_are_read_with_the_transform_of_valid(wrap: Callable[[Any], Any]) -> None:
    train, valid = Images(64, 0, noisy), Images(64, 1, plain)
    guard = quick(images_net(), wrap(train), valid)
    assert [note.rpartition(": ")[2] for note in guard.notes] == ["they are read with the transform of `valid` instead."]
    expected = quick(images_net(), wrap(Images(64, 0, plain)), valid)
    assert not expected.notes
    assert torch.equal(guard.score(valid.x), expected.score(valid.x))
    assert train.transform is noisy


def test_augmented_training_rows_that_cannot_be_read_otherwise_are_told(caplog: pytest.LogCaptureFixture) -> None:
    train, valid = Images(64, 0, noisy), Images(64, 1, plain)
    rows = valid.transform(valid.x), valid.y
    guard = quick(images_net(), loader(train), rows)
    assert guard.notes[0].endswith("Pass a loader over the same rows without augmentation as `train`.")
    caplog.clear()
    offmap.detect(images_net(), train, rows)
    assert guard.notes[0] in caplog.messages


def test_the_check_of_augmentation_leaves_the_random_state_as_it_was() -> None:
    place = Place(torch.device("cpu"), torch.float32)
    before = torch.get_rng_state()
    train, note = without_augmentation(as_batches(loader(Images(64, 0, noisy)), place, name="train"), None)
    assert note
    assert torch.equal(torch.get_rng_state(), before)
    assert train.rows == 64


def test_accuracy_is_that_of_rows_of_all_classes_however_they_are_sorted(caplog: pytest.LogCaptureFixture) -> None:
    valid = Images(2600, 1, plain)
    net = images_net()
    with torch.no_grad():
        [*net.parameters()][1].copy_(torch.tensor([-2.0, 2.0]))  # wrong on some rows of the first class
    with caplog.at_level(logging.WARNING):
        quick(net, Images(64, 0, plain), valid)
    assert not caplog.messages


def test_a_large_model_is_random_in_its_last_layer_by_default(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    train, valid = regression(60, 0), regression(60, 1)
    parameters = sum(w.numel() for w in regressor().parameters() if w.ndim == 2)
    monkeypatch.setattr(sys.modules["offmap.fit"], "MOST_PRODUCTS", parameters * 60)
    assert not offmap.fit(regressor(), train, valid, draws=4, progress=False).notes  # as many as may be
    monkeypatch.setattr(sys.modules["offmap.fit"], "MOST_PRODUCTS", parameters * 60 - 1)
    guard = offmap.fit(regressor(), train, valid, draws=4, progress=False)
    assert list(guard.predictive.q.mean) == ["2.weight", "2.bias"]  # pyright: ignore
    assert guard.history.step == [0]
    assert "This model is large: one pass over `valid` takes 2.9e+03 multiplications of weights" in guard.notes[0]
    assert guard.notes[0].endswith('pass `params="all"` to make all of it random, which takes longer.')
    assert guard.notes[0] in caplog.messages
    assert not offmap.fit(regressor(), train, valid, draws=4, solver="closed-form", progress=False).notes
    assert not offmap.fit(regressor(), train, valid, draws=4, params="all", steps=5, progress=False).notes
