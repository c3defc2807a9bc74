"""Batched products give what the model gives, or leave the model alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import oracles
from offmap.model.forward import ELEMENTWISE, BatchedModel, copy_model, plan_layers, run_layers
from offmap.posterior.distribution import scaling
from zoo import ZOO

ACTIVATIONS = sorted(ELEMENTWISE, key=lambda a: a.__name__)


class Doubled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


class Reversed(nn.Sequential):
    def forward(self, input: Tensor) -> Tensor:
        for layer in reversed(self):
            input = layer(input)
        return input


def net_with_hook(register: str) -> nn.Module:
    net = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    hook: Callable[..., Tensor] = (lambda m, a, o: o + 1) if register == "register_forward_hook" else (lambda m, a: a[0] + 1)
    getattr(net[0], register)(hook)
    return net


def net_with_parametrization() -> nn.Module:
    return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)), nn.ReLU(), nn.Linear(3, 2))


def check(net: nn.Module, x: Tensor, draws: int = 3) -> None:
    """Fast outputs against those of copies with overwritten parameters."""
    net = copy_model(net)
    q = scaling(net, initial_scale=0.3)
    weights = q.draw(range(draws))
    chunk = 16 if plan_layers(net) else 1  # some of these `vmap` cannot run
    torch.testing.assert_close(
        BatchedModel(net, chunk_size=chunk).outputs(q.draw, draws, x), oracles.run(net, weights, x), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize(
    "net",
    [Doubled(3, 2), Reversed(nn.Linear(3, 2), nn.Linear(3, 3)), net_with_hook("register_forward_hook"),
     net_with_hook("register_forward_pre_hook"), net_with_parametrization(), ZOO["tied"].build(), ZOO["repeated"].build()],
    ids=["subclass", "sequential with a forward of its own", "hook", "pre-hook", "parametrized", "tied", "repeated"],
)  # fmt: skip
def test_models_that_do_more_than_they_seem_are_not_planned_and_run_right(net: nn.Module):
    assert plan_layers(copy_model(net)) is None
    check(net, torch.randn(5, 3))


@pytest.mark.parametrize(
    "name", ["linear", "mlp", "nested", "width_one", "float64", "dropout", "shared_activation", "activation_first"]
)
def test_plain_models_are_planned_and_run_right(name: str):
    net, x = ZOO[name].build(), ZOO[name].inputs()
    assert plan_layers(copy_model(net))
    check(net, x)


def test_a_model_in_training_mode_is_not_planned():
    assert plan_layers(ZOO["dropout"].build().train()) is None


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation_is_the_modules_own(activation: type[nn.Module]):
    check(nn.Sequential(nn.Linear(3, 4), activation(), nn.Linear(4, 2), activation()), torch.randn(6, 3))


@given(
    widths=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    biases=st.lists(st.booleans(), min_size=3, max_size=3),
    rows=st.integers(1, 9),
    draws=st.integers(1, 7),
    first=st.booleans(),
)
@settings(max_examples=50)
def test_any_stack_of_layers_equals_the_model(widths: list[int], biases: list[bool], rows: int, draws: int, first: bool):
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.ReLU()] if first else []
    size = 3
    for width, bias in zip(widths, biases, strict=False):
        layers += [nn.Linear(size, width, bias=bias), nn.ReLU()]
        size = width
    check(nn.Sequential(*layers), torch.randn(rows, 3), draws)


@pytest.mark.parametrize("draws", [1, 2])
@pytest.mark.parametrize("first", [nn.ReLU(), nn.Identity(), nn.Dropout()], ids=lambda m: type(m).__name__)
def test_the_users_inputs_are_never_written_to(first: nn.Module, draws: int):
    net = copy_model(nn.Sequential(first, nn.ReLU(), nn.Linear(3, 2), nn.ReLU()))
    x = torch.randn(5, 3)
    before = x.clone()
    BatchedModel(net).outputs(scaling(net).draw, draws, x)
    assert torch.equal(x, before)


def test_parameters_that_are_not_random_come_from_the_model():
    net = copy_model(ZOO["mlp"].build())
    x = ZOO["mlp"].inputs()
    for where in ("4.*", "*.bias", "0.weight"):
        q = scaling(net, params=where, initial_scale=0.3)
        torch.testing.assert_close(BatchedModel(net).outputs(q.draw, 3, x), oracles.run(net, q.draw(range(3)), x))


def test_gradients_flow_through_products_in_place():
    net = copy_model(ZOO["mlp"].build().double())
    q, twin = scaling(net, initial_scale=0.3), scaling(net, initial_scale=0.3)
    x = ZOO["mlp"].inputs().double()
    run_layers(plan_layers(net) or [], q.draw(range(3)), x).square().sum().backward()
    slow = [torch.func.functional_call(net, {n: w[i] for n, w in twin.draw(range(3)).items()}, (x,)) for i in range(3)]
    torch.stack(slow).square().sum().backward()
    for name, raw in q.raw_scale.items():
        torch.testing.assert_close(raw.grad, twin.raw_scale[name].grad)
