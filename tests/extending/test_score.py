"""A score from outside: one class, registered by name. It is fitted, saved, loaded and exported without further code."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import onnxruntime
import pytest
import torch
from torch import Tensor

import offmap
from offmap.scores.score import SCORES, Features, Score, ScoreData, register_score
from trained import inputs, quick, regression, regressor

TRAIN, VALID, X = regression(60, 0), regression(40, 1), 2 * inputs(9, 5)


class Spread(Score):
    """The largest gap between two draws, beside its mean over training rows, plus the distance from their centre."""

    gap: Tensor
    centre: Tensor

    def __init__(self, gap: Tensor | None = None, centre: Tensor | None = None) -> None:
        super().__init__()
        self.register_buffer("gap", torch.ones(()) if gap is None else gap)
        self.register_buffer("centre", torch.zeros(1) if centre is None else centre)

    @staticmethod
    def measure(features: Features) -> Tensor:
        means = features.likelihood.point(features.outputs)[..., 0]
        return means.amax(0) - means.amin(0)

    @classmethod
    def fit(cls, data: ScoreData) -> Spread:
        gaps = [data.evaluate(cls.measure, part, cls.reads) for part in data.train]
        return cls(torch.cat(gaps).mean(), torch.cat(list(data.train)).mean(0))

    def forward(self, features: Features) -> Tensor:
        return self.measure(features) / self.gap + (features.inputs - self.centre).abs().sum(1)


@pytest.fixture
def registered() -> Iterator[None]:
    register_score("spread")(Spread)
    yield
    del SCORES["spread"]


@pytest.mark.usefixtures("registered")
def test_a_registered_score_is_fitted_saved_loaded_and_exported(tmp_path: Path) -> None:
    net = regressor()
    guard = quick(net, TRAIN, VALID, score="spread")
    outputs = guard.samples(X, guard.draws)[..., 0]
    wanted = (outputs.amax(0) - outputs.amin(0)) / guard.score_module.gap + (X - TRAIN[0].mean(0)).abs().sum(1)
    torch.testing.assert_close(guard.score(X), wanted)
    assert guard.terms(X).keys() == {"score"}
    guard.save(tmp_path / "guard")
    assert torch.equal(offmap.load(tmp_path / "guard", net).score(X), guard.score(X))
    guard.export(tmp_path / "guard.onnx", X)
    session = onnxruntime.InferenceSession(str(tmp_path / "guard.onnx"))
    (score,) = session.run(["score"], {"input": X.numpy()})
    torch.testing.assert_close(torch.from_numpy(score), guard.score(X), rtol=1e-4, atol=1e-4)


def test_a_file_with_a_score_that_is_not_registered_is_refused(tmp_path: Path) -> None:
    register_score("spread")(Spread)
    quick(regressor(), TRAIN, VALID, score="spread").save(tmp_path / "guard")
    del SCORES["spread"]
    with pytest.raises(offmap.errors.FileError, match="was fitted with the score 'spread', which is not registered"):
        offmap.load(tmp_path / "guard", regressor())
