"""Distances of inputs to training rows against slow and obvious versions."""

from __future__ import annotations

import pytest
import torch
from sklearn.covariance import ledoit_wolf

from offmap.detectors import input_distance
from offmap.detectors.input_distance import Mahalanobis, Nearest, mahalanobis_distance, nearest_distance, shrunk_covariance
from offmap.errors import ConfigError, DataError, ShapeError
from offmap.posterior.predictive import Scorer
from offmap.random import generator


def rows(n: int, width: int, seed: int) -> torch.Tensor:
    return torch.randn(n, width, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("k", [1, 3, 20])
def test_distance_is_that_of_a_full_search(k):
    x, train = rows(7, 3, 0), rows(20, 3, 1)
    slow = [sorted((one - row).norm().item() for row in train)[k - 1] for one in x]
    torch.testing.assert_close(nearest_distance(x, train, k=k), torch.tensor(slow))


def test_distance_does_not_depend_on_the_block(monkeypatch):
    x, train = rows(50, 4, 0), rows(20, 4, 1)
    whole = nearest_distance(x, train)
    monkeypatch.setattr(input_distance, "DISTANCES", 60)
    torch.testing.assert_close(nearest_distance(x, train), whole, rtol=0, atol=0)


def test_a_training_row_far_from_the_origin_is_at_distance_zero_from_itself():
    train = 1e4 + rows(100, 8, 0)
    assert nearest_distance(train, train).max() == 0


def test_standardised_distance_ignores_the_units_of_columns():
    x, train, units = rows(9, 3, 0), rows(30, 3, 1), torch.tensor([1.0, 1e3, 1e-3])
    torch.testing.assert_close(Nearest(train).score(x), Nearest(train * units).score(x * units), rtol=1e-4, atol=1e-6)
    assert not torch.allclose(Nearest(train, standardise=False).score(x), Nearest(train).score(x))


def test_a_constant_column_is_only_centred():
    train = torch.tensor([[1.0, 5.0], [3.0, 5.0]])
    torch.testing.assert_close(Nearest(train).score(torch.tensor([[3.0, 7.0]])), torch.tensor([2.0]))


def test_it_is_a_scorer_and_takes_images():
    train = rows(10, 16, 0).reshape(10, 1, 4, 4)
    scorer = Nearest(train, standardise=False)
    assert isinstance(scorer, Scorer)
    assert scorer.score(train[:3]).tolist() == [0, 0, 0]


def test_bad_input_of_nearest_is_refused():
    scorer = Nearest(rows(5, 2, 0))
    with pytest.raises(ShapeError, match=r"Expected rows of shape \(2,\), but got \(3,\)\."):
        nearest_distance(rows(4, 3, 0), rows(5, 2, 0))
    with pytest.raises(ConfigError, match="Expected `k` from 1 to the number of rows, 5, but got 6."):
        nearest_distance(rows(4, 2, 0), rows(5, 2, 0), k=6)
    with pytest.raises(DataError, match="Expected at least one input, but got none."):
        scorer.score(torch.zeros(0, 2))
    with pytest.raises(DataError, match="Expected 1 or more training rows, but got 0."):
        Nearest(torch.zeros(0, 2))
    with pytest.raises(DataError, match="Expected finite inputs, but row 1 of the inputs holds NaN"):
        scorer.score(torch.tensor([[0.0, 0.0], [float("nan"), 0.0]]))
    with pytest.raises(DataError, match="row 0 of the training inputs holds NaN"):
        Nearest(torch.tensor([[float("inf"), 0.0]]))


def draw_correlated(n: int = 50, width: int = 6) -> torch.Tensor:
    mix = torch.randn(width, width, generator=generator("mix"), dtype=torch.float64)
    return torch.randn(n, width, generator=generator("rows"), dtype=torch.float64) @ mix


def test_the_distance_is_the_quadratic_form() -> None:
    x, covariance = draw_correlated(), shrunk_covariance(draw_correlated())
    slow = torch.stack([(row @ torch.linalg.inv(covariance) @ row).sqrt() for row in x])
    torch.testing.assert_close(mahalanobis_distance(x, torch.zeros(6), covariance), slow)


@pytest.mark.parametrize("n", [4, 50, 500])
def test_the_shrinkage_is_ledoit_and_wolfs(n: int) -> None:
    covariance, _ = ledoit_wolf(draw_correlated(n).numpy())
    torch.testing.assert_close(shrunk_covariance(draw_correlated(n)), torch.from_numpy(covariance))


def test_the_score_does_not_depend_on_units() -> None:
    units = torch.tensor([1e-3, 1.0, 1e3, 10.0, 5.0, 1.0], dtype=torch.float64)
    torch.testing.assert_close(
        Mahalanobis(draw_correlated()).score(draw_correlated()),
        Mahalanobis(draw_correlated() * units).score(draw_correlated() * units),
    )


def test_a_new_value_in_a_constant_column_is_ood() -> None:
    x = torch.cat([draw_correlated(), torch.ones(50, 1, dtype=torch.float64)], 1)
    detector = Mahalanobis(x)
    other = x.clone()
    other[:, -1] = 5
    assert isinstance(detector, Scorer)
    assert bool((detector.score(other) > detector.score(x)).all())


def test_bad_input_of_mahalanobis_is_refused() -> None:
    detector = Mahalanobis(draw_correlated())
    with pytest.raises(ShapeError, match=r"Expected rows of shape \(6,\), but got \(5,\)"):
        detector.score(torch.zeros(2, 5))
    with pytest.raises(DataError, match="Expected at least one input, but got none"):
        detector.score(torch.zeros(0, 6))
    with pytest.raises(DataError, match="Expected 2 or more training rows, but got 1"):
        Mahalanobis(draw_correlated(1))
    with pytest.raises(DataError, match="covariance of the training rows is singular: raise `shrinkage`"):
        Mahalanobis(torch.ones(5, 2))
    with pytest.raises(ConfigError, match="Expected `shrinkage` from 0 to 1, or None for Ledoit and Wolf's, but got 2"):
        Mahalanobis(draw_correlated(), shrinkage=2)
