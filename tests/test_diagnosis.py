"""φ is inverse to the amplitude of what a weight meets: exactly in the closed form, in rank after gradient steps."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import offmap
import trained
from offmap.data import Place, as_batches, load_rows
from offmap.detector import Calibration
from offmap.errors import ConfigError
from offmap.integrations.nets import mlp
from offmap.maxwent.search import unit_scale
from offmap.model.forward import BatchedModel, copy_model
from offmap.model.params import stack_models
from offmap.posterior.basis import observe
from offmap.posterior.distribution import WeightDistribution, scaling, svd
from offmap.posterior.predictive import Stochastic
from offmap.scores.score import PaperScore
from offmap_bench.methods import deep_ensemble
from offmap_bench.methods.variational import ABLATION, bnn
from offmap_bench.tasks.synthetic import moons
from zoo import Case
from zoo.ways import BASES

PLACE = Place(torch.device("cpu"), torch.float32)


@pytest.fixture(scope="module")
def moon_nets() -> list[nn.Module]:
    task = moons(test=2, ood_points=2)
    train, valid = (load_rows(as_batches(d, PLACE, name="data", batch_size=64)) for d in (task.train, task.valid))
    nets = [mlp(2, 1, hidden=[40, 40], seed=seed) for seed in range(2)]
    config = deep_ensemble.Config(steps=400, lr=5e-3, check_every=100)
    return deep_ensemble.fit(nets, train, valid, likelihood=offmap.Bernoulli(), config=config).nets()


def on_moons(nets: Any, **options: Any) -> offmap.Diagnosis:
    task = moons(test=2, ood_points=2)
    guard = offmap.fit(nets, task.train, task.valid, **{"tolerance": "smoothed", "draws": 10, "risk_draws": 20} | options)
    return offmap.diagnose(guard, task.train)


@pytest.mark.parametrize("basis", ["svd", "identity"])
def test_the_closed_form_is_exactly_inverse_to_the_clamped_amplitude(basis: str, moon_nets: list[nn.Module]):
    diagnosis = on_moons(moon_nets, basis=basis, solver="closed-form", eps=1e-4)
    assert [layer.name for layer in diagnosis.layers] == ["0.weight", "2.weight", "4.weight"]
    for layer in diagnosis.layers:
        assert layer.basis == basis
        assert layer.amplitude.shape == layer.scale.shape == (2, 1, layer.amplitude.shape[-1])
        product = layer.clamped_amplitude * layer.scale
        torch.testing.assert_close(product, product[..., :1].expand_as(product), rtol=1e-3, atol=0)
        assert layer.slope == pytest.approx(-1, abs=1e-3)
        assert layer.correlation < -0.99


@pytest.mark.parametrize("basis", ["svd", "identity"])
def test_after_refinement_the_ranks_are_still_inverse(basis: str, moon_nets: list[nn.Module]):
    diagnosis = on_moons(moon_nets[0], basis=basis, steps=200, entropy_weight=10.0)
    assert diagnosis.history.kept[0] > 0
    assert all(layer.correlation < -0.5 for layer in diagnosis.layers)


def test_gradient_steps_from_a_constant_find_the_inverse_by_themselves(moon_nets: list[nn.Module]):
    """Nothing of the closed form goes in: φ starts equal everywhere."""
    options = {"solver": "sgd", "initial_raw_scale": -5.0, "lr": 0.02, "entropy_weight": 10.0, "max_risk": 0.3, "steps": 300}
    diagnosis = on_moons(moon_nets[0], basis="identity", **options)
    assert diagnosis.history.final_entropy[0] > diagnosis.history.entropy[0][0] + 1
    assert all(layer.correlation < -0.5 for layer in diagnosis.layers)


def test_amplitudes_are_the_root_mean_squares_of_what_each_layer_meets(moon_nets: list[nn.Module]):
    task = moons(test=2, ood_points=2)
    guard = offmap.fit(moon_nets, task.train, task.valid, solver="closed-form", draws=4, risk_draws=4)
    q = guard.predictive.q  # pyright: ignore[reportAttributeAccessIssue]
    other = task.valid  # also on data that the basis does not come from
    for data in (task.train, other):
        for layer in offmap.diagnose(guard, data).layers:
            for member, net in enumerate(moon_nets):
                with torch.no_grad():
                    met = net[: int(layer.name[0])](data[0])  # pyright: ignore[reportIndexIssue]
                slow = (met.double() @ q.rotation[layer.name][member, 0, 0].double()).square().mean(0).sqrt()
                torch.testing.assert_close(layer.amplitude[member, 0], slow, rtol=1e-4, atol=1e-6)
            phi = q.scale()[layer.name]
            torch.testing.assert_close(layer.scale[:, 0], phi.mean(1))


def test_amplitudes_over_draws_are_those_of_the_drawn_nets(moon_nets: list[nn.Module]):
    task = moons(test=2, ood_points=2)
    guard = offmap.fit(moon_nets, task.train, task.valid, solver="closed-form", tolerance="smoothed", draws=4, risk_draws=4)
    q = guard.predictive.q  # pyright: ignore[reportAttributeAccessIssue]
    layer = offmap.diagnose(guard, task.train, draws=3).layers[1]
    drawn = q.draw(range(3), seed=guard.seed)
    for member in range(2):
        met = [(task.train[0] @ drawn["0.weight"][i].mT + drawn["0.bias"][i]).relu() for i in range(3 * member, 3 * member + 3)]
        slow = (torch.cat(met).double() @ q.rotation["2.weight"][member, 0, 0].double()).square().mean(0).sqrt()
        torch.testing.assert_close(layer.amplitude[member, 0], slow, rtol=1e-4, atol=1e-6)
    with pytest.raises(ConfigError, match="Expected `draws` to be a whole number ≥ 0, but got -1"):
        offmap.diagnose(guard, task.train, draws=-1)


def as_guard(case: Case, q: WeightDistribution) -> offmap.Guard:
    net = copy_model(case.build())
    law = offmap.Gaussian() if case.positions is None else offmap.Categorical()
    model = BatchedModel(net, case.output_fn, 1)
    return offmap.Guard(
        predictive=Stochastic(model, q), likelihood=law, place=Place.of(net), calibration=Calibration(torch.zeros(1)),
        score_module=PaperScore(),
    )  # fmt: skip


@BASES
def test_every_host_of_the_zoo_is_diagnosed(case: Case, basis: str):
    nets = [case.build(member) for member in range(2)]
    q = (svd(nets, [case.inputs()]) if basis == "svd" else scaling(nets)).requires_grad_(False)
    observed = observe(stack_models(nets), lambda rows: [case.inputs()], rotated=basis == "svd", output_fn=case.output_fn)
    unit = unit_scale(dict(q.mean.items()), observed.bases, eps=1e-4)
    q.set_scale({n: unit(n) for n in q.mean})
    diagnosis = offmap.diagnose(as_guard(case, q), case.data())
    assert {layer.name for layer in diagnosis.layers} | set(diagnosis.left_out) == set(q.mean)
    assert {layer.name for layer in diagnosis.layers if layer.basis == "svd"} == set(q.rotation)
    for layer in diagnosis.layers:
        expected = observed.bases[layer.name].input_rms
        torch.testing.assert_close(layer.amplitude, expected, rtol=2e-2, atol=1e-3 * float(expected.max()))
        assert layer.scale.shape == layer.amplitude.shape
        assert not layer.correlation > -0.5  # or undefined, where there is one direction alone
    assert str(diagnosis)


def test_a_fan_in_above_the_limit_keeps_its_pieces():
    net = trained.regressor()
    x, y = trained.regression(60)
    guard = trained.quick(net, (x, y), trained.regression(30, 1), fan_in_limit=5)
    layers = {layer.name: layer for layer in offmap.diagnose(guard, (x, y)).layers}
    assert guard.predictive.q.rotation["2.weight"].shape[2] == 3  # pyright: ignore[reportAttributeAccessIssue]
    assert layers["2.weight"].amplitude.shape == (1, 1, 12)
    assert layers["2.weight"].slope == pytest.approx(-1, abs=1e-3)


def test_other_blocks_than_at_fit_time_are_left_out_and_said():
    net = trained.regressor()
    x, y = trained.regression(60)
    guard = trained.quick(net, (x, y))
    q = guard.predictive.q  # pyright: ignore[reportAttributeAccessIssue]
    observed = observe(
        stack_models(net), lambda rows: [x], rotated=False, along={"2.weight": q.rotation["2.weight"][..., :3, :3]}
    )
    assert observed.why["2.weight"] == "had its inputs in other blocks than at fit time"


def test_the_table_tells_entropy_risk_and_uncertainty(moon_nets: list[nn.Module]):
    diagnosis = on_moons(moon_nets, steps=100)
    table = diagnosis.table()
    assert table.columns[:3] == ["layer", "basis", "blocks"]
    text = str(table)
    for words in ("entropy (1/d) Σ log φ²: ", "validation risk: ", "kept at step ", "mean uncertainty of validation inputs: "):
        assert words in text
    history = diagnosis.history
    assert len(history.uncertainty) == len(history.step)
    assert all(0 <= u <= math.log(2) for check in history.uncertainty for u in check)
    assert history.uncertainty[-1][0] > history.uncertainty[0][0]


def test_a_bayesian_net_with_a_trained_mean_is_diagnosed_around_it():
    train, valid = (load_rows(as_batches(trained.regression(60, s), PLACE, name="data", batch_size=32)) for s in (0, 1))
    options = {"steps": 20, "check_every": 10, "risk_draws": 4, "lr": 0.01}
    config = replace(ABLATION["nosvd_unfrozen_small"], **options)
    made = bnn.fit(trained.regressor(log_variance=True), train, valid, likelihood=offmap.Gaussian(), config=config)
    diagnosis = offmap.diagnose(offmap.guard(made, trained.regression(30, 1), draws=4), trained.regression(60))
    hidden = (trained.inputs(60) @ made.q.mean["0.weight"][0].mT + made.q.mean["0.bias"][0]).relu()
    torch.testing.assert_close(diagnosis.layers[1].amplitude[0, 0], hidden.double().square().mean(0).sqrt(), rtol=1e-4, atol=1e-6)


def test_a_guard_without_a_weight_distribution_and_a_bad_eps_are_refused(moon_nets: list[nn.Module]):
    task = moons(test=2, ood_points=2)
    train, valid = (load_rows(as_batches(d, PLACE, name="data")) for d in (task.train, task.valid))
    plain = deep_ensemble.fit(
        moon_nets, train, valid, likelihood=offmap.Bernoulli(), config=deep_ensemble.Config(steps=1, check_every=1)
    )
    with pytest.raises(ConfigError, match="Expected a guard over a weight distribution, but got one over Sampled"):
        offmap.diagnose(offmap.guard(plain, task.valid), task.train)
    guard = trained.quick(trained.regressor(), trained.regression())
    with pytest.raises(ConfigError, match="Expected `eps` to be at least 0 and below 1, but got 2"):
        offmap.diagnose(guard, trained.regression(), eps=2)
