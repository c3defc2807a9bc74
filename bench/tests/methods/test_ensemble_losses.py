"""The losses of ensembles, against their formulas written out net by net."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import trained
from offmap.data import Rows
from offmap.errors import ConfigError
from offmap.integrations.nets import mlp
from offmap.likelihoods import Categorical, Gaussian
from offmap.maxwent.config import Runtime
from offmap.maxwent.train import adam, minimize
from offmap.model.forward import copy_model
from offmap.random import generator
from offmap_bench.methods.ensembles import (
    RepulsiveConfig,
    anchor_losses,
    correlation_losses,
    diversity_losses,
    draw_in_box,
    growth_losses,
    repulsion_losses,
)
from offmap_bench.methods.stack import Losses, Stack, maximum_likelihood, member_risks

M = 3
LAMBDAS = [0.7, 0.02]
X, Y = (t.double() for t in trained.regression(10))


def nets(members: int = M, *, outputs: int = 2) -> list[nn.Sequential]:
    return [mlp(3, outputs, hidden=[6, 5], seed=seed).double() for seed in range(members)]


def stack_of(models: list[nn.Sequential], settings: int = 2) -> Stack:
    """Every setting with weights of its own, so that nothing can be mistaken for its neighbour's."""
    stack = Stack.build(models, X, Runtime(progress=False), settings=settings)
    with torch.no_grad():
        for name, w in stack.weights.items():
            w.add_(0.1 * torch.randn(w.shape, generator=torch.Generator().manual_seed(len(name)), dtype=w.dtype))
    return stack


def modules(stack: Stack, setting: int) -> list[nn.Module]:
    """The members of one setting as modules."""
    made = [copy_model(stack.model.module) for _ in range(stack.members)]
    for member, net in enumerate(made):
        net.load_state_dict({n: stack.by_setting(w)[setting, member].detach() for n, w in stack.weights.items()})
    return made


def check(stack: Stack, losses: Losses, literal: Callable[[int, list[nn.Module]], Tensor], *, step: int = 4) -> None:
    """The loss of every setting and the gradient of every weight."""
    found = losses(step, (X, Y))
    assert found.shape == (stack.settings,)
    found.sum().backward()
    for setting in range(stack.settings):
        members = modules(stack, setting)
        for net in members:
            net.requires_grad_()
        slow = literal(setting, members)
        slow.backward()
        torch.testing.assert_close(found[setting].detach(), slow.detach())
        for member, net in enumerate(members):
            for name, parameter in net.named_parameters():
                torch.testing.assert_close(stack.by_setting(stack.weights[name].grad)[setting, member], parameter.grad)


def nll(net: nn.Module) -> Tensor:
    """−log p(y | x), row by row."""
    total = torch.zeros((), dtype=torch.float64)
    for x, y in zip(X, Y, strict=True):
        mean, log_variance = net(x[None])[0]
        total = total + 0.5 * (math.log(2 * math.pi) + log_variance + (y - mean) ** 2 / log_variance.exp())
    return total / len(X)


def test_plain_is_the_sum_of_the_members_losses() -> None:
    stack = stack_of(nets())
    check(stack, maximum_likelihood(stack, Gaussian()), lambda _, members: torch.stack([nll(net) for net in members]).sum())


def test_negative_correlation_written_out() -> None:
    """λ·(f_i − f̄)·Σ_{j≠i} (f_j − f̄), the mean and the others held fixed."""
    stack = stack_of(nets())

    def literal(setting: int, members: list[nn.Module]) -> Tensor:
        f = [net(X)[:, 0] for net in members]
        mean = (sum(f) / M).detach()
        total = torch.zeros((), dtype=torch.float64)
        for i, net in enumerate(members):
            others = sum((f[j] - mean).detach() for j in range(M) if j != i)
            total = total + nll(net) + LAMBDAS[setting] * ((f[i] - mean) * others).mean()
        return total

    check(stack, correlation_losses(stack, Gaussian(), torch.tensor(LAMBDAS, dtype=torch.float64)), literal)


def test_overall_diversity_written_out() -> None:
    """−λ·(1/M) Σ_j (f_j − f̄)² on inputs in the box of the batch, M times as the loss is a sum over members."""
    stack = stack_of(nets())
    share = torch.rand(X.shape, generator=generator(5, "fit", 4, "box"))
    outside = torch.stack([
        torch.stack([low + (high - low) * u for low, high, u in zip(X.min(0).values, X.max(0).values, row, strict=True)])
        for row in share.double()
    ])  # fmt: skip

    def literal(setting: int, members: list[nn.Module]) -> Tensor:
        f = [net(outside)[:, 0] for net in members]
        mean = sum(f) / M
        variance = sum((own - mean) ** 2 for own in f) / M
        return sum(nll(net) for net in members) - LAMBDAS[setting] * M * variance.mean()

    losses = diversity_losses(stack, Gaussian(), torch.tensor(LAMBDAS, dtype=torch.float64), seed=5)
    check(stack, losses, literal)


def test_anchored_written_out() -> None:
    stack = stack_of(nets())
    anchors = {n: torch.full_like(w, 0.3).cumsum(0) for n, w in stack.weights.items()}

    def literal(setting: int, members: list[nn.Module]) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for member, net in enumerate(members):
            squares = [(p - stack.by_setting(anchors[n])[setting, member]).square().flatten() for n, p in net.named_parameters()]
            total = total + nll(net) + LAMBDAS[setting] * torch.cat(squares).mean()
        return total

    losses = anchor_losses(stack, Gaussian(), torch.tensor(LAMBDAS, dtype=torch.float64), anchors)
    check(stack, losses, literal)


@pytest.mark.parametrize("way", ["median", "fixed", "bandwidth"])
@pytest.mark.parametrize("members", [2, 3, 5])
def test_repulsive_written_out(members: int, way: str) -> None:
    """Σ_j k_ij / stopgrad(Σ_j k_ij) with k = exp(−log M · ‖w_i − w_j‖² / median)."""
    stack = stack_of(nets(members))

    def literal(setting: int, models: list[nn.Module]) -> Tensor:
        flat = [torch.cat([p.flatten() for p in net.parameters()]) for net in models]
        distance = {(i, j): ((flat[i] - flat[j]) ** 2).sum() for i, j in product(range(members), repeat=2)}
        median = sorted(distance.values(), key=lambda d: float(d.detach()))[members**2 // 2]
        rate = {"median": math.log(members) / median, "fixed": math.log(members) / median.detach(), "bandwidth": 2.0**-2}[way]
        total = torch.zeros((), dtype=torch.float64)
        for i, net in enumerate(models):
            kernel = sum(torch.exp(-rate * distance[i, j]) for j in range(members))
            total = total + nll(net) + kernel / kernel.detach()
        return total

    options: dict[str, Any] = {"median": {}, "fixed": {"fixed_median": True}, "bandwidth": {"bandwidth": 2.0}}[way]
    check(stack, repulsion_losses(stack, Gaussian(), [RepulsiveConfig(**options)] * 2), literal)


def test_anti_regularised_written_out() -> None:
    """Weights grow only where the loss of the batch is at most τ."""
    stack = stack_of(nets())
    own = member_risks(stack, Gaussian(), (X, Y))[1].detach().flatten()
    threshold = own + torch.tensor([0.1, -0.1, 0.1, -0.1, 0.1, 0.0])

    def literal(setting: int, members: list[nn.Module]) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for member, net in enumerate(members):
            logs = torch.cat([(p.square() + torch.finfo(torch.float32).eps).log().flatten() for p in net.parameters()])
            total = total + nll(net) - LAMBDAS[setting] * (member != 1 if setting == 0 else member != 0) * logs.mean()
        return total

    losses = growth_losses(stack, Gaussian(), torch.tensor(LAMBDAS, dtype=torch.float64), threshold)
    check(stack, losses, literal)


def test_classifiers_differ_in_their_logits() -> None:
    outputs = torch.randn(4, 7, 3)
    assert Categorical().point(outputs) is outputs
    torch.testing.assert_close(Gaussian().point(outputs[..., :2])[..., 0], outputs[..., 0])


def test_outside_inputs_fill_the_box_of_the_batch_and_have_an_address() -> None:
    x = trained.inputs(2000, 3) * torch.tensor([1.0, 10.0, 0.0]) + 5
    drawn = draw_in_box(x, 0, 7)
    assert torch.equal(drawn, draw_in_box(x, 0, 7))
    assert not torch.equal(drawn, draw_in_box(x, 0, 8))
    assert not torch.equal(drawn, draw_in_box(x, 1, 7))
    low, high = x.min(0).values, x.max(0).values
    assert ((drawn >= low) & (drawn <= high)).all()
    share = ((drawn - low) / (high - low))[:, :2]  # the last column does not vary
    torch.testing.assert_close(share.mean(0), torch.full((2,), 0.5), rtol=0, atol=0.03)
    torch.testing.assert_close(share.std(0), torch.full((2,), 12**-0.5), rtol=0.05, atol=0)


@pytest.mark.parametrize("inputs", [{"x": X}, (X, X), torch.arange(6).view(3, 2)])
def test_inputs_that_have_no_box_are_refused(inputs: Any) -> None:
    with pytest.raises(
        ConfigError, match="Expected inputs that are one tensor of floating-point numbers: others cannot be drawn"
    ):
        draw_in_box(inputs, 0, 0)


FOLLOWERS: dict[str, Callable[[Stack], Losses]] = {
    "negative correlation": lambda s: correlation_losses(s, Gaussian(), torch.zeros(1)),
    "overall diversity": lambda s: diversity_losses(s, Gaussian(), torch.zeros(1)),
    "anchored": lambda s: anchor_losses(s, Gaussian(), torch.zeros(1), {n: w.detach() + 1 for n, w in s.weights.items()}),
    "repulsive": lambda s: repulsion_losses(s, Gaussian(), [RepulsiveConfig(bandwidth=1e-3)]),  # no kernel reaches another net
    "anti-regularised": lambda s: growth_losses(s, Gaussian(), torch.ones(1), torch.full((5,), -math.inf)),
}


@pytest.mark.parametrize("name", FOLLOWERS)
def test_without_its_penalty_an_ensemble_follows_the_deep_ensemble_to_the_bit(name: str) -> None:
    rows = Rows(*trained.regression(300), 64, "train")
    ends: list[dict[str, Tensor]] = []
    for make in (lambda s: maximum_likelihood(s, Gaussian()), FOLLOWERS[name]):
        stack = Stack.build([mlp(3, 2, hidden=[20, 20], seed=s) for s in range(5)], rows.inputs, Runtime(progress=False))
        losses = make(stack)
        optimizer = adam(stack.weights.values(), lr=1e-2)
        minimize(lambda step, batch, losses=losses: losses(step, batch).sum(), optimizer, rows, steps=60, seed=3)
        ends.append(stack.weights)
    assert all(torch.equal(w, ends[1][n]) for n, w in ends[0].items())


def test_with_its_penalty_every_ensemble_goes_another_way() -> None:
    stack = stack_of(nets(), 1)
    plain = maximum_likelihood(stack, Gaussian())(0, (X, Y))
    one = torch.ones(1, dtype=torch.float64)
    others = [
        correlation_losses(stack, Gaussian(), one), diversity_losses(stack, Gaussian(), one),
        anchor_losses(stack, Gaussian(), one, {n: w.detach() + 1 for n, w in stack.weights.items()}),
        repulsion_losses(stack, Gaussian(), [RepulsiveConfig()]),
        growth_losses(stack, Gaussian(), one, torch.full((M,), math.inf)),
    ]  # fmt: skip
    own = torch.autograd.grad(plain.sum(), list(stack.weights.values()))
    for losses in others:
        theirs = torch.autograd.grad(losses(0, (X, Y)).sum(), list(stack.weights.values()))
        assert max(float((a - b).abs().max()) for a, b in zip(own, theirs, strict=True)) > 1e-3
