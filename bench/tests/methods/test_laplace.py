"""Laplace by laplace-torch: its own draws and its own variances, as a Predictive."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offmap
import trained
from offmap.data import Place, Rows, as_batches, load_rows
from offmap.errors import ConfigError, ShapeError
from offmap.posterior.predictive import Predictive
from offmap.random import generator
from offmap_bench.methods.laplace import Approximated, Config, Draw, Means, laplace

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # laplace-torch's own, when the tests call it
needed = pytest.mark.skipif(find_spec("laplace") is None, reason="needs laplace-torch")
PLACE = Place(torch.device("cpu"), torch.float32)
X = trained.inputs(9, 5)


def rows(data: tuple[Any, Tensor], name: str = "train") -> Rows:
    return load_rows(as_batches(data, PLACE, name=name, batch_size=32))


def fit_laplace(nets: Any = None, law: Any = None, data: Any = trained.regression, **options: Any) -> Approximated:
    nets = nets or trained.regressor(log_variance=True)
    return laplace.fit(
        nets, rows(data(60)), rows(data(30, 1), "valid"), likelihood=law or offmap.Gaussian(), config=Config(**options)
    )


def posterior(made: Approximated, member: int = 0) -> Any:
    assert isinstance(made.draw, Draw)
    return made.draw.posteriors[member]


@needed
@pytest.mark.parametrize("structure", ["kron", "diag", "full"])
def test_linear_draws_have_the_variance_that_laplace_torch_computes(structure: Any) -> None:
    made = fit_laplace(structure=structure)
    mean, variance = posterior(made)(X, pred_type="glm")
    outputs = made.outputs(X, 1000, seed=1)[..., 0]
    torch.testing.assert_close(outputs.var(0), variance.flatten().detach(), rtol=0.2, atol=0)
    assert ((outputs.mean(0) - mean.flatten()).abs() < 5 * (variance.flatten() / 1000).sqrt()).all()


@needed
def test_linear_draws_are_the_tangent_at_the_trained_weights() -> None:
    made = fit_laplace()
    net = posterior(made).model
    jacobian = torch.func.jacrev(lambda w: torch.func.functional_call(net, w, (X,)))(dict(net.named_parameters()))
    delta = made.draw(range(3), 4)
    for draw in range(3):
        slow = net(X) + sum((jacobian[f"net.{n}"] * d[draw]).flatten(2).sum(2) for n, d in delta.items())
        torch.testing.assert_close(made.outputs(X, 3, seed=4)[draw, :, :1], slow.detach(), rtol=1e-3, atol=1e-4)


@needed
def test_sampled_draws_are_laplace_torchs_own_nets() -> None:
    made = fit_laplace([trained.regressor(m, log_variance=True) for m in range(2)], kind="sampled")
    outputs = made.outputs(X, 3, seed=4).unflatten(0, (2, 3))
    for member in range(2):
        for draw in range(3):
            source = generator(4, "infer", member, draw, "laplace")
            slow = posterior(made, member).functional_samples(X, pred_type="nn", n_samples=1, generator=source)[0]
            torch.testing.assert_close(outputs[member, draw, :, :1], slow.detach(), rtol=1e-3, atol=1e-4)


@needed
@pytest.mark.parametrize("kind", ["linear", "sampled"])
def test_log_variances_stay_the_models_own(kind: Any) -> None:
    net = trained.regressor(log_variance=True)
    outputs = fit_laplace(net, kind=kind).outputs(X, 4)
    torch.testing.assert_close(outputs[..., 1], net(X)[:, 1].detach().expand(4, -1))
    assert outputs[..., 0].std(0).min() > 0


@needed
@pytest.mark.parametrize("kind", ["linear", "sampled"])
def test_draws_are_one_function_for_all_rows_and_any_number_of_them(kind: Any) -> None:
    made = fit_laplace(kind=kind)
    assert isinstance(made, Predictive)
    outputs = made.outputs(X, 6, clip=None, seed=3)
    assert outputs.shape == (6, 9, 2)
    torch.testing.assert_close(made.outputs(X[4:6], 6, seed=3), outputs[:, 4:6], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(made.outputs(X, 2, seed=3), outputs[:2], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(made.outputs(X.repeat(40, 1), 6, seed=3)[:, -9:], outputs, rtol=1e-4, atol=1e-5)
    assert not torch.equal(made.outputs(X, 6, seed=4), outputs)


@needed
def test_some_weights_can_stay_fixed() -> None:
    made = fit_laplace(params="2.*")
    assert set(made.draw(range(2), 0)) == {"2.weight", "2.bias"}
    # linear in its last layer, the model is its own tangent
    torch.testing.assert_close(made.outputs(X, 4), fit_laplace(params="2.*", kind="sampled").outputs(X, 4), rtol=1e-3, atol=1e-4)


@needed
def test_classes_are_drawn_too() -> None:
    made = fit_laplace(trained.classifier(), offmap.Categorical(), trained.classes)
    assert made.means is None
    variance = posterior(made)._glm_predictive_distribution(X)[1].diagonal(dim1=1, dim2=2)
    torch.testing.assert_close(made.outputs(X, 1000).var(0), variance.detach(), rtol=0.25, atol=0)


@needed
def test_a_given_prior_is_kept_and_a_narrower_one_gives_narrower_draws() -> None:
    wide, narrow = (fit_laplace(prior_precision=value) for value in (0.1, 100.0))
    assert wide.chosen["prior_precision"] == [pytest.approx(0.1)]
    x, y = trained.regression(60)
    residual = float((trained.regressor(log_variance=True)(x)[:, 0] - y).detach().square().mean().sqrt())
    assert wide.chosen["sigma_noise"] == [pytest.approx(residual, rel=1e-4)]
    assert narrow.outputs(X, 50)[..., 0].std(0).mean() < wide.outputs(X, 50)[..., 0].std(0).mean()


@needed
@pytest.mark.parametrize("structure", ["kron", "full"])
def test_prior_and_noise_are_those_of_highest_evidence(structure: Any) -> None:
    made = posterior(fit_laplace(structure=structure))
    best, prior, noise = float(made.log_marginal_likelihood()), made.prior_precision.clone(), made.sigma_noise.clone()
    for up in (0.7, 0.9, 1.1, 1.4):
        assert best > float(made.log_marginal_likelihood(up * prior, noise))
        assert best > float(made.log_marginal_likelihood(prior, up * noise))


@needed
def test_the_noise_of_the_likelihood_gives_the_posterior_of_bayesian_linear_regression() -> None:
    torch.manual_seed(0)
    x, net, noise = torch.randn(60, 2), nn.Linear(2, 2), torch.tensor([0.3, 2.0])
    y = x @ torch.randn(2, 2) + noise.sqrt() * torch.randn(60, 2)
    law, data = offmap.Gaussian(2, flat=False, noise=noise), lambda n, seed=0: (x, y)
    made = fit_laplace(net, law, data, structure="full", prior_precision=0.5)
    assert made.chosen["sigma_noise"] == [pytest.approx(float(noise.mean().sqrt()))]
    columns = torch.cat([x, torch.ones(60, 1)], 1)
    new = torch.cat([X[:, :2], torch.ones(9, 1)], 1)
    covariances = [torch.linalg.inv(columns.mT @ columns / v + 0.5 * torch.eye(3)) for v in noise]  # of each target's weights
    wanted = torch.stack([(new @ c * new).sum(1) for c in covariances], 1)
    torch.testing.assert_close(made.outputs(X[:, :2], 4000).var(0), wanted, rtol=0.15, atol=0)
    found = fit_laplace(net, law, data, structure="full")
    assert found.chosen["sigma_noise"] == made.chosen["sigma_noise"]  # the evidence chooses the prior alone
    assert found.chosen["prior_precision"] != made.chosen["prior_precision"]


@needed
def test_guards_give_verdicts_and_the_nets_are_untouched() -> None:
    net = trained.regressor(log_variance=True)
    before = {n: p.detach().clone() for n, p in net.named_parameters()}
    guard = offmap.guard(fit_laplace(net), trained.regression(60, 1), draws=20)
    assert guard.score(20 * trained.inputs(40, 5)).median() > guard.score(trained.inputs(40, 5)).median()
    assert all(torch.equal(before[n], p) and p.requires_grad for n, p in net.named_parameters())


@needed
def test_a_model_with_a_flat_output_is_given_a_column() -> None:
    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = trained.regressor()

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)[:, 0]

    made = fit_laplace(Flat(), offmap.Gaussian(noise=torch.tensor([0.01])))
    assert made.outputs(X, 3).shape == (3, 9)
    assert Means(Flat(), lambda o: o, None)(X).shape == (9, 1)


@needed
def test_inputs_and_outputs_that_it_does_not_know_are_refused() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = trained.regressor(log_variance=True)

        def forward(self, table: Tensor) -> Tensor:
            return self.net(table)

    def make_named(n: int, seed: int = 0) -> Any:
        x, y = trained.regression(n, seed)
        return {"table": x}, y

    with pytest.raises(ShapeError, match="Expected inputs that are one tensor and one row of outputs for each"):
        fit_laplace(Named(), data=make_named)


BAD = {
    "structure": ("krone", "Expected `structure` to be .*did you mean 'kron'"),
    "kind": ("glm", "Expected `kind` to be"),
    "batch_size": (0, "Expected `batch_size` to be a whole number above 0, but got 0"),
    "prior_precision": (0.0, "Expected `prior_precision` to be a number above 0 or None, but got 0.0"),
}


@pytest.mark.parametrize("field", BAD)
def test_impossible_settings_are_refused(field: str) -> None:
    value, message = BAD[field]
    with pytest.raises(ConfigError, match=message):
        fit_laplace(**{field: value})


def test_other_likelihoods_are_refused() -> None:
    with pytest.raises(
        ConfigError, match="Expected a likelihood that laplace-torch knows, Gaussian or Categorical, but got Bernoulli"
    ):
        fit_laplace(law=offmap.Bernoulli())


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "laplace", None)
    with pytest.raises(ConfigError) as error:
        fit_laplace()
    assert str(error.value) == (
        "laplace-torch is needed here and is not installed: pip install 'offmap-bench[laplace]' && "
        "pip install --no-deps laplace-torch curvlinops-for-pytorch backpack-for-pytorch"
    )
