"""Which input meets which parameter: a dispatch mode that watches the matrix products of one forward pass.

Every product of an activation with (a view of) a parameter is a *read*: rows h of the activation meet the parameter along its
fan-in axes. Watching the operators instead of the modules finds attention projections, tied weights and `x @ self.weight`
without knowing any layer by name.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from offmap._torch_private import TorchDispatchMode
from offmap.model.matrix_view import MatrixView
from offmap.model.param_views import AliasTable, Place
from offmap.model.windows import BLOCK, Windows

ONE_AT_A_TIME = threading.RLock()
"""Held while a model has weights that are not its own, or torch's switches are set: threads share both."""

aten = torch.ops.aten

Rows: TypeAlias = Callable[[Tensor | None], Iterable[Tensor]]
"""All rows, or those of the given numbers, in blocks (groups, n, D)."""


@dataclass(frozen=True)
class LayerInput:
    """`count` inputs, in each of `groups` equal blocks, meet the output rows `start` to `stop` of a parameter in `frame`."""

    frame: MatrixView
    start: int
    stop: int
    groups: int
    count: int
    rows: Rows
    map: Tensor | None = None  # of a convolution: its input, (B, C, *space)


@dataclass(frozen=True)
class ParamUse:
    """One use of a parameter: a meeting with rows of activations, a lookup by index, or why there is neither; or a bias alone, of
    the meeting before.

    `final`: whatever else meets the parameter, it cannot be rotated.
    """

    name: str
    bias: str | None = None
    meeting: LayerInput | None = None
    index: Tensor | None = None  # which rows were looked up
    why: str = ""
    final: bool = False


class CaptureMode(TorchDispatchMode):
    """Calls `visit` with a Read for every use of one of `weights` in a product or lookup while it is active."""

    def __init__(self, weights: Mapping[str, Tensor], visit: Callable[[ParamUse], None]) -> None:
        super().__init__()
        self.owners = AliasTable(weights)
        self.visit = visit
        self.widest = 0  # numbers in the largest result
        self.last: tuple[str, Tensor] | None = None  # of the products without a bias: whose it is, and the result

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator, then report what it read."""
        result = func(*args, **(kwargs or {}))
        packet = func.overloadpacket
        if isinstance(result, Tensor):
            self.widest = max(self.widest, result.numel())
        if packet in COPIES:
            self._follow(args, result)
        elif packet in SUMS and self.last is not None:
            self._join(*self.last, args)
        elif (reader := READERS.get(packet)) is not None:
            for read in reader(self.owners, result, *args):
                self.last = (read.name, result) if read.meeting and read.bias is None else None
                self.visit(read)
        return result

    def _join(self, name: str, product: Tensor, args: Any) -> None:
        """A vector that is added to a product is its bias: of inputs that are not contiguous, torch's Linear makes it so."""
        here = product.untyped_storage().data_ptr()
        for x, vector in (args[:2], args[1::-1]):
            if isinstance(x, Tensor) and isinstance(vector, Tensor) and x.untyped_storage().data_ptr() == here:
                if vector.shape == x.shape[-1:] and (bias := self.owners.owns(vector)) is not None:
                    self.visit(ParamUse(name, bias))
                self.last = None
                return

    def _follow(self, args: Any, result: Any) -> None:
        """A copy of a parameter, or what a parametrization makes of it, stands for the parameter itself."""
        made = result[0] if isinstance(result, tuple) else result
        for source in args[:2]:
            if isinstance(source, Tensor) and source.shape == made.shape and self.owners.owns(source) is not None:
                place = self.owners.locate(source)
                if place is not None and made.is_floating_point():
                    self.owners.follow(made, place)
                return


COPIES = (aten.clone, aten._to_copy, aten.contiguous, aten.div, aten.mul, aten._weight_norm_interface)
"""Operators whose result has the rows of an operand, up to scale."""

SUMS = (aten.add, aten.add_)
"""Operators by which a bias may join."""

PARTLY = "read in parts of its fan-in"
TWICE = "read along two different axes"
LOOKUP = "looked up by index: its inputs already lie along its axes"


def _product(owners: AliasTable, rows: Tensor, operand: Tensor, fan_in: int, bias: Tensor | None = None) -> Iterator[ParamUse]:
    """The read of `operand` (batch, ·, ·) by `rows` (batch, n, D), where D runs along its dimension `fan_in`."""
    name = owners.owns(operand)
    if name is None:
        return
    place = owners.locate(operand)
    meeting = place and _meeting(owners.shapes[name], place, fan_in, rows)
    yield ParamUse(name, owners.owns(bias), meeting) if meeting else ParamUse(name, why=PARTLY, final=True)


def _meeting(shape: tuple[int, ...], place: Place, fan_in: int, rows: Tensor) -> LayerInput | None:
    """Batch axes first, then the other outputs; the one axis that is seen in part comes first of all."""
    batch, axes, outs = place.dims[0], place.dims[fan_in], place.dims[3 - fan_in]
    if place.repeats[fan_in] > 1 or place.repeats[3 - fan_in] > 1:
        return None
    start, stop, groups = 0, 1, math.prod(shape[a] for a in batch)
    if place.part is not None:
        part, start, stop = place.part
        if part in axes or (batch and batch[0] != part) or (not batch and outs and outs[0] != part and part in outs):
            return None
        groups = groups // shape[part] * (stop - start) if part in batch else groups
        batch = batch if part in batch else (part, *batch)
    order = tuple(dict.fromkeys((*batch, *outs)))
    # axes of size one belong anywhere: to the fan-in if that is one number, else to the outputs
    rest = [a for a in range(len(shape)) if a not in order and a not in axes]
    axes, order = (tuple(rest[-1:]), (*rest[:-1], *order)) if not axes else (axes, (*order, *rest))
    frame = MatrixView(shape, tuple(order), axes)
    inner = frame.outputs // (shape[place.part[0]] if place.part else 1)
    span = (start * inner, stop * inner) if place.part else (0, frame.outputs)
    times = place.repeats[0]
    grouped = (
        rows.unflatten(0, (times, groups)).transpose(0, 1).flatten(1, 2) if times > 1 or groups > 1 else rows.flatten(0, 1)[None]
    )
    return LayerInput(frame, *span, groups, grouped.shape[1], lambda chosen: (grouped if chosen is None else grouped[:, chosen],))


def _bmm(owners: AliasTable, result: Tensor, a: Tensor, b: Tensor, *_: Any, bias: Tensor | None = None) -> Iterator[ParamUse]:
    yield from _product(owners, a, b, 1, bias)
    if owners.owns(b) is None:  # of two parameters the first is the input: one that was learned, or a factor of the second
        yield from _product(owners, b.mT, a, 2, bias)


def _baddbmm(owners: AliasTable, result: Tensor, bias: Tensor, a: Tensor, b: Tensor, *_: Any) -> Iterator[ParamUse]:
    yield from _bmm(owners, result, a, b, bias=bias)


def _mm(owners: AliasTable, result: Tensor, a: Tensor, b: Tensor, *_: Any) -> Iterator[ParamUse]:
    yield from _bmm(owners, result, a[None], b[None])


def _addmm(owners: AliasTable, result: Tensor, bias: Tensor, a: Tensor, b: Tensor, *_: Any) -> Iterator[ParamUse]:
    yield from _bmm(owners, result, a[None], b[None], bias=bias)


def _mv(owners: AliasTable, result: Tensor, a: Tensor, b: Tensor, *_: Any) -> Iterator[ParamUse]:
    yield from _product(owners, a[None], b[None, :, None], 1)


def _convolution(
    owners: AliasTable, result: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, stride: list[int], padding: list[int],
    dilation: list[int], transposed: bool, output_padding: list[int], groups: int,
) -> Iterator[ParamUse]:  # fmt: skip
    name = owners.owns(weight)
    if name is None:
        return
    place = owners.locate(weight)
    if place is None or not place.whole:
        yield ParamUse(name, why=PARTLY, final=True)
        return
    shape = tuple(weight.shape)
    taps = range(2, weight.ndim)
    frame = MatrixView(shape, (0,), (1, *taps))
    if transposed:  # (in, out/g, *kernel)
        frame = MatrixView((groups, shape[0] // groups, *shape[1:]), (0, 2), (1, *(t + 1 for t in taps)))
    met = Windows(x, shape[2:], tuple(result.shape[2:]), stride, padding, dilation, transposed)
    meeting = LayerInput(frame, 0, frame.outputs, groups, met.count, lambda chosen: met.rows(groups, chosen), x)
    yield ParamUse(name, owners.owns(bias), meeting)


def _trilinear(owners: AliasTable, result: Tensor, left: Tensor, weight: Tensor, right: Tensor, *_: Any) -> Iterator[ParamUse]:
    """nn.Bilinear: each output row meets the outer product of its two inputs."""
    name = owners.owns(weight)
    if name is None:
        return

    def rows(chosen: Tensor | None) -> Iterator[Tensor]:
        a, b = (left, right) if chosen is None else (left[chosen], right[chosen])
        step = max(1, BLOCK // (a.shape[1] * b.shape[1]))
        pairs = zip(a.split(step), b.split(step), strict=True)
        return ((p.unsqueeze(2) * q.unsqueeze(1)).flatten(1)[None] for p, q in pairs)

    place = owners.locate(weight)
    if place is None or not place.whole:
        yield ParamUse(name, why=PARTLY, final=True)
    else:
        frame = MatrixView(tuple(weight.shape), (0,), (1, 2))
        yield ParamUse(name, None, LayerInput(frame, 0, frame.outputs, 1, left.shape[0], rows))


def _rnn_layer(
    owners: AliasTable, result: Any, x: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor, b_hh: Tensor, h0: Tensor, c0: Tensor,
    reverse: bool, *_: Any,
) -> Iterator[ParamUse]:  # fmt: skip
    """One fused layer of an LSTM: its own outputs, one step earlier, are what the recurrent weight meets."""
    outputs: Tensor = result[0]
    before = torch.cat([outputs[1:], h0[None]]) if reverse else torch.cat([h0[None], outputs[:-1]])
    yield from _product(owners, x.flatten(0, 1)[None], w_ih.mT[None], 1, b_ih)
    yield from _product(owners, before.flatten(0, 1)[None], w_hh.mT[None], 1, b_hh)


def _lookup(owners: AliasTable, result: Any, weight: Tensor, index: Tensor, *_: Any) -> Iterator[ParamUse]:
    name = owners.owns(weight)
    if name is not None:
        place = owners.locate(weight)
        yield ParamUse(name, index=index if place is not None and place.whole else None, why=LOOKUP)


READERS: dict[Any, Callable[..., Iterator[ParamUse]]] = {
    aten.mm: _mm,
    aten.addmm: _addmm,
    aten.bmm: _bmm,
    aten.baddbmm: _baddbmm,
    aten.mv: _mv,
    aten.convolution: _convolution,
    aten._trilinear: _trilinear,
    aten.mkldnn_rnn_layer: _rnn_layer,
    aten.embedding: _lookup,
    aten._embedding_bag: _lookup,
    aten._embedding_bag_forward_only: _lookup,
}


@contextmanager
def open_attention() -> Generator[None]:
    """Switch the fast path of attention layers off: it swallows whole layers, and nobody sees what their weights meet."""
    with ONE_AT_A_TIME:
        before = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            yield
        finally:
            torch.backends.mha.set_fastpath_enabled(before)


@contextmanager
def slow_attention() -> Generator[None]:
    """Switch fused kernels off as well: `vmap` can neither batch nor differentiate them."""
    with open_attention(), sdpa_kernel(SDPBackend.MATH):
        yield
