"""The contracts on nets nobody wrote: random chains of layers with random sizes."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import oracle_moments
import oracles
from offmap.model.forward import copy_model, forward
from offmap.model.params import stack_models
from offmap.posterior.basis import second_moments
from offmap.posterior.distribution import svd

ROWS = 4
FEW = st.integers(1, 3)


class Itself(nn.Module):
    """Self-attention, or a recurrent layer, as one step of a chain."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x, x, x, need_weights=False)[0] if isinstance(self.body, nn.MultiheadAttention) else self.body(x)[0]


class Across(nn.Module):
    """A layer of two inputs: what comes, and what an activation makes of it."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        y = x.tanh()
        return self.body(x, y) if isinstance(self.body, nn.Bilinear) else self.body(x, y, y, need_weights=False)[0]


class Rows(nn.Module):
    """(B, channels, *space) to (B, positions, channels)."""

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(2).transpose(1, 2)


@dataclass(frozen=True)
class Net:
    """A chain with its input's shape; `batched` if `vmap` has rules for all of it."""

    layers: nn.Sequential
    shape: tuple[int, ...]
    batched: bool


def sizes(draw: Any, space: int, *, least: int = 1, most: int = 3) -> tuple[int, ...]:
    return tuple(draw(st.integers(least, most)) for _ in range(space))


def convolution(draw: Any, shape: tuple[int, ...]) -> nn.Module:
    channels, space = shape[0], len(shape) - 1
    groups = draw(st.sampled_from([g for g in range(1, channels + 1) if channels % g == 0]))
    kernel = tuple(draw(st.integers(1, min(3, n))) for n in shape[1:])
    dilation = tuple(
        draw(st.integers(1, max(1, (n - 1) // max(1, k - 1)))) if k > 1 else 1 for n, k in zip(shape[1:], kernel, strict=True)
    )
    mode = draw(st.sampled_from(["zeros", "reflect", "replicate", "circular"]))
    padding = tuple(draw(st.integers(0, min(1, n - 1))) for n in shape[1:])
    return (nn.Conv1d, nn.Conv2d, nn.Conv3d)[space - 1](
        channels, groups * draw(st.integers(1, 2)), kernel, stride=sizes(draw, space, most=2), padding=padding, dilation=dilation,
        groups=groups, bias=draw(st.booleans()), padding_mode=mode,
    )  # fmt: skip


def draw_transposed(draw: Any, shape: tuple[int, ...]) -> nn.Module:
    channels, space = shape[0], len(shape) - 1
    groups = draw(st.sampled_from([g for g in range(1, channels + 1) if channels % g == 0]))
    stride = sizes(draw, space, most=2)
    more = tuple(draw(st.integers(0, s - 1)) for s in stride)
    return (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[space - 1](
        channels, groups * draw(st.integers(1, 2)), sizes(draw, space, most=2), stride=stride, output_padding=more,
        dilation=sizes(draw, space, most=2), groups=groups, bias=draw(st.booleans()),
    )  # fmt: skip


def norm(draw: Any, shape: tuple[int, ...]) -> nn.Module:
    batch = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[len(shape) - 2]
    return draw(st.sampled_from([batch, lambda c: nn.GroupNorm(1, c)]))(shape[0])


def linear(draw: Any, shape: tuple[int, ...]) -> nn.Module:
    return nn.Linear(shape[-1], draw(FEW), bias=draw(st.booleans()))


def row_norm(draw: Any, shape: tuple[int, ...]) -> nn.Module:
    return draw(st.sampled_from([nn.LayerNorm, nn.RMSNorm]))(shape[-1])


def attention(draw: Any, shape: tuple[int, ...]) -> nn.Module:
    heads = draw(st.sampled_from([h for h in range(1, shape[-1] + 1) if shape[-1] % h == 0]))
    return Itself(nn.MultiheadAttention(shape[-1], heads, batch_first=True, bias=draw(st.booleans())))


def across(draw: Any, shape: tuple[int, ...]) -> nn.Module:
    bilinear = nn.Bilinear(shape[-1], shape[-1], draw(FEW), bias=draw(st.booleans()))
    return Across(bilinear if draw(st.booleans()) else nn.MultiheadAttention(shape[-1], 1, batch_first=True))


def encoder(draw: Any, shape: tuple[int, ...]) -> nn.Module:
    return nn.TransformerEncoderLayer(shape[-1], 1, draw(FEW), batch_first=True, norm_first=draw(st.booleans()))


def recurrent(draw: Any, shape: tuple[int, ...]) -> nn.Module:
    kind = draw(st.sampled_from([nn.LSTM, nn.GRU, nn.RNN]))
    return Itself(
        kind(shape[-1], draw(FEW), num_layers=draw(st.integers(1, 2)), bidirectional=draw(st.booleans()), batch_first=True)
    )


def activation(draw: Any, shape: tuple[int, ...]) -> nn.Module:
    return draw(st.sampled_from([nn.Tanh, nn.GELU, nn.Softplus]))()


Maker = Callable[[Any, tuple[int, ...]], nn.Module]
MAPS: tuple[Maker, ...] = (convolution, draw_transposed, norm, activation)
LINES: tuple[Maker, ...] = (linear, row_norm, attention, across, encoder, recurrent, activation)


def grow(draw: Any, layers: nn.Sequential, x: Tensor, makers: tuple[Maker, ...], most: int) -> Tensor:
    """A few more layers; what comes out of them."""
    for maker in draw(st.lists(st.sampled_from(makers), min_size=1, max_size=most)):
        if x[0].numel() <= 64:  # stay tiny
            layers.append(maker(draw, tuple(x.shape[1:])))
            x = layers[-1].eval()(x)
    return x


@st.composite
def nets(draw: Any) -> Net:
    """Convolutions over 1 to 3 dimensions, then layers over positions, then a head; or any of the two alone."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(draw(st.integers(0, 1000)))
        layers = nn.Sequential()
        maps, lines = draw(st.sampled_from([(True, True), (True, False), (False, True)]))
        shape = (draw(FEW), *sizes(draw, draw(st.integers(1, 3)), least=2)) if maps else (draw(FEW), draw(st.integers(1, 4)))
        x = torch.randn(2, *shape)
        if maps:
            x = grow(draw, layers, x, MAPS, 3)
            layers.append(Rows())
            x = layers[-1](x)
        if lines:
            x = grow(draw, layers, x, LINES, 3)
        layers.extend([nn.Tanh(), nn.Flatten(), nn.Linear(x[0].numel(), 2)])
    return Net(layers.eval(), shape, not any(isinstance(m, nn.RNNBase | nn.Bilinear) for m in layers.modules()))


def inputs(net: Net) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(ROWS, *net.shape, generator=generator) * torch.linspace(0.5, 2.0, net.shape[-1])


def property_of_nets(test: Callable[[Net], None]) -> Callable[[], None]:
    quiet = [HealthCheck.too_slow, HealthCheck.data_too_large]
    return settings(max_examples=50, deadline=None, derandomize=True, suppress_health_check=quiet)(given(net=nets())(test))


@property_of_nets
def test_moments_of_random_nets_are_those_of_the_slow_oracle(net: Net):
    held, x = stack_models(net.layers), inputs(net)
    fast = second_moments(held.module, [held.weights(0)], [x])[0]
    slow = oracle_moments.second_moments(net.layers, [x])
    assert {n for n, m in fast.items() if m.view} == slow.keys()
    for name, moment in slow.items():
        torch.testing.assert_close(fast[name].value()[:, 0], moment, rtol=1e-4, atol=1e-6 * max(1.0, float(moment.abs().max())))


@property_of_nets
def test_draws_of_random_nets_are_the_equation_and_the_bases_orthogonal(net: Net):
    q = svd(net.layers, [inputs(net)], initial_scale=0.05, limit=3)  # most fan-ins come in pieces
    for v in q.rotation.values():
        torch.testing.assert_close(v.mT @ v, torch.eye(v.shape[-1]).expand_as(v), rtol=0, atol=1e-5)
    for clip in (math.inf, 0.02):
        drawn = q.draw([2, 0], clip=clip)
        for name, weight in oracles.draw(q, 2, clip=clip).items():
            torch.testing.assert_close(drawn[name][0].double(), weight, rtol=1e-5, atol=1e-6)
            assert clip < math.inf or not torch.equal(drawn[name][0], drawn[name][1])
    still = q.draw([0], clip=0)
    assert all(torch.equal(still[n][0], p) for n, p in net.layers.named_parameters())
    other = copy.deepcopy(q)
    other.set_scale({n: 2 * s for n, s in q.scale().items()})
    other.load_state_dict(q.state_dict())
    assert all(torch.equal(w, q.draw([5])[n]) for n, w in other.draw([5]).items())


@property_of_nets
def test_outputs_of_random_nets_are_those_of_nets_with_the_drawn_weights(net: Net):
    q, x, private = svd(net.layers, [inputs(net)], initial_scale=0.05), inputs(net), copy_model(net.layers)
    drawn = {n: w.detach() for n, w in q.draw(range(3)).items()}
    expected = oracles.run(net.layers, drawn, x)
    scale = max(1.0, float(expected.abs().max()))
    with torch.no_grad():
        for loop in (True, False) if net.batched else (True,):
            outputs = forward(private, drawn, x, loop=loop)
            torch.testing.assert_close(outputs, expected, rtol=1e-4, atol=1e-5 * scale)
            alone = forward(private, drawn, x[1:2], loop=loop)
            torch.testing.assert_close(alone, outputs[:, 1:2], rtol=1e-4, atol=1e-5 * scale)
    assert not torch.equal(expected[0], expected[1])
