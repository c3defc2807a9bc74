"""Ensembles that are trained together: what all of them promise, and a grid of each in one stack."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offmap
from offmap.data import Place, Rows, as_batches, load_rows
from offmap.errors import ConfigError
from offmap.integrations.nets import mlp
from offmap.maxwent.config import Runtime
from offmap.model.forward import copy_model
from offmap_bench.methods import anchored, dare, deep_ensemble, mc_dropout, negative_correlation, overall_diversity, repulsive
from offmap_bench.methods.ensembles import draw_anchors, member_max_risks
from offmap_bench.methods.stack import Problem, Stack, member_nll
from trained import classes, inputs, regression, regressor

PLACE = Place(torch.device("cpu"), torch.float32)
METHODS: dict[str, Any] = {
    "negative_correlation": negative_correlation, "overall_diversity": overall_diversity, "anchored": anchored,
    "repulsive": repulsive, "dare": dare,
}  # fmt: skip
GRIDS: dict[str, tuple[Any, list[dict[str, float]]]] = {
    "negative_correlation": (negative_correlation, [{"tradeoff": 10.0**-k} for k in range(3)]),
    "overall_diversity": (overall_diversity, [{"tradeoff": 10.0**-k} for k in range(1, 4)]),
    "anchored": (anchored, [{"tradeoff": t, "anchor_scale": s} for t in (0.1, 1.0) for s in (0.1, 1.0)]),
    "mc_dropout": (mc_dropout, [{"dropout": rate} for rate in (0.05, 0.3, 0.5)]),
}


def rows(data: tuple[Tensor, Tensor], name: str = "train") -> Rows:
    return load_rows(as_batches(data, PLACE, name=name, batch_size=16))


def models(count: int = 3, dropout: float = 0.0) -> list[nn.Module]:
    return [mlp(3, 2, hidden=[8, 8], dropout=dropout, seed=seed) for seed in range(count)]


def train_nets(method: Any, nets: Any, *, seed: int = 0, data: Any = regression, law: Any = None, **config: Any) -> Any:
    settings = method.Config(**{"steps": 30, "check_every": 10, "lr": 0.01} | config)
    law = law or offmap.Gaussian()
    runtime = Runtime(progress=False)
    return method.fit(
        nets, rows(data(60, 0)), rows(data(30, 1), "valid"), likelihood=law, config=settings, seed=seed, runtime=runtime
    )


@pytest.mark.parametrize("name", METHODS)
def test_training_repeats_lowers_the_error_and_leaves_the_nets_alone(name: str) -> None:
    nets = models()
    before = [{n: p.detach().clone() for n, p in net.named_parameters()} for net in nets]
    options = {"max_risk": 5.0} if name == "dare" else {}
    predictive = train_nets(METHODS[name], nets, steps=100, **options)
    assert isinstance(predictive, offmap.Predictive)
    x, y = regression(30, 1)
    outputs = predictive.outputs(x, 50, clip=0.1, seed=7)
    assert outputs.shape == (3, 30, 2)  # nothing is random
    torch.testing.assert_close(outputs, torch.stack([net(x) for net in predictive.nets()]))
    start = torch.stack([net(x)[:, 0] for net in nets]).mean(0)
    assert (outputs[..., 0].mean(0) - y).square().mean() < 0.5 * (start - y).square().mean()
    for net, own in zip(nets, before, strict=True):
        assert all(torch.equal(own[n], p) and p.requires_grad for n, p in net.named_parameters())
    assert torch.equal(outputs, train_nets(METHODS[name], nets, steps=100, **options).outputs(x, 1))
    assert not torch.equal(outputs, train_nets(METHODS[name], nets, steps=100, seed=1, **options).outputs(x, 1))


@pytest.mark.parametrize("name", ["negative_correlation", "overall_diversity", "anchored", "repulsive"])
def test_classifiers_train_too(name: str) -> None:
    nets = [mlp(3, 3, hidden=[8], seed=s) for s in range(2)]
    predictive = train_nets(METHODS[name], nets, law=offmap.Categorical(), data=classes, steps=200)
    x, y = classes(60, 4)
    assert (offmap.guard(predictive, classes(30, 1)).predict(x).label == y).float().mean() > 0.75


@pytest.mark.parametrize("name", GRIDS)
def test_a_setting_in_the_stack_is_the_same_setting_alone(name: str) -> None:
    method, grid = GRIDS[name]
    nets = models(dropout=0.1 if name == "mc_dropout" else 0.0)
    # an ε so large that Adam feels the size of the loss
    configs = [method.Config(steps=40, check_every=10, lr=0.05, adam_epsilon=0.1, **setting) for setting in grid]
    train, valid, law, runtime = (
        rows(regression(60)),
        rows(regression(30, 1), "valid"),
        offmap.Gaussian(),
        Runtime(progress=False),
    )
    stacked = method.fit_grid(nets, train, valid, likelihood=law, configs=configs, seed=2, runtime=runtime)
    x = inputs(9, 5)
    outputs = [made.outputs(x, 3, clip=None, seed=4) for made in stacked]
    for config, made in zip(configs, outputs, strict=True):
        single = method.fit(nets, train, valid, likelihood=law, config=config, seed=2, runtime=runtime)
        torch.testing.assert_close(made, single.outputs(x, 3, clip=None, seed=4), rtol=1e-4, atol=1e-5)
    assert not any(torch.allclose(outputs[0], other, rtol=1e-3) for other in outputs[1:])


@pytest.mark.parametrize(("method", "tradeoff", "width"), [(negative_correlation, 10.0, 1.0), (overall_diversity, 1.0, 2.0)])
def test_a_penalty_on_agreement_gives_disagreement(method: Any, tradeoff: float, width: float) -> None:
    """On the training inputs themselves, and around them."""
    x = width * regression(60)[0]
    none, some = (
        train_nets(method, models(5), steps=100, check_every=1000, tradeoff=t).outputs(x, 1)[..., 0].var(0).mean()
        for t in (0.0, tradeoff)
    )
    assert some > 1.2 * none


def test_repelled_members_end_further_apart() -> None:
    def apart(predictive: Any) -> float:
        flat = torch.stack([torch.cat([p.detach().flatten() for p in net.parameters()]) for net in predictive.nets()])
        return float(torch.pdist(flat).mean())

    plain = train_nets(deep_ensemble, models(), steps=150, check_every=1000)
    assert apart(train_nets(repulsive, models(), steps=150, check_every=1000, fixed_median=True)) > 1.05 * apart(plain)


def test_anchors_are_drawn_once_for_a_member_and_pull_it() -> None:
    nets = models()
    stack = Stack.build(nets, inputs(9), Runtime(progress=False), settings=2)
    made = draw_anchors(stack, [anchored.Config(anchor_scale=0.1), anchored.Config(anchor_scale=3.0)], 5)
    for n, a in made.items():
        torch.testing.assert_close(stack.by_setting(a)[1], 30 * stack.by_setting(a)[0])
        assert not torch.equal(a[0], a[1])
        assert a.shape == stack.weights[n].shape
    normal = torch.cat([stack.by_setting(a)[1].flatten() / 3 for a in made.values()])
    assert normal.mean().item() == pytest.approx(0, abs=0.15)
    assert normal.std().item() == pytest.approx(1, abs=0.1)
    held = train_nets(anchored, nets, seed=5, tradeoff=1e4, anchor_scale=0.1, steps=400, check_every=1000)
    for n, w in held.weights.items():
        torch.testing.assert_close(w, stack.by_setting(made[n])[0], rtol=0, atol=0.02)


def test_dare_grows_weights_and_stays_at_or_below_the_threshold() -> None:
    nets = [copy_model(regressor(m, log_variance=True)) for m in range(2)]
    valid = rows(regression(30, 1), "valid")
    problem = Problem(valid, valid, offmap.Gaussian())
    made = train_nets(dare, nets, steps=200, lr=1e-3)
    stack = Stack.build(nets, valid.inputs, Runtime(progress=False))
    bound = member_max_risks(stack, problem)
    losses = torch.stack([
        -torch.distributions.Normal(net(valid.inputs)[:, 0], (net(valid.inputs)[:, 1] / 2).exp()).log_prob(valid.targets)
        for net in nets
    ])  # fmt: skip
    torch.testing.assert_close(bound, losses.mean(1) + 2 * losses.std(1, correction=0) / math.sqrt(30))
    after = Stack.build(made.nets(), valid.inputs, Runtime(progress=False))
    assert (member_nll(after, problem) <= bound + 1e-6).all()

    def size(net: nn.Module) -> Tensor:
        return torch.cat([(p.detach().square() + 1e-7).log().flatten() for p in net.parameters()]).mean()

    assert all(size(grown) > size(net) + 0.05 for grown, net in zip(made.nets(), nets, strict=True))
    assert (member_max_risks(stack, problem, 0.5) == 0.5).all()


def test_impossible_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match="Expected at least two nets, which can repel each other, but got one."):
        train_nets(repulsive, models(1))
    with pytest.raises(ConfigError, match="Expected `bandwidth` to be a number above 0 or None, but got 0.0."):
        train_nets(repulsive, models(), bandwidth=0.0)
    for method in (negative_correlation, overall_diversity, anchored, dare):
        with pytest.raises(ConfigError, match="Expected `tradeoff` to be a number ≥ 0, but got -1.0."):
            train_nets(method, models(), tradeoff=-1.0)
    with pytest.raises(ConfigError, match="Expected `anchor_scale` to be a number ≥ 0, but got -1.0."):
        train_nets(anchored, models(), anchor_scale=-1.0)
    with pytest.raises(ConfigError, match="Expected `dropout` to be a number from 0 to below 1, but got 1.0."):
        train_nets(mc_dropout, models(dropout=0.1), dropout=1.0)


def test_one_net_alone_is_a_plain_net() -> None:
    """Nothing to differ from: the penalty is 0."""
    x, plain = inputs(9, 5), train_nets(deep_ensemble, models(1))
    for method in (negative_correlation, overall_diversity):
        assert torch.equal(train_nets(method, models(1), tradeoff=1.0).outputs(x, 1), plain.outputs(x, 1))
