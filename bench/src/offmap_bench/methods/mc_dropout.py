"""MC-dropout: a net trained with dropout that keeps dropping at test time. One draw is one thinned net for all rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias, cast

import torch
from torch import Tensor, nn

from offmap._types import Inputs, Weights
from offmap.data import Batch
from offmap.data.batch import arguments, rows_of, take_rows
from offmap.errors import ModelError
from offmap.model.forward import copy_model
from offmap.model.params import stack_models
from offmap.posterior.predictive import Sampled
from offmap.random import generator
from offmap_bench.methods.competitor import Competitor, Nets, check_same_training
from offmap_bench.methods.stack import Problem, Stack, Training, train_stack

Shapes: TypeAlias = dict[str, tuple[float, tuple[int, ...]]]
"""Dropout rate and feature shape of every mask, by buffer name."""


@dataclass(frozen=True)
class Config(Training):
    """The paper's training of plain nets."""

    dropout: float | None = None  # None: the rates of the model's own Dropout layers; the paper's grid: 0.05, 0.1, 0.2, 0.3, 0.5


class Mask(nn.Module):
    """Dropout with its mask as a buffer, so that a draw of masks is a draw of weights: (features,) or (B, features)."""

    def __init__(self, rate: float, channels: bool = False) -> None:
        super().__init__()
        self.rate, self.channels = rate, channels
        self.register_buffer("mask", torch.ones((), device="cpu"))

    def forward(self, x: Tensor) -> Tensor:
        """X ⊙ mask."""
        return x * cast(Tensor, self.mask)


def replace_dropout(net: nn.Module) -> nn.Module:
    """A copy of the model whose Dropout layers are masks."""
    twin = copy_model(net)
    for name, module in list(twin.named_modules()):
        if isinstance(module, nn.modules.dropout._DropoutNd):  # pyright: ignore[reportPrivateUsage]
            parent, _, leaf = name.rpartition(".")
            channels = isinstance(module, nn.Dropout1d | nn.Dropout2d | nn.Dropout3d)
            mask = Mask(module.p, channels).to(next(twin.parameters()).device)
            setattr(twin.get_submodule(parent), leaf, mask)
    if not any(isinstance(m, Mask) for m in twin.modules()):
        raise ModelError(f"Expected a model with Dropout layers, but {type(net).__name__} has none. Add them, or use another.")
    return twin


def mask_shapes(net: nn.Module, inputs: Inputs) -> Shapes:
    """Dropout rate and feature shape of every mask, by buffer name."""
    masks = {name: module for name, module in net.named_modules() if isinstance(module, Mask)}
    shapes: Shapes = {}

    def note(name: str, mask: Mask, args: tuple[Tensor, ...]) -> None:
        row = tuple(args[0].shape[1:])
        shapes[f"{name}.mask"] = mask.rate, (row[0], *[1] * (len(row) - 1)) if mask.channels else row

    hooks = [mask.register_forward_pre_hook(partial(note, name)) for name, mask in masks.items()]
    args, kwargs = arguments(take_rows(inputs, slice(0, 2)))
    with torch.no_grad():
        net(*args, **kwargs)
    for hook in hooks:
        hook.remove()
    return shapes


def draw_uniform(shapes: Shapes, members: int, index: range, stream: str, seed: int, rows: int | None = None) -> Weights:
    """Numbers from 0 to 1 for masks, one for all rows or one for each: {name: (M·p, [rows,] features)}."""
    return {
        name: torch.stack([
            torch.rand((rows, *shape) if rows else shape, generator=generator(seed, stream, member, draw, name), device="cpu")
            for member in range(members)
            for draw in index
        ])
        for name, (_, shape) in shapes.items()
    }  # fmt: skip


def cut_mask(uniform: Tensor, rate: float, like: Tensor) -> Tensor:
    """0 where the number is below the rate, else 1/(1 − rate), in the dtype of `like`."""
    return (uniform >= rate).to(like) / (1 - rate)


def draw_thinned(weights: Weights, shapes: Shapes, span: range, seed: int) -> Weights:
    """Draws of thinned nets, {name: (M·p, ...)}."""
    first = next(iter(weights.values()))
    uniform = draw_uniform(shapes, len(first), span, "infer", seed)
    masks = {name: cut_mask(uniform[name], rate, first) for name, (rate, _) in shapes.items()}
    return {n: w.repeat_interleave(len(span), 0) for n, w in weights.items()} | masks


def _fit_all(nets: Nets, problem: Problem, configs: Sequence[Config]) -> list[Sampled]:
    """Train copies of the nets with a new mask per example and step; keep the state of lowest validation NLL without masks."""
    valid, likelihood = problem.valid, problem.likelihood
    stacked = stack_models([replace_dropout(net) for net in ([nets] if isinstance(nets, nn.Module) else nets)])
    shapes = mask_shapes(stacked.module, valid.inputs)
    stacked = replace(stacked, fixed={n: t for n, t in stacked.fixed.items() if n not in shapes})
    stack = Stack.build(stacked, valid.inputs, problem.runtime, settings=len(configs))
    like = next(iter(stacked.mean.values()))
    by_setting = [
        {n: (rate if c.dropout is None else c.dropout, shape) for n, (rate, shape) in shapes.items()} for c in configs
    ]  # fmt: skip

    def losses(step: int, batch: Batch) -> Tensor:
        uniform = draw_uniform(shapes, stacked.members, range(step, step + 1), "fit", problem.seed, rows_of(batch[0]))
        masks = {n: torch.cat([cut_mask(u, setting[n][0], like) for setting in by_setting]) for n, u in uniform.items()}
        outputs = stack.model(stack.weights | stack.fixed | masks, batch[0])
        return stack.by_setting(likelihood.nll(outputs, batch[1]).mean(1)).sum(1)

    train_stack(stack, losses, problem, check_same_training(configs))
    trained = zip(stack.trained_weights(), by_setting, strict=True)
    return [Sampled(stack.model, weights, partial(draw_thinned, weights, setting)) for weights, setting in trained]


mc_dropout = Competitor(Config, _fit_all)
