"""Features and the last matrix are found by themselves, or at a layer that the user names."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import offmap
from offmap.detectors.classifier import OUTPUT_MAPS, find_features
from offmap.detectors.posthoc import DETECTORS
from offmap.errors import ConfigError, ModelError
from offmap.model.forward import LRUCache
from offmap_bench.nets.lenet import lenet
from offmap_bench.nets.resnet import cifar_resnet, resnet
from trained import classes
from trained import classifier as trained_model

IMAGES = torch.rand(5, 3, 8, 8, generator=torch.Generator().manual_seed(0))
ROWS = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))


class Bare(nn.Module):
    """A last matrix that is no layer, the other way round, with a bias that is added later."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 7)
        self.out = nn.Parameter(torch.randn(7, 3, generator=torch.Generator().manual_seed(2)))
        self.shift = nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x).tanh() @ self.out + self.shift


class TwoHeads(nn.Module):
    """Logits are a sum of two matrices' results: no features make them alone."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.one, self.two = nn.Linear(4, 7), nn.Linear(7, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.one(self.body(x).relu()) * self.two(x)


def ends_in(*last: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3), *last)


@pytest.mark.parametrize(
    ("model", "x", "weight", "width"),
    [
        (ends_in(), ROWS, "2.weight", 6),
        (ends_in(nn.LogSoftmax(1)), ROWS, "2.weight", 6),
        (ends_in(nn.Softmax(1)), ROWS, "2.weight", 6),
        (Bare(), ROWS, "out", 7),
        (resnet(10, blocks=1, width=4), IMAGES, "8.weight", 16),
        (cifar_resnet(8, width=4), IMAGES, "linear.weight", 16),
        (lenet(), torch.rand(5, 1, 28, 28), "11.weight", 84),
        (nn.Linear(4, 3, bias=False), ROWS, "weight", 4),
        (nn.Sequential(nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2)), IMAGES, "3.weight", 8),
    ],
)
def test_the_last_matrix_is_found_and_makes_the_logits(model: nn.Module, x: Tensor, weight: str, width: int) -> None:
    classifier = find_features(model, x)
    assert classifier.layer is not None
    assert classifier.layer.head is not None
    assert classifier.layer.weight == weight
    batch = classifier.activations(x)
    assert batch.features.shape == (len(x), width)
    model.eval()
    torch.testing.assert_close(classifier.layer.head(batch.features), batch.logits)
    output = model(x).detach()
    assert any(torch.allclose(way(batch.logits), output, atol=1e-5) for way in OUTPUT_MAPS)


def test_logits_and_features_do_not_depend_on_the_batch() -> None:
    model = cifar_resnet(8, width=4)
    whole = find_features(model, IMAGES).activations(IMAGES)
    parts = replace(find_features(model, IMAGES), batch_size=2).activations(IMAGES)  # the last batch is one image
    torch.testing.assert_close(parts.features, whole.features)
    torch.testing.assert_close(parts.logits, whole.logits)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_models_of_other_precision_work_with_every_detector(dtype: torch.dtype) -> None:
    (x, y), model = classes(90), trained_model().to(dtype)
    x = x.to(dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    for name, detector in offmap.detect_all(model, (x, y), (x, y), methods=[n for n in DETECTORS if n != "knn"]).items():
        scores = detector.score(x)
        assert scores.dtype in (wide, torch.float32), name
        assert bool(scores.isfinite().all()), name


def test_a_softmax_at_the_end_changes_no_score() -> None:
    y = ends_in()(ROWS).argmax(1)
    models = ends_in(), ends_in(nn.Softmax(1))
    for method, options in {"energy": {}, "odin": {"temperature": 5.0}, "knn": {"k": 2}}.items():
        plain, soft = (offmap.detect(model, (ROWS, y), (ROWS, y), method=method, **options).score(ROWS) for model in models)
        torch.testing.assert_close(soft, plain, rtol=1e-4, atol=1e-5)


def test_the_users_model_is_left_as_it_was() -> None:
    model = ends_in(nn.Dropout(0.5)).train()
    before = {n: w.clone() for n, w in model.state_dict().items()}
    classifier = find_features(model, ROWS)
    scores = classifier.activations(ROWS).logits
    assert model.training
    with torch.no_grad():
        model[2].weight.zero_()
    torch.testing.assert_close(classifier.activations(ROWS).logits, scores, rtol=0, atol=0)
    assert all(torch.equal(w, before[n]) for n, w in model.state_dict().items() if n != "2.weight")
    assert not model[2]._forward_hooks


@pytest.mark.parametrize("name", ["1", "2"])
def test_naming_the_features_or_the_last_layer_finds_the_same(name: str) -> None:
    classifier = find_features(ends_in(), ROWS, features=name)
    assert classifier.layer is not None
    assert classifier.layer.weight == "2.weight"
    torch.testing.assert_close(classifier.activations(ROWS).features, find_features(ends_in(), ROWS).activations(ROWS).features)


def test_an_earlier_layer_gives_features_without_a_matrix_to_the_logits() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 5), nn.ReLU(), nn.Linear(5, 2))
    classifier = find_features(model, IMAGES, features="1")
    torch.testing.assert_close(classifier.activations(IMAGES).features, model[:3](IMAGES).detach())
    DETECTORS["knn"].check_needs(classifier)
    with pytest.raises(ModelError, match="turns into the logits for 'vim', but those of `1` do not.*or take one of .*'knn'"):
        DETECTORS["vim"].check_needs(classifier)


def test_a_model_that_ends_in_no_matrix_lists_candidates_for_detectors_that_need_features() -> None:
    classifier = find_features(TwoHeads(), ROWS)
    assert classifier.layer is None
    assert classifier.activations(ROWS).features.shape == (6, 0)
    DETECTORS["energy"].check_needs(classifier)
    with pytest.raises(ModelError, match=r"for 'knn', but no matrix of TwoHeads.*candidates are \['body', 'one', 'two'\]"):
        DETECTORS["knn"].check_needs(classifier)
    named = find_features(TwoHeads(), ROWS, features="body")
    DETECTORS["knn"].check_needs(named)
    assert named.activations(ROWS).features.shape == (6, 7)


def test_bad_models_and_names_are_refused() -> None:
    with pytest.raises(ConfigError, match="to name a layer, one of .*'0'.*but got 'fc'"):
        find_features(ends_in(), ROWS, features="fc")
    with pytest.raises(ModelError, match=r"logits of two or more classes, but Linear gives \(6, 1\)"):
        find_features(nn.Linear(4, 1), ROWS)
    with pytest.raises(ModelError, match="floating-point outputs, .*but Linear returns torch.int64"):
        find_features(nn.Linear(4, 3), ROWS, output_fn=lambda out: out.argsort())
    with pytest.raises(ModelError, match=r"Conv2d gives \(5, 2, 6, 6\)"):
        find_features(nn.Conv2d(3, 2, 3), IMAGES)
    with pytest.raises(ModelError, match=r"Sequential failed on inputs of shape \(5, 3, 8, 8\)"):
        find_features(ends_in(), IMAGES)


def test_a_cache_sees_equal_inputs_once_and_others_anew() -> None:
    calls: list[int] = []

    class Counted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            calls.append(len(x))
            return self.fc(F.relu(x))

    classifier = replace(find_features(Counted(), ROWS), cache=LRUCache())
    first, before = classifier.activations(ROWS), len(calls)
    again = classifier.activations(ROWS.clone())
    assert len(calls) == before
    torch.testing.assert_close(again.logits, first.logits, rtol=0, atol=0)
    other = ROWS.clone()
    other[0, 0] += 5
    assert not torch.equal(classifier.activations(other).logits, first.logits)
    assert len(calls) == before + 1
