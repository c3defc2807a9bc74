"""A new likelihood from outside: Poisson counts in one class, with fit, predict, conformal interval, save and load."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn

import offmap
from offmap.likelihoods import LIKELIHOODS


@dataclass(frozen=True)
class Poisson(offmap.Likelihood):
    """Counts (B,) from one log-rate per example, (B, 1)."""

    expects: ClassVar[str] = "counts (B,) with outputs (B, 1) of log-rates"

    def rate(self, outputs: Tensor) -> Tensor:
        """(P, B, 1) -> (P, B)."""
        return outputs[..., 0].clamp(-20, 20).exp()

    def nll(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Rate − y·log rate + log y!."""
        rate = self.rate(outputs)
        return rate - y * rate.log() + torch.lgamma(y.to(rate) + 1)

    def predict(self, outputs: Tensor) -> offmap.Prediction:
        """Mean and total standard deviation: Poisson noise, and the disagreement of the rates."""
        rate = self.rate(outputs)
        return offmap.Prediction(mean=rate.mean(0), std=(rate.mean(0) + rate.var(0, correction=0)).sqrt())

    def score(self, outputs: Tensor) -> Tensor:
        """The total variance."""
        rate = self.rate(outputs)
        return rate.mean(0) + rate.var(0, correction=0)

    def epistemic(self, outputs: Tensor) -> Tensor:
        """The variance of the rates."""
        return self.rate(outputs).var(0, correction=0)

    def fits(self, output: Tensor, y: Tensor) -> bool:
        """One count per log-rate."""
        return y.ndim == 1 and output.ndim == 2 and output.shape[1] == 1


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    LIKELIHOODS["poisson"] = Poisson
    yield
    del LIKELIHOODS["poisson"]


def counts(rows: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(rows, 2, generator=generator)
    return x, torch.poisson((1 + x[:, 0]).exp(), generator=generator).long()


def log_rate() -> nn.Module:
    """A net whose last layer is the truth, log rate = 1 + x₀."""
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    state = {"0.weight": torch.eye(2), "0.bias": torch.zeros(2), "1.weight": torch.tensor([[1.0, 0.0]]), "1.bias": torch.ones(1)}
    net.load_state_dict(state)
    return net


@pytest.fixture
def guard() -> offmap.Guard:
    train, valid, calibration = counts(300, 0), counts(200, 1), counts(200, 2)
    options = {"solver": "closed-form", "progress": False}
    return offmap.fit(log_rate(), train, valid, calibration=calibration, likelihood="poisson", **options)


def test_poisson_guard_predicts_rates_and_flags_far_inputs(guard: offmap.Guard) -> None:
    x, _ = counts(100, 3)
    assert isinstance(guard.likelihood, Poisson)
    torch.testing.assert_close(guard.predict(x, clip=0.0).mean, (1 + x[:, 0]).exp(), rtol=1e-4, atol=1e-4)
    assert float(guard(x).ood.float().mean()) < 0.2
    assert bool(guard(x[:5] + 30).ood.all())


def test_poisson_intervals_cover_new_counts(guard: offmap.Guard) -> None:
    x, y = counts(2000, 4)
    interval = guard.interval(x, 0.9)
    covered = ((interval.lower <= y) & (y <= interval.upper)).float().mean()
    assert float(covered) == pytest.approx(0.9, abs=0.06)


def test_poisson_guard_survives_a_file(guard: offmap.Guard, tmp_path: Path) -> None:
    x, _ = counts(50, 5)
    guard.save(tmp_path / "guard.safetensors")
    loaded = offmap.load(tmp_path / "guard.safetensors", log_rate())
    assert loaded.likelihood == Poisson()
    assert torch.equal(loaded.score(x), guard.score(x))
    assert torch.equal(loaded.interval(x).upper, guard.interval(x).upper)


def test_poisson_refuses_targets_that_do_not_fit() -> None:
    x, y = counts(50, 6)
    with pytest.raises(offmap.errors.ShapeError, match=r"counts \(B,\) with outputs \(B, 1\) of log-rates for the poisson"):
        offmap.fit(log_rate(), (x, y[:, None]), (x, y[:, None]), likelihood="poisson")
