"""The negative ELBO and its KL divergence."""

from __future__ import annotations

import pytest
import torch

import oracles
import trained
from offmap.likelihoods import Gaussian
from offmap.model.forward import BatchedModel, copy_model
from offmap.posterior.distribution import scaling, svd
from offmap.posterior.noise import Uniform
from offmap_bench.methods.variational import elbo, kl


@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize("basis", ["svd", "identity"])
@pytest.mark.parametrize("variance", [0.1, 2.0])
def test_the_divergence_from_the_prior_is_that_of_two_gaussians(basis: str, variance: float, centred: bool):
    nets = [copy_model(trained.regressor(m).double()) for m in range(2)]
    q = svd(nets, [trained.inputs(20).double()], noise="normal") if basis == "svd" else scaling(nets, noise="normal")
    q.requires_grad_(False).set_scale({n: 0.05 + torch.rand_like(s) for n, s in q.scale().items()})
    expected = torch.zeros(2, dtype=torch.float64)
    for name, mean in q.mean.items():
        prior = torch.distributions.Normal(mean if centred else torch.zeros_like(mean), variance**0.5)
        ours = torch.distributions.Normal(mean, q.scale()[name])  # in the basis, which an isotropic prior does not notice
        expected += torch.distributions.kl_divergence(ours, prior).flatten(1).sum(1)
    torch.testing.assert_close(kl(q, variance, dict(q.mean.items()) if centred else None), expected)


@pytest.mark.parametrize("half_width", [3**0.5, 1.0])
def test_the_divergence_of_uniform_noise_is_that_of_samples(half_width: float):
    q = scaling(trained.regressor(), noise=Uniform(half_width)).requires_grad_(False)
    q.set_scale({n: 0.05 + torch.rand_like(s) for n, s in q.scale().items()})
    log_q = -sum(float((2 * half_width * s).log().sum()) for s in q.scale().values())
    log_p = sum(
        torch.distributions.Normal(0.0, 0.7**0.5).log_prob(w).flatten(1).sum(1).double() for w in q.draw(range(4000)).values()
    )
    assert float(kl(q, 0.7)) == pytest.approx(log_q - float(log_p.mean()), rel=5e-3)


def test_the_negative_evidence_written_out():
    nets = [copy_model(trained.regressor(m, log_variance=True)) for m in range(2)]
    x, y = trained.regression(10)
    q = svd(nets, [x], noise="normal", initial_scale=0.05).requires_grad_(False)
    objective = elbo(q, BatchedModel(nets[0]), Gaussian(), entropy_weight=3.0, prior_variance=0.1, draws=3, seed=4)
    outputs = oracles.run(nets[0], q.draw(range(15, 18), seed=4, stream="fit"), x)
    risk = oracles.gaussian_nll(outputs, y).unflatten(0, (2, 3)).mean((1, 2))
    expected = float(risk.sum() + 3.0 / q.dimension * kl(q, 0.1).sum())
    assert float(objective(5, (x, y))) == pytest.approx(expected, rel=1e-4)
