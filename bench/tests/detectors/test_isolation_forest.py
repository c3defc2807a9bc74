"""The isolation forest is scikit-learn's, with the sign turned."""

from __future__ import annotations

import math
import sys

import pytest
import sklearn.ensemble
import torch

from offmap.errors import ConfigError, DataError, ShapeError
from offmap.posterior.predictive import Scorer
from offmap_bench.detectors.estimators import isolation_forest
from trained import inputs

TRAIN, X = inputs(60, 0), inputs(9, 1)


def test_scores_are_scikit_learns_with_the_sign_turned() -> None:
    forest = sklearn.ensemble.IsolationForest(n_estimators=20, random_state=3).fit(TRAIN.double().numpy())
    scorer = isolation_forest(TRAIN, trees=20, seed=3)
    assert isinstance(scorer, Scorer)
    assert torch.equal(scorer.score(X), -torch.from_numpy(forest.score_samples(X.double().numpy())))


def test_ood_rows_score_higher_than_any_training_row() -> None:
    scorer = isolation_forest(TRAIN)
    assert scorer.score(20 * X[:3]).min() > scorer.score(TRAIN).median()
    assert not torch.equal(isolation_forest(TRAIN, seed=1).score(X), scorer.score(X))


def test_rows_of_any_shape_are_flattened() -> None:
    images = inputs(30, 0, features=12).unflatten(1, (3, 4))
    assert torch.equal(
        isolation_forest(images, trees=5).score(images), isolation_forest(images.flatten(1), trees=5).score(images.flatten(1))
    )


def test_bad_input_is_refused() -> None:
    with pytest.raises(ConfigError, match="Expected `trees` to be a whole number above 0, but got 0"):
        isolation_forest(TRAIN, trees=0)
    with pytest.raises(DataError, match="Expected 2 or more training rows, but got 1"):
        isolation_forest(TRAIN[:1])
    scorer = isolation_forest(TRAIN, trees=5)
    with pytest.raises(ShapeError, match=r"Expected rows of shape \(3,\), but got \(2,\)"):
        scorer.score(X[:, :2])
    with pytest.raises(DataError, match="Expected at least one input, but got none"):
        scorer.score(X[:0])
    with pytest.raises(DataError, match="the inputs"):
        scorer.score(X * math.nan)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    monkeypatch.setitem(sys.modules, "sklearn.ensemble", None)
    with pytest.raises(ConfigError) as error:
        isolation_forest(TRAIN)
    assert str(error.value) == "scikit-learn is needed here and is not installed: pip install 'offmap[sklearn]'"
