"""MC-dropout: a net trained with dropout that keeps dropping at test time. One draw is one thinned net for all rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

from offmap._types import Inputs, Weights
from offmap.data import Batch, Batches, Rows
from offmap.data.inputs import arguments, rows_of, take_rows
from offmap.errors import ConfigError, ModelError
from offmap.integrations.stack_training import Stack, Training, shared, train_stack
from offmap.likelihoods import Likelihood
from offmap.model.params import copy_model
from offmap.posterior.construct import centre
from offmap.posterior.predictive import Sampled
from offmap.posterior.protocol import Runtime
from offmap.random import generator

CHANNELS = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
"""Layers that drop whole channels."""


@dataclass(frozen=True)
class Config(Training):
    """The paper's training of plain nets."""

    dropout: float | None = None  # None: the rates of the model's own Dropout layers; the paper's grid: 0.05, 0.1, 0.2, 0.3, 0.5


class Mask(nn.Module):
    """Dropout with its mask as a buffer, so that a draw of masks is a draw of weights: (features,) or (B, features)."""

    def __init__(self, lr: float, channels: bool = False) -> None:
        super().__init__()
        self.lr, self.channels = lr, channels
        self.register_buffer("mask", torch.ones((), device="cpu"))

    def forward(self, x: Tensor) -> Tensor:
        """X ⊙ mask."""
        return x * cast(Tensor, self.mask)


def masked(net: nn.Module) -> nn.Module:
    """A copy of the model whose Dropout layers are masks."""
    twin = copy_model(net)
    for name, module in list(twin.named_modules()):
        if isinstance(module, nn.modules.dropout._DropoutNd):  # pyright: ignore[reportPrivateUsage]
            parent, _, leaf = name.rpartition(".")
            mask = Mask(module.p, isinstance(module, CHANNELS)).to(next(twin.parameters()).device)
            setattr(twin.get_submodule(parent), leaf, mask)
    if not any(isinstance(m, Mask) for m in twin.modules()):
        raise ModelError(
            f"Expected a model with Dropout layers, but {type(net).__name__} has none. Add them, or use another method."
        )
    return twin


def mask_shapes(net: nn.Module, inputs: Inputs) -> dict[str, tuple[float, tuple[int, ...]]]:
    """Dropout rate and feature shape of every mask, by buffer name."""
    shapes: dict[str, tuple[float, tuple[int, ...]]] = {}

    def note(name: str, mask: nn.Module, args: tuple[Tensor, ...]) -> None:
        row = tuple(args[0].shape[1:])
        assert isinstance(mask, Mask)
        shapes[f"{name}.mask"] = mask.lr, (row[0], *[1] * (len(row) - 1)) if mask.channels else row

    hooks = [
        module.register_forward_pre_hook(partial(note, name)) for name, module in net.named_modules() if isinstance(module, Mask)
    ]
    args, kwargs = arguments(take_rows(inputs, slice(0, 2)))
    with torch.no_grad():
        net(*args, **kwargs)
    for hook in hooks:
        hook.remove()
    return shapes


def fit(
    nets: nn.Module | Sequence[nn.Module],
    train: Batches,
    valid: Rows,
    *,
    likelihood: Likelihood,
    config: Config = Config(),
    seed: int = 0,
    runtime: Runtime = Runtime(),
) -> Sampled:
    """Train copies of the nets with a fresh mask per example and step; keep the state of lowest validation NLL without masks."""
    return fit_grid(nets, train, valid, likelihood=likelihood, configs=[config], seed=seed, runtime=runtime)[0]


def fit_grid(
    nets: nn.Module | Sequence[nn.Module],
    train: Batches,
    valid: Rows,
    *,
    likelihood: Likelihood,
    configs: Sequence[Config],
    seed: int = 0,
    runtime: Runtime = Runtime(),
) -> list[Sampled]:
    """One ensemble for every setting, all in one stack; settings differ in `dropout`."""
    training = shared(configs)
    at = centre([masked(net) for net in ([nets] if isinstance(nets, nn.Module) else nets)])
    shapes = mask_shapes(at.net, valid.inputs)
    fixed = {n: t for n, t in at.fixed.items() if n not in shapes}
    stack = Stack.of(runtime.model(at.net, at.mean | fixed, valid.inputs), at.mean, fixed, settings=len(configs))
    like = next(iter(at.mean.values()))
    masks = [Masks(_with_rate(shapes, config.dropout), at.members, like) for config in configs]

    def losses(step: int, batch: Batch) -> Tensor:
        drawn = [own.draw(range(step, step + 1), "fit", seed, rows_of(batch[0])) for own in masks]
        stacked = {name: torch.cat([own[name] for own in drawn]) for name in shapes}
        outputs = stack.model(stack.weights | stack.fixed | stacked, batch[0])
        return stack.apart(likelihood.nll(outputs, batch[1]).mean(1)).sum(1)

    train_stack(stack, losses, train, valid, likelihood=likelihood, config=training, seed=seed, progress=runtime.progress)
    return [Sampled(stack.model, weights, own.thinned(weights)) for weights, own in zip(stack.trained(), masks, strict=True)]


@dataclass(frozen=True)
class Masks:
    """Masks of M members by address: rate and feature shape by buffer name, and a tensor of the weights' device and dtype."""

    shapes: Mapping[str, tuple[float, tuple[int, ...]]]
    members: int
    like: Tensor

    def draw(self, index: range, stream: str, seed: int, rows: int | None = None) -> Weights:
        """0 or 1/(1 − rate), one mask for all rows or one for each: {name: (M·p, [rows,] features)}."""
        return {
            name: torch.stack([
                torch.empty((rows, *shape) if rows else shape, device="cpu").bernoulli_(
                    1 - lr, generator=generator(seed, stream, member, draw, name)
                )
                for member in range(self.members)
                for draw in index
            ]).to(self.like) / (1 - lr)
            for name, (lr, shape) in self.shapes.items()
        }  # fmt: skip

    def thinned(self, weights: Weights) -> Callable[[range, int], Weights]:
        """Draws of thinned nets, (span, seed) -> {name: (M·p, ...)}."""

        def draw(span: range, seed: int) -> Weights:
            return {n: w.repeat_interleave(len(span), 0) for n, w in weights.items()} | self.draw(span, "infer", seed)

        return draw


def _with_rate(shapes: Mapping[str, tuple[float, tuple[int, ...]]], lr: float | None) -> dict[str, tuple[float, tuple[int, ...]]]:
    """The same masks at another rate, unless it is None."""
    if lr is not None and not 0 <= lr < 1:
        raise ConfigError(f"Expected `dropout` to be from 0 to below 1, or None for the model's own, but got {lr!r}.")
    return {name: (own if lr is None else lr, shape) for name, (own, shape) in shapes.items()}
