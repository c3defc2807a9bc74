"""MC-dropout: a net trained with dropout that keeps dropping at test time. One draw is one thinned net for all rows."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

from offmap._types import Inputs, Weights
from offmap.batches import Batch, Batches, Rows
from offmap.core.construct import centre
from offmap.core.inputs import arguments, rows_of, take_rows
from offmap.core.noise import generator
from offmap.core.weights import copy_host
from offmap.errors import HostError
from offmap.likelihoods import Likelihood
from offmap.methods.predictives import Sampled
from offmap.methods.protocol import Runtime
from offmap.solve.loop import adam, minimize
from offmap.solve.monitors import BestValidation
from offmap.solve.progress import bar

logger = logging.getLogger("offmap")

CHANNELS = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
"""Layers that drop whole channels."""


@dataclass(frozen=True)
class Config:
    """The rate of dropout is the host's own, in its Dropout layers."""

    steps: int = 10_000
    rate: float = 1e-3
    adam_epsilon: float = 1e-7
    check_every: int = 100


class Mask(nn.Module):
    """Dropout with its mask as a buffer, so that a draw of masks is a draw of weights: (features,) or (B, features)."""

    def __init__(self, rate: float, channels: bool = False) -> None:
        super().__init__()
        self.rate, self.channels = rate, channels
        self.register_buffer("mask", torch.ones((), device="cpu"))

    def forward(self, x: Tensor) -> Tensor:
        """X ⊙ mask."""
        return x * cast(Tensor, self.mask)


def masked(net: nn.Module) -> nn.Module:
    """A copy of the host whose Dropout layers are masks."""
    twin = copy_host(net)
    for name, module in list(twin.named_modules()):
        if isinstance(module, nn.modules.dropout._DropoutNd):  # pyright: ignore[reportPrivateUsage]
            parent, _, leaf = name.rpartition(".")
            mask = Mask(module.p, isinstance(module, CHANNELS)).to(next(twin.parameters()).device)
            setattr(twin.get_submodule(parent), leaf, mask)
    if not any(isinstance(m, Mask) for m in twin.modules()):
        raise HostError(
            f"Expected a host with Dropout layers, but {type(net).__name__} has none. Add them, or use another method."
        )
    return twin


def mask_shapes(net: nn.Module, inputs: Inputs) -> dict[str, tuple[float, tuple[int, ...]]]:
    """Dropout rate and feature shape of every mask, by buffer name."""
    shapes: dict[str, tuple[float, tuple[int, ...]]] = {}

    def note(name: str, mask: nn.Module, args: tuple[Tensor, ...]) -> None:
        row = tuple(args[0].shape[1:])
        assert isinstance(mask, Mask)
        shapes[f"{name}.mask"] = mask.rate, (row[0], *[1] * (len(row) - 1)) if mask.channels else row

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
    at = centre([masked(net) for net in ([nets] if isinstance(nets, nn.Module) else nets)])
    shapes = mask_shapes(at.net, valid.inputs)
    fixed = {n: t for n, t in at.fixed.items() if n not in shapes}
    host = runtime.host(at.net, at.mean | fixed, valid.inputs)
    weights = {n: w.clone().requires_grad_() for n, w in at.mean.items()}

    def masks(index: range, stream: str, draw_seed: int, rows: int | None = None) -> Weights:
        return {
            name: torch.stack([
                torch.empty((rows, *shape) if rows else shape, device="cpu").bernoulli_(
                    1 - rate, generator=generator(draw_seed, stream, member, draw, name)
                )
                for member in range(at.members)
                for draw in index
            ]).to(next(iter(weights.values()))) / (1 - rate)
            for name, (rate, shape) in shapes.items()
        }  # fmt: skip

    def objective(step: int, batch: Batch) -> Tensor:
        drawn = masks(range(step, step + 1), "fit", seed, rows_of(batch[0]))
        return likelihood.nll(host(weights | fixed | drawn, batch[0]), batch[1]).mean(1).sum()

    def validation() -> Tensor:
        outputs = host.outputs(lambda span: weights | fixed, 1, valid.inputs, members=at.members)
        return likelihood.nll(outputs, valid.targets).mean(1)

    with bar("Training", config.steps, show=runtime.progress) as advance:
        monitor = BestValidation(weights, validation, every=config.check_every, report=lambda step: advance(step, ""))
        optimizer = adam(weights.values(), rate=config.rate, epsilon=config.adam_epsilon)
        ending = minimize(objective, optimizer, train, steps=config.steps, monitors=[monitor], seed=seed)
    if ending == "diverged":
        logger.warning("Training diverged (the loss is not finite); every member keeps its best state so far. Lower `rate`.")
    monitor.restore()
    trained = {n: w.detach() for n, w in weights.items()} | fixed

    def draw(span: range, draw_seed: int) -> Weights:
        repeated = {n: w.repeat_interleave(len(span), 0) for n, w in trained.items()}
        return repeated | masks(span, "infer", draw_seed)

    return Sampled(host, trained, draw)
