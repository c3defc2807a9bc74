"""Variational Bayes over the same weight distribution: appendix C of the paper."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offmap
import trained
from offmap.data import Place, Rows, as_batches, load_rows
from offmap.errors import ConfigError
from offmap.integrations.nets import mlp
from offmap.posterior.noise import NOISES, Uniform
from offmap.posterior.predictive import Stochastic
from offmap_bench.methods import deep_ensemble
from offmap_bench.methods.variational import ABLATION, BNNConfig, bnn
from offmap_bench.tasks.synthetic import moons

PLACE = Place(torch.device("cpu"), torch.float32)
QUICK: dict[str, Any] = {"steps": 60, "check_every": 20, "lr": 0.01, "risk_draws": 10, "initial_raw_scale": -5.0}


def rows(data: tuple[Tensor, Tensor], name: str = "train", batch_size: int = 32) -> Rows:
    return load_rows(as_batches(data, PLACE, name=name, batch_size=batch_size))


def fit_bnn(setting: str, nets: Any = None, **options: Any) -> Stochastic:
    nets = nets or [trained.regressor(m, log_variance=True) for m in range(2)]
    config = replace(ABLATION[setting], **QUICK | options)
    train, valid = rows(trained.regression(60)), rows(trained.regression(30, 1), "valid")
    return bnn.fit(nets, train, valid, likelihood=offmap.Gaussian(), config=config)


def test_the_settings_are_the_columns_of_the_papers_tables() -> None:
    expected = {
        name: (f"{'nosvd' if c.basis == 'identity' else c.basis}_{'un' if c.mean == 'trained' else ''}frozen_"
               f"{'small' if c.prior_variance < 1 else 'large'}")
        for name, c in ABLATION.items()
    }  # fmt: skip
    assert all(name == words for name, words in expected.items())
    assert len(ABLATION) == 6
    assert {c.prior_variance for c in ABLATION.values()} == {0.1, 1e10}


@pytest.mark.parametrize("setting", ABLATION)
def test_every_setting_runs_on_regression_and_ends_at_or_below_the_threshold(setting: str) -> None:
    nets = [trained.regressor(m, log_variance=True) for m in range(2)]
    before = [{n: p.detach().clone() for n, p in net.named_parameters()} for net in nets]
    made = fit_bnn(setting, nets)
    history = made.history
    assert all(risk <= bound + 1e-6 for risk, bound in zip(history.final_risk, history.max_risk, strict=True))
    assert history.final_entropy[0] > history.entropy[0][0] or history.kept[0] == 0
    for member, own in enumerate(before):
        assert all(torch.equal(own[n], p) for n, p in nets[member].named_parameters())  # the user's nets are untouched
        moved = [not torch.equal(made.q.mean[n][member], w) for n, w in own.items()]
        assert not any(moved) if ABLATION[setting].mean == "frozen" else all(moved) or history.kept[member] == 0
    guard = offmap.guard(made, trained.regression(30, 1), draws=8)
    assert guard.score(100 * trained.inputs(5, 9)).median() > guard.score(trained.inputs(50, 8)).median()


@pytest.fixture(scope="module")
def moon_net() -> nn.Module:
    task = moons(test=2, ood_points=2)
    config = deep_ensemble.Config(steps=300, lr=5e-3, check_every=100)
    valid = rows(task.valid, "valid")
    return deep_ensemble.fit(
        mlp(2, 1, hidden=[30, 30]), rows(task.train), valid, likelihood=offmap.Bernoulli(), config=config
    ).nets()[0]


@pytest.mark.parametrize("setting", ABLATION)
def test_every_setting_runs_on_two_moons(setting: str, moon_net: nn.Module) -> None:
    task = moons(test=100, ood_points=100)
    config = replace(ABLATION[setting], **QUICK | {"tolerance": "smoothed"})
    made = bnn.fit(moon_net, rows(task.train), rows(task.valid, "valid"), likelihood=offmap.Bernoulli(), config=config)
    assert made.history.final_risk[0] <= made.history.max_risk[0]
    outputs = made.outputs(task.test[0], 20, clip=None, seed=0)
    right = ((outputs.sigmoid().mean(0)[:, 0] > 0.5).long() == task.test[1]).float().mean()
    assert float(right) > 0.9


def test_a_wider_prior_gives_more_entropy() -> None:
    free = {"max_risk": 1e6, "steps": 400, "lr": 0.03}
    small, large = (fit_bnn(f"nosvd_frozen_{size}", **free).history.final_entropy[0] for size in ("small", "large"))
    assert large > small + 0.1


def test_frozen_large_prior_is_maxwent_with_the_log_up_to_a_constant() -> None:
    """The gradient of the KL in φ is that of −½ log φ² as σ → ∞."""
    from offmap.maxwent.train import GROWTHS
    from offmap.posterior.distribution import scaling
    from offmap_bench.methods.variational import kl

    q = scaling(trained.regressor(), noise="normal", initial_scale=0.3)
    divergence = torch.autograd.grad(kl(q, 1e10, dict(q.mean.items())).sum(), list(q.raw_scale.values()))
    entropy = sum(GROWTHS["log"](s).sum() for s in q.scale().values())
    for ours, theirs in zip(divergence, torch.autograd.grad(entropy, list(q.raw_scale.values())), strict=True):
        torch.testing.assert_close(ours, -0.5 * theirs, rtol=1e-5, atol=0)


@pytest.mark.parametrize("basis", ["svd", "identity"])
def test_frozen_large_prior_has_the_gradient_of_maxwent(basis: str) -> None:
    """A KL weight of λ/n, beside the mean NLL, is λ/(2n) on Σ log φ²: here λ·d/n on KL/d and λ·d/(2n) on the mean."""
    from offmap.maxwent.train import GROWTHS, maxwent
    from offmap.model.forward import BatchedModel
    from offmap.posterior.distribution import scaling, svd
    from offmap_bench.methods.variational import elbo

    x, y = (t.double() for t in trained.regression(60))
    nets = [trained.regressor(m, log_variance=True).double() for m in range(2)]
    q = (svd(nets, [x], noise="normal") if basis == "svd" else scaling(nets, noise="normal")).double()
    q.set_scale({n: 0.01 + 0.2 * torch.rand_like(s) for n, s in q.scale().items()})
    model, weight, common = BatchedModel(nets[0]), 10.0 / len(x), {"draws": 2, "seed": 3}
    bayes = elbo(q, model, offmap.Gaussian(), entropy_weight=weight * q.dimension, prior_variance=1e10,
                 prior_mean=dict(q.mean.items()), **common)  # fmt: skip
    ours = maxwent(q, model, offmap.Gaussian(), entropy_weight=weight * q.dimension / 2, growth=GROWTHS["log"], **common)
    for step in range(2):
        left, right = (torch.autograd.grad(f(step, (x, y)), list(q.raw_scale.values())) for f in (bayes, ours))
        for one, other in zip(left, right, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=0)


@pytest.mark.parametrize("prior_variance", [0.1, 10.0])
def test_on_a_linear_gaussian_model_it_reaches_the_mean_field_posterior(prior_variance: float) -> None:
    """y = x·w + ε, ε ~ N(0, s²), w ~ N(0, σ²I): precision Λ = XᵀX/s² + I/σ², mean Λ⁻¹Xᵀy/s², φ_k² = 1/Λ_kk."""
    n, d, noise = 40, 3, 0.5
    x = torch.randn(n, d, generator=torch.Generator().manual_seed(3)) @ torch.tensor([[1.0, 0.6, 0], [0, 1, 0], [0, 0, 0.3]])
    y = x @ torch.tensor([1.0, -2.0, 0.5]) + math.sqrt(noise) * torch.randn(n, generator=torch.Generator().manual_seed(4))
    precision = x.mT @ x / noise + torch.eye(d) / prior_variance
    net = nn.Linear(d, 1, bias=False)
    nn.init.zeros_(net.weight)
    config = BNNConfig(mean="trained", basis="identity", prior_variance=prior_variance, tradeoff=d / n, max_risk=1e6,
                    steps=500, lr=0.02, draws_per_step=64, initial_raw_scale=-2.0, check_every=500, risk_draws=2)  # fmt: skip
    law = offmap.Gaussian(noise=torch.tensor([noise]))
    data = rows((x, y), batch_size=n)
    q = bnn.fit(net, data, data, likelihood=law, config=config).q
    torch.testing.assert_close(q.scale()["weight"][0, 0].square(), 1 / precision.diagonal(), rtol=0.08, atol=0)
    mean = torch.linalg.solve(precision, x.mT @ y / noise)
    torch.testing.assert_close(q.mean["weight"][0, 0], mean, rtol=0, atol=0.25 * float(precision.diagonal().rsqrt().min()))


def test_a_trained_mean_ends_with_the_state_that_was_kept() -> None:
    """A prior so heavy that later states fail: mean and φ come from the same, earlier check."""
    options = {"tradeoff": 1e3, "lr": 0.005, "check_every": 2, "steps": 40}
    made = fit_bnn("nosvd_unfrozen_small", trained.regressor(log_variance=True), **options)
    assert made.history.risk[-1][0] > made.history.max_risk[0]
    assert made.history.kept[0] > 0
    kept = made.history.step.index(made.history.kept[0])
    assert made.history.final_risk[0] == pytest.approx(made.history.risk[kept][0], abs=1e-6)


def test_uniform_noise_and_its_width_are_allowed() -> None:
    for noise in ("uniform", Uniform(1.0)):
        assert fit_bnn("svd_frozen_small", noise=noise).history.stop_reason == "finished"


def test_a_guard_with_a_trained_mean_says_that_it_cannot_be_saved(tmp_path: Any) -> None:
    guard = offmap.guard(fit_bnn("nosvd_unfrozen_small"), trained.regression(30, 1), draws=4)
    with pytest.raises(ConfigError, match="A guard whose mean was trained cannot be saved: a file holds no weights"):
        guard.save(tmp_path / "guard.safetensors")
    frozen = fit_bnn("svd_frozen_small")
    offmap.guard(frozen, trained.regression(30, 1), draws=4).save(tmp_path / "guard.safetensors")


BAD = {
    "mean": ("free", "Expected `mean` to be"),
    "basis": ("pca", "Expected `basis` to be"),
    "prior_variance": (0.0, "Expected `prior_variance` to be a number above 0, but got 0.0"),
    "tradeoff": (math.inf, "Expected `tradeoff` to be a number above 0"),
    "steps": (0, "Expected `steps` to be a whole number above 0, but got 0"),
    "tolerance": ("lax", "Expected `tolerance` to be"),
    "noise": ("normale", "Expected `noise` to be"),
}


@pytest.mark.parametrize("field", BAD)
def test_impossible_settings_are_refused(field: str) -> None:
    value, message = BAD[field]
    with pytest.raises(ConfigError, match=message):
        fit_bnn("nosvd_frozen_small", **{field: value})


def test_svd_wants_a_frozen_mean_and_the_divergence_a_density() -> None:
    with pytest.raises(ConfigError, match="Expected `mean='frozen'` with `basis='svd'`: the basis belongs to the activations"):
        fit_bnn("svd_frozen_small", mean="trained")
    with pytest.raises(
        ConfigError, match="Expected noise with a density, such as uniform or normal, for a KL divergence in closed form"
    ):
        fit_bnn("nosvd_frozen_small", noise=NOISES["rademacher"])
