"""Run a model over a stack of weights: all at once (`vmap`, or batched products), in chunks, or one after another."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import vmap

from offmap._torch_private import tree_map
from offmap._types import Inputs, Weights
from offmap.data.inputs import is_table, rows_of, take_rows
from offmap.errors import ModelError
from offmap.model import dense
from offmap.model.calls import MODEL_ERRORS, OutputFn, call, first_tensor
from offmap.model.capture import slow_attention
from offmap.model.last_layer import LastLayer
from offmap.model.params import at

Draw: TypeAlias = Callable[[range], Weights]
"""Gives those draws of every member, {name: (M·p, ...)}."""

OUTPUT_NUMBERS = 1 << 24
"""Numbers in the stacked outputs of one block of rows (64 MB in float32)."""

LOOP_NUMBERS = 1 << 21
"""Weights drawn at once for a model that is looped over (8 MB in float32): draws in company are cheaper than alone."""


def forward(
    net: nn.Module,
    weights: Weights,
    inputs: Inputs,
    *,
    output_fn: OutputFn = first_tensor,
    loop: bool = False,
    layers: dense.Plan | None = None,
) -> Tensor:
    """Outputs of every weight set in the stack: {name: (S, ...)}, inputs of B rows -> (S, B, ...).

    `layers` are the model's, if batched products can run it: `dense.plan(net)`.
    """
    size = next(iter(weights.values())).shape[0]
    try:
        if layers and is_table(inputs):
            return dense.forward(layers, weights, inputs, size)
        if loop or size == 1:
            sets = zip(*(w.unbind(0) for w in weights.values()), strict=True)
            return torch.stack([call(net, dict(zip(weights, one, strict=True)), inputs, output_fn) for one in sets])
    except MODEL_ERRORS as error:
        raise model_failed(net, inputs, error) from error
    # plain strides, whatever the model's layout: convolutions under `vmap` mind others, even for axes of size one
    plain = {n: w.reshape(-1).view(w.shape) for n, w in weights.items()}
    try:
        with slow_attention(), _no_fallback():
            return vmap(lambda w: call(net, w, inputs, output_fn))(plain)
    except MODEL_ERRORS as error:
        try:
            call(net, {n: w[0] for n, w in weights.items()}, inputs, output_fn)
        except Exception as alone:
            raise model_failed(net, inputs, alone) from alone
        raise ModelError(
            f"`vmap` cannot run {type(net).__name__} ({_first_line(error)}). Pass `chunk_size=1` to loop over draws."
        ) from error


@contextmanager
def _no_fallback() -> Generator[None]:
    """Operators that `vmap` would run one by one, with a warning, count as operators that it cannot run."""
    switch: Any = vars(torch)["_C"]._functorch  # there is no public switch
    before = switch._is_vmap_fallback_enabled()
    switch._set_vmap_fallback_enabled(False)
    try:
        yield
    finally:
        switch._set_vmap_fallback_enabled(before)


def model_failed(net: nn.Module, inputs: Inputs, error: Exception) -> ModelError:
    """The error for a model that cannot be called with these inputs at all."""
    shapes = tree_map(lambda t: tuple(t.shape) if isinstance(t, Tensor) else type(t).__name__, inputs)
    return ModelError(
        f"{type(net).__name__} failed on inputs of shape {shapes}: {_first_line(error)}. "
        "Check that the data have the form the model was trained on."
    )


def check_rows(net: nn.Module, output: object, inputs: Inputs) -> None:
    """Raise a HostError unless the output is a tensor with one row per input row."""
    if not isinstance(output, Tensor) or output.ndim == 0 or output.shape[0] != rows_of(inputs):
        got = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
        raise ModelError(
            f"Expected one output row per input row, but {type(net).__name__} made {got} of {rows_of(inputs)} rows. "
            "Give the inputs a batch axis in front, or pass `output_fn=` to pick the right tensor."
        )


@dataclass(frozen=True)
class BatchedModel:
    """A net with how to run it: what to take of its output, how many draws and rows at once, how long an output row is."""

    net: nn.Module
    output_fn: OutputFn = first_tensor
    chunk_size: int = 16
    batch_size: int = 128
    output_numbers: int = 1
    output_axes: int | None = None  # of one row; None: not known
    last_layer: LastLayer | None = None  # where the last layer alone is random

    def __call__(self, weights: Weights, inputs: Inputs) -> Tensor:
        """Outputs of a stack of weights, {name: (S, ...)} -> (S, B, ...), in float32 at least; gradients flow."""
        loop = self.chunk_size == 1
        outputs = forward(self.net, weights, inputs, output_fn=self.output_fn, loop=loop, layers=self.layers)
        return outputs.to(torch.promote_types(outputs.dtype, torch.float32))

    @cached_property
    def layers(self) -> dense.Plan | None:
        """Layers that batched products can run, if the model is a plain stack of them."""
        return dense.plan(self.net) if self.output_fn is first_tensor else None

    def blocks(self, inputs: Inputs, stacked: int) -> Iterator[slice]:
        """Slices of the rows so short that `stacked` outputs of one slice stay within a fixed memory."""
        step = max(1, min(1 << 16, OUTPUT_NUMBERS // max(1, stacked * self.output_numbers)))
        return (slice(i, i + step) for i in range(0, rows_of(inputs), step))

    @torch.no_grad()
    def outputs(self, draw: Draw, draws: int, inputs: Inputs, *, members: int = 1) -> Tensor:
        """Outputs of `draws` draws of every member, member-major: (M·P, B, ...). Weights exist one chunk at a time."""
        if draws < 1 or rows_of(inputs) < 1:
            raise ModelError("Expected at least one draw and one row, but got none.")
        if self.last_layer is not None:
            return self._last_layer_outputs(self.last_layer, draw, draws, inputs, members)
        result: Tensor | None = None
        together = self.chunk_size
        if together == 1:
            together = max(1, LOOP_NUMBERS // (members * max(1, sum(p.numel() for p in self.net.parameters()))))
        for start in range(0, draws, together):
            span = range(start, min(start + together, draws))
            # no name for the weights: they are gone before the next ones are drawn
            for rows, block in self._batches(draw(span), inputs):
                if block.shape[1] == rows_of(inputs) and len(span) == draws:
                    return block
                if result is None:
                    result = block.new_empty((members, draws, rows_of(inputs), *block.shape[2:]))
                result[:, start : span.stop, rows] = block.unflatten(0, (members, len(span)))
        assert result is not None
        return result.flatten(0, 1)

    def _last_layer_outputs(self, last_layer: LastLayer, draw: Draw, draws: int, inputs: Inputs, members: int) -> Tensor:
        """Outputs of draws that differ in the last layer alone: all before it runs once."""
        plain = draw(range(1))
        try:
            met = last_layer.met(self.net, [at(plain, m) for m in range(members)], inputs, self.output_fn, self.batch_size)
        except MODEL_ERRORS as error:
            raise model_failed(self.net, inputs, error) from error
        check_rows(self.net, met[0], inputs)
        together = max(1, LOOP_NUMBERS // sum(w.numel() for w in plain.values()))
        parts: list[Tensor] = []
        for start in range(0, draws, together):
            stacked = last_layer.outputs(self.net, met, draw(range(start, min(start + together, draws))))
            parts.append(stacked.to(torch.promote_types(stacked.dtype, torch.float32)).unflatten(0, (members, -1)))
        return torch.cat(parts, 1).flatten(0, 1)

    def _batches(self, weights: Weights, inputs: Inputs) -> Iterator[tuple[slice, Tensor]]:
        """Outputs of all weight sets for some rows, (S, b, ...); batched products choose their own rows."""
        size = rows_of(inputs)
        step = size if self.layers and is_table(inputs) else self.batch_size
        for row in range(0, size, step):
            rows = slice(row, row + step)
            taken = take_rows(inputs, rows)
            block = self(weights, taken)
            check_rows(self.net, block[0], taken)
            yield rows, block


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(". ")
