"""The competitor BNN: its objective by hand, its posterior where it is known, and grids that train in one stack."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence

import offmap
import trained
from offmap.data import Place, Rows, as_batches, load_rows
from offmap.errors import ConfigError
from offmap.integrations.nets import mlp
from offmap.maxwent.config import Runtime
from offmap.model.params import stack_models
from offmap.posterior.noise import Normal as NormalNoise
from offmap.posterior.predictive import Predictive, Stochastic
from offmap.random import generator
from offmap_bench.methods.variational import GRID, MeanFieldConfig, Posteriors, mean_field, start

PLACE = Place(torch.device("cpu"), torch.float32)
LAW = offmap.Gaussian()
QUICK = MeanFieldConfig(steps=40, check_every=10, lr=0.01, risk_draws=6)


def rows(data: tuple[Tensor, Tensor], name: str = "train", batch_size: int = 16) -> Rows:
    return load_rows(as_batches(data, PLACE, name=name, batch_size=batch_size))


def nets(count: int = 2) -> list[nn.Module]:
    return [mlp(3, 2, hidden=[8], seed=seed) for seed in range(count)]


def fit_mean_field(tradeoffs: list[float], members: Any = None, *, seed: int = 0, **options: Any) -> list[Stochastic]:
    configs = [replace(QUICK, tradeoff=tradeoff, **options) for tradeoff in tradeoffs]
    train, valid = rows(trained.regression(60)), rows(trained.regression(30, 1), "valid")
    return mean_field.fit_grid(members or nets(), train, valid, likelihood=LAW, configs=configs, seed=seed)


def test_the_grid_is_the_papers() -> None:
    assert GRID == (0.001, 0.01, 0.1, 1.0, 10.0, 100.0, 1000.0)
    assert MeanFieldConfig().prior_variance == 1.0
    assert MeanFieldConfig().steps == 50_000


def test_the_objective_is_the_weighted_bound_written_out() -> None:
    """Per row: mean NLL of one drawn net + (λ/n)·KL(N(μ, σ²) ‖ N(0, 1)), summed over settings and members."""
    config = replace(QUICK, initial_raw_scale=-1.0, draws_per_step=2)
    stacked, (x, y) = stack_models(nets()), trained.regression(16)
    q = start(stacked, 2, config)
    model = Runtime().model(stacked.module, stacked.mean, x)
    weight = torch.tensor([0.1, 3.0]) / 60
    ours = Posteriors(q, model, LAW, config, 2, 5).losses(weight, 7, (x, y)).sum()
    sigma, slow = math.log1p(math.exp(-1.0)), 0.0
    for tradeoff in (0.1, 3.0):
        for member, net in enumerate(nets()):
            losses = []
            for draw in (14, 15):
                weights = {
                    n: p.detach() + sigma * NormalNoise().sample(tuple(p.shape), generator(5, "fit", member, draw, n))
                    for n, p in net.named_parameters()
                }
                out = torch.func.functional_call(net, weights, (x,))
                losses.append(-Normal(out[:, 0], (0.5 * out[:, 1]).exp()).log_prob(y).mean())
            divergence = sum(kl_divergence(Normal(p.detach(), sigma), Normal(0.0, 1.0)).sum() for p in net.parameters())
            slow += float(sum(losses) / 2 + tradeoff / 60 * divergence)
    assert float(ours.detach()) == pytest.approx(slow, rel=1e-5)


def test_a_setting_in_the_stack_is_what_it_is_alone() -> None:
    x = trained.inputs(9, 5)
    together = fit_mean_field([0.01, 1.0, 100.0], steps=20)
    for tradeoff, one in zip([0.01, 1.0, 100.0], together, strict=True):
        (alone,) = fit_mean_field([tradeoff], steps=20)
        assert one.history.chosen == {"tradeoff": tradeoff}
        torch.testing.assert_close(
            one.outputs(x, 5, clip=None, seed=2), alone.outputs(x, 5, clip=None, seed=2), rtol=1e-3, atol=1e-4
        )
        assert one.history.final_risk == pytest.approx(alone.history.final_risk, rel=1e-4, abs=1e-5)
    assert not torch.allclose(together[0].q.mean["0.weight"], together[2].q.mean["0.weight"])


def test_a_member_in_the_stack_is_what_it_is_alone() -> None:
    x, (one,), (alone,) = trained.inputs(9, 5), fit_mean_field([1.0]), fit_mean_field([1.0], nets(1))
    first = one.outputs(x, 5, clip=None, seed=2)[:5]
    torch.testing.assert_close(first, alone.outputs(x, 5, clip=None, seed=2), rtol=1e-3, atol=1e-4)


def test_the_state_of_lowest_validation_nll_is_kept() -> None:
    """So large a rate that it gets worse: more steps never end above fewer."""
    risks = [fit_mean_field([1.0], lr=0.3, steps=steps, check_every=1)[0].history.final_risk for steps in (2, 5, 30)]
    for earlier, later in pairwise(risks):
        assert all(b <= a + 1e-6 for a, b in zip(earlier, later, strict=True))


def test_more_weight_on_the_prior_brings_the_posterior_closer_to_it() -> None:
    light, heavy = fit_mean_field([1e-3, 1e3], steps=150, check_every=150, lr=0.02)
    size = [sum(float(m.square().sum()) for m in made.q.mean.values()) for made in (light, heavy)]
    spread = [torch.cat([s.flatten() for s in made.q.scale().values()]) for made in (light, heavy)]
    assert size[1] < size[0]
    assert (spread[1] - 1).abs().mean() < (spread[0] - 1).abs().mean()


def test_on_a_linear_gaussian_model_it_reaches_the_tempered_mean_field_posterior() -> None:
    """Precision of the tempered posterior Λ = XᵀX/(λs²) + I: mean Λ⁻¹Xᵀy/(λs²), σ_k² = 1/Λ_kk."""
    n, d, noise, tradeoff = 40, 3, 0.5, 0.25
    x = torch.randn(n, d, generator=torch.Generator().manual_seed(3))
    y = x @ torch.tensor([1.0, -2.0, 0.5]) + math.sqrt(noise) * torch.randn(n, generator=torch.Generator().manual_seed(4))
    precision = x.mT @ x / (tradeoff * noise) + torch.eye(d)
    net = nn.Linear(d, 1, bias=False)
    config = MeanFieldConfig(tradeoff=tradeoff, steps=400, lr=0.02, draws_per_step=32, check_every=400, risk_draws=2)
    data = rows((x, y), batch_size=n)
    q = mean_field.fit(net, data, data, likelihood=offmap.Gaussian(noise=torch.tensor([noise])), config=config).q
    torch.testing.assert_close(q.scale()["weight"][0, 0].square(), 1 / precision.diagonal(), rtol=0.08, atol=0)
    mean = torch.linalg.solve(precision, x.mT @ y / (tradeoff * noise))
    torch.testing.assert_close(q.mean["weight"][0, 0], mean, rtol=0, atol=0.25 * float(precision.diagonal().rsqrt().min()))


def test_rows_that_an_epoch_has_twice_count_once() -> None:
    (x, y), config = trained.regression(12), replace(QUICK, tradeoff=3.0, steps=10)
    data = rows((x, y), batch_size=24)
    twice = rows((x.repeat(2, 1), y.repeat(2)), batch_size=24)
    once = mean_field.fit(nets(), data, data, likelihood=LAW, config=config).q
    again = mean_field.fit(nets(), twice, data, likelihood=LAW, config=config, repeats=2).q
    for name, mean in once.mean.items():
        torch.testing.assert_close(again.mean[name], mean, rtol=1e-4, atol=1e-5)


def test_biases_without_noise_are_trained() -> None:
    own = nets()
    (made,) = fit_mean_field([0.1], own, random="matrices")
    assert set(made.q.mean) == {"0.weight", "2.weight"}
    draws = made.q.draw(range(3))
    for member, net in enumerate(own):
        for name, bias in net.named_parameters():
            if name.endswith("bias"):
                drawn = draws[name].unflatten(0, (2, 3))[member]
                assert torch.equal(drawn[0], drawn[2])
                assert not torch.equal(drawn[0], bias)


@pytest.mark.parametrize("risk", ["nll", "averaged-nll"])
def test_the_state_is_judged_by_the_mixture_or_by_averaged_outputs(risk: str) -> None:
    stacked, valid = stack_models(nets()), rows(trained.regression(30, 1), "valid")
    config = replace(QUICK, risk=risk, initial_raw_scale=0.0)
    q = start(stacked, 1, config)
    ours = Posteriors(q, Runtime().model(stacked.module, stacked.mean, valid.inputs), LAW, config, 2, 5).validation(valid)
    for member, net in enumerate(nets()):
        outputs = []
        for draw in range(config.risk_draws):
            weights = {
                n: p.detach() + math.log(2) * NormalNoise().sample(tuple(p.shape), generator(5, "valid", member, draw, n))
                for n, p in net.named_parameters()
            }
            outputs.append(torch.func.functional_call(net, weights, (valid.inputs,)))
        drawn = torch.stack(outputs)
        mean, variance = drawn[..., 0].mean(0), drawn[..., 1].exp().mean(0) + drawn[..., 0].var(0, correction=0)
        variance = drawn[..., 1].mean(0).exp() if risk == "averaged-nll" else variance
        slow = -Normal(mean, variance.sqrt()).log_prob(valid.targets).mean()
        assert float(ours[member]) == pytest.approx(float(slow), rel=1e-4)


def test_it_is_a_predictive_and_leaves_the_nets_alone() -> None:
    own = nets()
    before = [{n: p.detach().clone() for n, p in net.named_parameters()} for net in own]
    (made,) = fit_mean_field([0.1], own, steps=100)
    assert isinstance(made, Predictive)
    assert all(torch.equal(b[n], p) for net, b in zip(own, before, strict=True) for n, p in net.named_parameters())
    assert not any(p.requires_grad for p in made.q.parameters())
    guard = offmap.guard(made, trained.regression(30, 1), draws=8)
    assert guard.score(50 * trained.inputs(20, 9)).median() > guard.score(trained.inputs(20, 8)).median()


def test_a_setting_that_is_lost_does_not_stop_the_others() -> None:
    """A prior weight that overflows: its loss is never finite."""
    good, lost = fit_mean_field([1.0, 2.9e38])
    (alone,) = fit_mean_field([1.0])
    torch.testing.assert_close(good.q.mean["0.weight"], alone.q.mean["0.weight"], rtol=1e-3, atol=1e-5)
    assert all(m.isfinite().all() for m in lost.q.mean.values())


def test_divergence_is_said(caplog: pytest.LogCaptureFixture) -> None:
    (made,) = fit_mean_field([1.0], lr=1e25)
    assert made.outputs(trained.inputs(5), 3, clip=None, seed=0).isfinite().all()
    assert "Training diverged (the loss is not finite); every member keeps its best state so far. Lower `lr`." in caplog.messages


BAD: dict[str, Any] = {
    "prior_variance": (0.0, "Expected `prior_variance` to be a number above 0, but got 0.0"),
    "lr": (math.inf, "Expected `lr` to be a number above 0"),
    "steps": (0, "Expected `steps` to be a whole number above 0, but got 0"),
    "random": ("biases", r"Expected `random` to be one of \['all', 'matrices'\], but got 'biases'"),
    "initial_raw_scale": (math.nan, "Expected `initial_raw_scale` to be a finite number, but got nan"),
}


@pytest.mark.parametrize("field", BAD)
def test_impossible_settings_are_refused(field: str) -> None:
    value, message = BAD[field]
    with pytest.raises(ConfigError, match=message):
        fit_mean_field([1.0], **{field: value})


def test_impossible_grids_are_refused() -> None:
    train, valid = rows(trained.regression(60)), rows(trained.regression(30, 1), "valid")
    with pytest.raises(ConfigError, match="Expected at least one setting of a grid, but got none"):
        mean_field.fit_grid(nets(), train, valid, likelihood=LAW, configs=[])
    with pytest.raises(ConfigError, match="Expected settings of one grid to differ in `tradeoff` alone; fit the others apart"):
        mean_field.fit_grid(nets(), train, valid, likelihood=LAW, configs=[QUICK, replace(QUICK, lr=0.5)])
    with pytest.raises(ConfigError, match="Expected `tradeoff` to be a number above 0, but got 0.0"):
        fit_mean_field([1.0, 0.0])
