from __future__ import annotations

import pytest
import torch
from sklearn.covariance import ledoit_wolf

from offmap.detectors.mahalanobis import mahalanobis, mahalanobis_distance, shrunk_covariance
from offmap.errors import ConfigError, DataError, ShapeError
from offmap.posterior.predictive import Scorer
from offmap.random import generator


def rows(n: int = 50, width: int = 6) -> torch.Tensor:
    mix = torch.randn(width, width, generator=generator("mix"), dtype=torch.float64)
    return torch.randn(n, width, generator=generator("rows"), dtype=torch.float64) @ mix


def test_the_distance_is_the_quadratic_form() -> None:
    x, covariance = rows(), shrunk_covariance(rows())
    slow = torch.stack([(row @ torch.linalg.inv(covariance) @ row).sqrt() for row in x])
    torch.testing.assert_close(mahalanobis_distance(x, torch.zeros(6), covariance), slow)


@pytest.mark.parametrize("n", [4, 50, 500])
def test_the_shrinkage_is_ledoit_and_wolfs(n: int) -> None:
    covariance, _ = ledoit_wolf(rows(n).numpy())
    torch.testing.assert_close(shrunk_covariance(rows(n)), torch.from_numpy(covariance))


def test_the_score_does_not_depend_on_units() -> None:
    units = torch.tensor([1e-3, 1.0, 1e3, 10.0, 5.0, 1.0], dtype=torch.float64)
    torch.testing.assert_close(mahalanobis(rows()).score(rows()), mahalanobis(rows() * units).score(rows() * units))


def test_a_new_value_in_a_constant_column_is_ood() -> None:
    x = torch.cat([rows(), torch.ones(50, 1, dtype=torch.float64)], 1)
    detector = mahalanobis(x)
    other = x.clone()
    other[:, -1] = 5
    assert isinstance(detector, Scorer)
    assert bool((detector.score(other) > detector.score(x)).all())


def test_bad_input_is_refused() -> None:
    detector = mahalanobis(rows())
    with pytest.raises(ShapeError, match=r"Expected rows of shape \(6,\), but got \(5,\)"):
        detector.score(torch.zeros(2, 5))
    with pytest.raises(DataError, match="Expected at least one input, but got none"):
        detector.score(torch.zeros(0, 6))
    with pytest.raises(DataError, match="Expected at least two training rows, but got 1"):
        mahalanobis(rows(1))
    with pytest.raises(DataError, match="their covariance is singular: raise `shrinkage`"):
        mahalanobis(torch.ones(5, 2))
    with pytest.raises(ConfigError, match="Expected `shrinkage` from 0 to 1, or None for Ledoit and Wolf's, but got 2"):
        mahalanobis(rows(), shrinkage=2)
