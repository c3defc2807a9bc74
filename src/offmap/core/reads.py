"""Which input meets which parameter: a dispatch mode that watches the matrix products of one forward pass.

Every product of an activation with (a view of) a parameter is a *read*: rows h of the activation meet the parameter along its
fan-in axes. Watching the operators instead of the modules finds attention projections, tied weights and `x @ self.weight`
without knowing any layer by name.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

BLOCK = 1 << 22
"""Numbers per block of unfolded patches: what bounds the memory of a convolution's read."""

ONE_AT_A_TIME = threading.RLock()
"""Held while a host has weights that are not its own, or torch's switches are set: threads share both."""

aten = torch.ops.aten


@dataclass(frozen=True)
class Read:
    """One meeting of activations with a parameter.

    `rows()` yields blocks (n, D) of what the parameter met along `axes`; it is None where no rotation is possible, and
    `why` says so.
    """

    name: str
    axes: tuple[int, ...] = ()
    bias: str | None = None
    rows: Callable[[], Iterator[Tensor]] | None = None
    why: str = ""


class ReadWatcher(TorchDispatchMode):
    """Calls `visit` with a Read for every product with one of `weights` while it is active."""

    def __init__(self, weights: Mapping[str, Tensor], visit: Callable[[Read], None]) -> None:
        super().__init__()
        self.weights = dict(weights)
        self.visit = visit
        self.spans = sorted((t.data_ptr(), t.data_ptr() + t.numel() * t.element_size(), n) for n, t in weights.items())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator, then report what it read."""
        result = func(*args, **(kwargs or {}))
        reader = READERS.get(func.overloadpacket)
        if reader is not None:
            for read in reader(self, *args):
                self.visit(read)
        return result

    def owner(self, tensor: Tensor | None) -> str | None:
        """The name of the parameter in whose memory `tensor` lies."""
        if tensor is None or tensor.numel() == 0:
            return None
        address = tensor.data_ptr()
        return next((name for start, end, name in self.spans if start <= address < end), None)

    def fan_in(self, name: str, operand: Tensor, dim: int) -> tuple[int, ...] | None:
        """The parameter's axes that dimension `dim` of a two-dimensional view of it runs over, or None for a partial view."""
        whole = self.weights[name]
        flat = whole.flatten(1) if whole.ndim > 1 else whole.unsqueeze(0)
        layout = (operand.shape, operand.stride())
        rest = tuple(range(1, whole.ndim))
        # a width-1 matrix has ambiguous strides, so shapes are compared as well
        if layout == (flat.shape, flat.stride()):
            return rest if dim == 1 else (0,)
        if layout == (flat.mT.shape, flat.mT.stride()):
            return rest if dim == 0 else (0,)
        return None


def _product(watch: ReadWatcher, rows: Tensor, operand: Tensor, dim: int, bias: Tensor | None) -> Iterator[Read]:
    """The read of `operand` by `rows` (n, D), where D runs along dimension `dim` of the operand."""
    name = watch.owner(operand)
    if name is None:
        return
    axes = watch.fan_in(name, operand, dim)
    if axes is None or watch.weights[name].ndim < 2:
        yield Read(name, why="read in parts")
    else:
        yield Read(name, axes, watch.owner(bias), lambda: iter((rows,)))


def _mm(watch: ReadWatcher, a: Tensor, b: Tensor, *_: Any, bias: Tensor | None = None) -> Iterator[Read]:
    yield from _product(watch, a, b, 0, bias)
    yield from _product(watch, b.mT, a, 1, bias)


def _addmm(watch: ReadWatcher, bias: Tensor, a: Tensor, b: Tensor, *_: Any) -> Iterator[Read]:
    yield from _mm(watch, a, b, bias=bias)


def _bmm(watch: ReadWatcher, a: Tensor, b: Tensor, *_: Any) -> Iterator[Read]:
    # linear on a non-contiguous 3-D input becomes a bmm with one weight expanded over the batch
    if b.stride(0) == 0 or b.shape[0] == 1:
        yield from _product(watch, a.flatten(0, 1), b[0], 0, None)
    elif (name := watch.owner(b)) is not None:
        yield Read(name, why="read in parts")
    if a.stride(0) == 0 or a.shape[0] == 1:
        yield from _product(watch, b.mT.flatten(0, 1), a[0], 1, None)
    elif (name := watch.owner(a)) is not None:
        yield Read(name, why="read in parts")


def _baddbmm(watch: ReadWatcher, bias: Tensor, a: Tensor, b: Tensor, *_: Any) -> Iterator[Read]:
    yield from _bmm(watch, a, b)


def _convolution(
    watch: ReadWatcher, x: Tensor, weight: Tensor, bias: Tensor | None, stride: list[int], padding: list[int],
    dilation: list[int], transposed: bool, output_padding: list[int], groups: int,
) -> Iterator[Read]:  # fmt: skip
    name = watch.owner(weight)
    if name is None:
        return
    if transposed or groups > 1 or weight.shape != watch.weights[name].shape:
        yield Read(name, bias=watch.owner(bias), why="transposed convolution" if transposed else "grouped convolution")
        return
    window = (tuple(weight.shape[2:]), stride, padding, dilation)
    yield Read(name, tuple(range(1, weight.ndim)), watch.owner(bias), lambda: patches(x, *window))


READERS: dict[Any, Callable[..., Iterator[Read]]] = {
    aten.mm: _mm,
    aten.addmm: _addmm,
    aten.bmm: _bmm,
    aten.baddbmm: _baddbmm,
    aten.convolution: _convolution,
}


def patches(x: Tensor, kernel: tuple[int, ...], stride: list[int], padding: list[int], dilation: list[int]) -> Iterator[Tensor]:
    """Windows that a convolution's kernel meets, in blocks: (B, C, *space) -> (n, C·prod(kernel)), channels first.

    >>> x = torch.arange(4.0).reshape(1, 1, 4)
    >>> next(patches(x, (2,), [1], [0], [1]))
    tensor([[0., 1.],
            [1., 2.],
            [2., 3.]])
    """
    x = F.pad(x, [p for p in reversed(padding) for _ in (0, 1)])
    space = x.shape[2:]
    places = [(n - d * (k - 1) - 1) // s + 1 for n, k, s, d in zip(space, kernel, stride, dilation, strict=True)]
    fan_in = x.shape[1] * math.prod(kernel)
    for block in x.split(max(1, BLOCK // (math.prod(places) * fan_in))):
        steps = block.stride()[2:]
        windows = block.as_strided(
            (block.shape[0], *places, block.shape[1], *kernel),
            (block.stride(0), *(s * t for s, t in zip(stride, steps, strict=True)), block.stride(1),
             *(d * t for d, t in zip(dilation, steps, strict=True))),
            block.storage_offset(),
        )  # fmt: skip
        yield windows.reshape(-1, fan_in)


@contextmanager
def slow_attention() -> Generator[None]:
    """Switch fused attention off: a dispatch mode cannot look into it, and `vmap` can neither batch nor differentiate it."""
    with ONE_AT_A_TIME, sdpa_kernel(SDPBackend.MATH):
        before = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            yield
        finally:
            torch.backends.mha.set_fastpath_enabled(before)
