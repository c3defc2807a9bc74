"""A new post-hoc detector is one file: a registered function, used through `offmap.detect`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import offmap
from offmap.detectors import DETECTORS, FitData, register
from offmap.errors import ConfigError
from trained import classes, classifier

TRAIN, VALID, X = classes(300), classes(100, 1), 3 * classes(20, 2)[0]


@pytest.fixture(autouse=True)
def _registry() -> Iterator[None]:
    before = dict(DETECTORS)
    yield
    DETECTORS.clear()
    DETECTORS.update(before)


def test_a_score_function_of_logits_is_a_detector() -> None:
    @register("mine", scale=(0, 10))
    def margin(logits: Tensor, scale: float = 1.0) -> Tensor:
        """Minus the gap between the two largest logits: (B, C) -> (B,)."""
        top = logits.topk(2, 1).values
        return scale * (top[:, 1] - top[:, 0])

    detector = offmap.detect(classifier(), TRAIN, VALID, method="mine", scale=2.0)
    torch.testing.assert_close(detector.score(X), margin(classifier()(X).detach(), 2.0))
    assert detector(VALID[0]).ood.sum() == 4
    assert "mine" in offmap.detect_all(classifier(), TRAIN, VALID)
    with pytest.raises(ConfigError, match="Expected `scale` to be a number from 0 to 10, but got 11"):
        offmap.detect(classifier(), TRAIN, VALID, method="mine", scale=11)
    with pytest.raises(ConfigError, match="a new name for a detector, but 'mine' is registered already"):
        register("mine")(margin)


def test_a_score_function_with_a_fit_is_a_detector() -> None:
    def centre_distance(features: Tensor, centre: Tensor, power: int) -> Tensor:
        """|h − centre|^power: (B, D), (D,) -> (B,)."""
        return (features - centre).norm(dim=1) ** power

    @register("mine", score=centre_distance, power=(1, 4))
    def fit(data: FitData, power: int = 1) -> dict[str, Any]:
        return {"centre": data.features.mean(0), "power": power}

    assert DETECTORS["mine"].needs == "features"
    detector = offmap.detect(classifier(), TRAIN, VALID, method="mine", power=2)
    hidden = classifier()[:-1]
    slow = (hidden(X) - hidden(TRAIN[0]).mean(0)).square().sum(1).detach()
    torch.testing.assert_close(detector.score(X), slow, rtol=1e-4, atol=1e-4)
    with pytest.raises(ConfigError, match="Expected `power` to be a whole number from 1 to 4, but got 1.5"):
        offmap.detect(classifier(), TRAIN, VALID, method="mine", power=1.5)
