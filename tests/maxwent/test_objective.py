"""Algorithm 1: E_q[NLL] − λ·(1/d) Σ g(φ²), summed over members."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

import oracles
import trained
from offmap.errors import ConfigError
from offmap.likelihoods import Gaussian
from offmap.maxwent.train import as_growth, maxwent
from offmap.model.forward import BatchedModel, copy_model
from offmap.posterior.distribution import scaling, svd
from offmap.posterior.noise import NOISES

G: dict[str, Callable[[float], float]] = {"abs": lambda phi: phi, "log": lambda phi: math.log(phi**2)}


@pytest.mark.parametrize("growth", ["abs", "log"])
@pytest.mark.parametrize("draws", [1, 3])
@pytest.mark.parametrize("basis", ["svd", "identity"])
def test_the_objective_written_out(basis: str, draws: int, growth: str):
    nets = [copy_model(trained.regressor(m, log_variance=True)) for m in range(2)]
    x, y = trained.regression(10)
    q = (svd(nets, [x]) if basis == "svd" else scaling(nets)).requires_grad_(False)
    q.set_scale({n: 0.01 + 0.1 * torch.rand_like(s) for n, s in q.scale().items()})
    objective = maxwent(q, BatchedModel(nets[0]), Gaussian(), entropy_weight=3.0, growth=as_growth(growth), draws=draws, seed=4)
    for step in (0, 5):
        outputs = oracles.run(nets[0], q.draw(range(step * draws, (step + 1) * draws), seed=4, stream="fit"), x)
        risk = oracles.gaussian_nll(outputs, y).unflatten(0, (2, draws)).mean((1, 2))
        total = 0.0
        for member in range(2):
            scales = [phi for s in q.scale().values() for phi in s[member].flatten().tolist()]
            total += float(risk[member]) - 3.0 / q.dimension * sum(map(G[growth], scales))
        assert float(objective(step, (x, y))) == pytest.approx(total, rel=1e-4)


def test_members_do_not_disturb_each_other():
    nets = [copy_model(trained.regressor(m, log_variance=True).double()) for m in range(2)]
    x, y = (t.double() for t in trained.regression(10))
    gradients: list[list[torch.Tensor]] = []
    for models in (nets, nets[:1]):
        q = scaling(models, initial_scale=0.05)
        maxwent(q, BatchedModel(nets[0]), Gaussian(), entropy_weight=1.0)(0, (x, y)).backward()
        gradients.append([raw.grad[0] for raw in q.raw_scale.values()])
    for together, alone in zip(*gradients, strict=True):
        torch.testing.assert_close(together, alone)


@pytest.mark.parametrize("noise", sorted(NOISES))
def test_its_gradient_is_that_of_finite_differences(noise: str):
    net = copy_model(trained.regressor(log_variance=True).double())
    x, y = (t.double() for t in trained.regression(10))
    q = svd(net, [x], initial_scale=0.05, noise=noise)
    objective = maxwent(q, BatchedModel(net), Gaussian(), entropy_weight=1.0, growth=as_growth("log"), draws=2)
    objective(0, (x, y)).backward()
    for raw in q.raw_scale.values():
        place = tuple(0 for _ in raw.shape)
        losses: list[float] = []
        for change in (1e-5, -2e-5):
            with torch.no_grad():
                raw[place] += change
                losses.append(float(objective(0, (x, y))))
        with torch.no_grad():
            raw[place] += 1e-5
        assert float(raw.grad[place]) == pytest.approx((losses[0] - losses[1]) / 2e-5, rel=1e-4, abs=1e-7)


def test_growths_by_name_and_by_function_are_the_same():
    phi = torch.rand(5) + 0.1
    torch.testing.assert_close(as_growth("abs")(phi), as_growth(torch.sqrt)(phi))
    torch.testing.assert_close(as_growth("log")(phi), as_growth(torch.log)(phi))


def test_an_unknown_growth_is_refused_and_the_nearest_named():
    with pytest.raises(ConfigError, match=r"Expected `regularizer` to be .*\(did you mean 'log'\?\) or a function of φ², but"):
        as_growth("logs")
