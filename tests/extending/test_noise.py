"""A noise law is one class: fitted, saved and loaded by its registered name, its entropy known with and without a clip."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

import offmap
from offmap.errors import ConfigError
from offmap.posterior.distribution import WeightDistribution
from offmap.posterior.noise import NOISES, Noise
from trained import regression, regressor


@dataclass(frozen=True)
class Laplace(Noise):
    """f(z) = exp(−|z|/b) / 2b; b = 1/√2 has unit variance."""

    width: float = math.sqrt(0.5)

    def sample(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        u = torch.rand(shape, generator=generator) - 0.5
        return -self.width * u.sign() * torch.log1p(-2 * u.abs())

    def variance(self) -> float:
        return 2 * self.width**2

    def entropy(self) -> float:
        return 1 + math.log(2 * self.width)

    def truncated_entropy(self, t: Tensor) -> tuple[Tensor, Tensor]:
        tail = torch.exp(-t / self.width)
        edge = torch.where(t.isinf(), 0.0, t / self.width * tail)
        return 1 - tail, math.log(2 * self.width) * (1 - tail) + 1 - tail - edge


@pytest.fixture
def registered() -> Iterator[None]:
    NOISES["laplace"] = Laplace()
    yield
    del NOISES["laplace"]


def fit_scale(noise: str | Noise) -> offmap.Guard:
    return offmap.fit(regressor(), regression(60), regression(40, 1), noise=noise, solver="closed-form", progress=False)


@pytest.mark.parametrize("noise", ["laplace", Laplace(1.0)])
def test_a_guard_with_a_new_noise_is_fitted_saved_and_loaded(registered: None, noise: str | Noise, tmp_path: Path) -> None:
    guard, (x, _) = fit_scale(noise), regression(20, 2)
    assert guard.predictive.q.noise == (Laplace() if noise == "laplace" else noise)
    assert "nats" in str(guard.summary())
    guard.save(tmp_path / "guard")
    again = offmap.load(tmp_path / "guard", regressor())
    assert again.predictive.q.noise == guard.predictive.q.noise
    assert torch.equal(again.score(x), guard.score(x))


def test_a_noise_that_is_not_registered_is_fitted_but_not_saved(tmp_path: Path) -> None:
    guard = fit_scale(Laplace())
    with pytest.raises(
        ConfigError, match=r"noise of your own cannot be saved: a file holds no code. Register it by name, .*'laplace'"
    ):
        guard.save(tmp_path / "guard")


def test_a_file_with_a_noise_that_is_not_registered_here_is_refused(registered: None, tmp_path: Path) -> None:
    fit_scale("laplace").save(tmp_path / "guard")
    law = NOISES.pop("laplace")
    with pytest.raises(ConfigError, match="Expected `noise` to be one of .*, but got 'laplace'"):
        offmap.load(tmp_path / "guard", regressor())
    NOISES["laplace"] = law


def test_the_entropy_of_clipped_draws_follows_from_the_noise() -> None:
    q = WeightDistribution({"w": torch.zeros(1, 1)}, initial_scale=1.0, noise=Laplace())
    z = torch.linspace(-0.5, 0.5, 200_001, dtype=torch.float64)
    f = torch.exp(-z.abs() / Laplace().width) / (2 * Laplace().width)
    left = q.clipped_entropy(0.5)
    torch.testing.assert_close(left.continuous[0].double(), -torch.trapezoid(f * f.log(), z), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(1 - left.share[0].double(), torch.trapezoid(f, z), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(q.clipped_entropy(None).continuous, q.entropy().detach(), rtol=1e-5, atol=1e-5)
