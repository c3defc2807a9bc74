"""Where the optimum is known: linear regression with g = log φ², squared error without ½, w̄ = least squares.

The objective is ‖y − Xw̄‖²/n + Σ_k φ_k² a_k² − λ Σ_k log φ_k², so φ_k² = λ/a_k² with a_k² = E[x_k²], and λ/s_k² with the
eigenvalues s_k² of E[x xᵀ] in their basis. `entropy_weight` multiplies the mean of g, hence λ·d.
"""

from __future__ import annotations

import math
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from offmap.data import Rows
from offmap.likelihoods import Likelihood, Prediction
from offmap.maxwent import train as objectives
from offmap.maxwent.train import adam, minimize
from offmap.model.forward import BatchedModel
from offmap.posterior.distribution import WeightDistribution, scaling, svd
from offmap.posterior.noise import NOISES

LAMBDA, D, ROWS, DRAWS, STEPS = 0.05, 4, 200, 128, 300


class SquaredError(Likelihood):
    """A user's own likelihood: (y − ŷ)², no ½, no constants."""

    def nll(self, output: Tensor, y: Tensor) -> Tensor:
        return (output.squeeze(-1) - y).square()

    def predict(self, outputs: Tensor) -> Prediction:
        return Prediction(mean=outputs.mean(0), std=outputs.std(0))

    def score(self, outputs: Tensor) -> Tensor:
        return outputs.squeeze(-1).var(0)

    def epistemic(self, outputs: Tensor) -> Tensor:
        return outputs[..., 0].var(0)


@cache
def problem() -> tuple[Tensor, Tensor, nn.Linear]:
    """Correlated inputs of different sizes, noisy targets, and the least-squares model."""
    generator = torch.Generator().manual_seed(0)
    mix = torch.tensor([[1.0, 0.5, 0, 0], [0, 1.0, 0.8, 0], [0, 0, 0.5, 0.4], [0, 0, 0, 2.0]], dtype=torch.float64)
    x = torch.randn(ROWS, D, generator=generator, dtype=torch.float64) @ mix
    y = x @ torch.tensor([1.0, -2, 0.5, 0.3], dtype=torch.float64) + 0.1 * torch.randn(ROWS, generator=generator).double()
    net = nn.Linear(D, 1, bias=False).double().requires_grad_(False)
    net.weight.copy_(torch.linalg.lstsq(x, y[:, None]).solution.mT)
    return x, y, net


def amplitudes() -> dict[str, Tensor]:
    """a² and s², by definition."""
    x, _, _ = problem()
    moment = x.mT @ x / ROWS
    return {"identity": moment.diagonal(), "svd": torch.linalg.eigvalsh(moment).flip(0)}


def descend(objective: objectives.Objective, q: WeightDistribution, steps: int) -> None:
    """Adam with a rate that decays to nothing, on the whole data set."""
    x, y, _ = problem()
    optimizer = adam(q.raw_scale.parameters(), lr=0.03)
    data = Rows(x, y, batch_size=ROWS, name="train")
    assert minimize(objective, optimizer, data, steps=steps, schedule=lambda step: (1 - step / steps) ** 2) == "finished"


@cache
def fit_line(basis: str, noise: str) -> WeightDistribution:
    x, _, net = problem()
    start = {"noise": noise, "initial_scale": math.sqrt(LAMBDA)}
    q = scaling(net, **start) if basis == "identity" else svd(net, [x], **start)
    objective = objectives.maxwent(
        q, BatchedModel(net), SquaredError(), entropy_weight=LAMBDA * D, growth=objectives.as_growth("log"), draws=DRAWS
    )
    descend(objective, q, STEPS)
    return q.requires_grad_(False)


@pytest.mark.parametrize("noise", sorted(NOISES))
@pytest.mark.parametrize("basis", ["identity", "svd"])
def test_fitted_scale_matches_closed_form(basis: str, noise: str):
    scale = fit_line(basis, noise).scale()["weight"][0, 0]
    torch.testing.assert_close(scale.square(), LAMBDA / amplitudes()[basis], rtol=0.05, atol=0)


def expected_risk(q: WeightDistribution) -> float:
    """E‖y − Xw‖²/n = ‖y − Xw̄‖²/n + tr(M·V diag(φ²) Vᵀ), exactly."""
    x, y, net = problem()
    v = q.rotation["weight"][0] if "weight" in q.rotation else torch.eye(D, dtype=torch.float64)
    covariance = v @ q.scale()["weight"][0, 0].square().diag() @ v.mT
    return float((x @ net.weight[0] - y).square().mean() + (x.mT @ x / ROWS * covariance).sum())


def sampled_risk(q: WeightDistribution, draws: int) -> float:
    """The same through the model, over draws."""
    x, y, net = problem()
    return float((BatchedModel(net).outputs(q.draw, draws, x).squeeze(-1) - y).square().mean())


@pytest.mark.parametrize("noise", ["uniform", "normal"])
def test_at_the_optima_risks_are_equal_and_svd_has_more_entropy(noise: str):
    # analytic: both spend d·λ on top of the least-squares risk
    a, s = amplitudes()["identity"], amplitudes()["svd"]
    gain = float(0.5 * a.log().sum() - 0.5 * s.log().sum())
    assert gain > 0.3  # Hadamard: det M ≤ Π M_kk, strictly for correlated inputs
    x, y, net = problem()
    plain = float((x @ net.weight[0] - y).square().mean())
    optimal: dict[str, WeightDistribution] = {}
    for basis, q in (("identity", scaling(net, noise=noise)), ("svd", svd(net, [x], noise=noise))):
        optimal[basis] = q.requires_grad_(False)
        q.set_scale({"weight": (LAMBDA / amplitudes()[basis]).sqrt().reshape(1, 1, D)})
        assert expected_risk(q) == pytest.approx(plain + D * LAMBDA, rel=1e-6)
        assert sampled_risk(q, 2000) == pytest.approx(plain + D * LAMBDA, rel=0.08)
    assert float(optimal["svd"].entropy() - optimal["identity"].entropy()) == pytest.approx(gain, rel=1e-6)
    # fitted
    assert float(fit_line("svd", noise).entropy() - fit_line("identity", noise).entropy()) == pytest.approx(gain, abs=0.05)
    assert expected_risk(fit_line("svd", noise)) == pytest.approx(expected_risk(fit_line("identity", noise)), rel=0.03)


def test_with_the_abs_proxy_the_optimum_is_lambda_over_twice_the_square():
    _, _, net = problem()
    q = scaling(net, initial_scale=0.02)
    objective = objectives.maxwent(q, BatchedModel(net), SquaredError(), entropy_weight=LAMBDA * D, draws=DRAWS)
    descend(objective, q, 400)
    torch.testing.assert_close(q.scale()["weight"][0, 0].detach(), LAMBDA / (2 * amplitudes()["identity"]), rtol=0.05, atol=0)


def test_a_growth_of_the_users_own_is_a_function_of_the_square():
    # g(φ²) = (φ²)^¼ = √φ, so that at the optimum 2 φ a² = λ/(2√φ)
    x, _, net = problem()
    q = svd(net, [x], initial_scale=0.05)
    growth = objectives.as_growth(lambda square: square**0.25)
    descend(
        objectives.maxwent(q, BatchedModel(net), SquaredError(), entropy_weight=LAMBDA * D, growth=growth, draws=DRAWS), q, 400
    )
    optimum = (LAMBDA / (4 * amplitudes()["svd"])) ** (2 / 3)
    torch.testing.assert_close(q.scale()["weight"][0, 0].detach(), optimum, rtol=0.05, atol=0)
