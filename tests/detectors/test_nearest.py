"""The nearest training row against a slow and obvious search."""

from __future__ import annotations

import pytest
import torch

from offmap.detectors import nearest as module
from offmap.detectors.nearest import nearest, nearest_distance
from offmap.errors import ConfigError, DataError, ShapeError
from offmap.posterior.predictive import Scorer


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
    monkeypatch.setattr(module, "DISTANCES", 60)
    torch.testing.assert_close(nearest_distance(x, train), whole, rtol=0, atol=0)


def test_a_training_row_far_from_the_origin_is_at_distance_zero_from_itself():
    train = 1e4 + rows(100, 8, 0)
    assert nearest_distance(train, train).max() == 0


def test_standardised_distance_ignores_the_units_of_columns():
    x, train, units = rows(9, 3, 0), rows(30, 3, 1), torch.tensor([1.0, 1e3, 1e-3])
    torch.testing.assert_close(nearest(train).score(x), nearest(train * units).score(x * units), rtol=1e-4, atol=1e-6)
    assert not torch.allclose(nearest(train, standardise=False).score(x), nearest(train).score(x))


def test_a_constant_column_is_only_centred():
    train = torch.tensor([[1.0, 5.0], [3.0, 5.0]])
    torch.testing.assert_close(nearest(train).score(torch.tensor([[3.0, 7.0]])), torch.tensor([2.0]))


def test_it_is_a_scorer_and_takes_images():
    train = rows(10, 16, 0).reshape(10, 1, 4, 4)
    scorer = nearest(train, standardise=False)
    assert isinstance(scorer, Scorer)
    assert scorer.score(train[:3]).tolist() == [0, 0, 0]


def test_bad_input_is_refused_in_words():
    scorer = nearest(rows(5, 2, 0))
    with pytest.raises(ShapeError, match=r"Expected rows of shape \(2,\), but got \(3,\)\."):
        nearest_distance(rows(4, 3, 0), rows(5, 2, 0))
    with pytest.raises(ConfigError, match="Expected `k` from 1 to the number of rows, 5, but got 6."):
        nearest_distance(rows(4, 2, 0), rows(5, 2, 0), k=6)
    with pytest.raises(DataError, match="Expected at least one input, but got none."):
        scorer.score(torch.zeros(0, 2))
    with pytest.raises(DataError, match="Expected at least one training row, but got none."):
        nearest(torch.zeros(0, 2))
    with pytest.raises(DataError, match="Expected finite inputs, but row 1 of the inputs holds NaN"):
        scorer.score(torch.tensor([[0.0, 0.0], [float("nan"), 0.0]]))
    with pytest.raises(DataError, match="row 0 of the training inputs holds NaN"):
        nearest(torch.tensor([[float("inf"), 0.0]]))
