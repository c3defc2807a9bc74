"""Parameters as matrices (out, D) over their layer inputs: which axes inputs run along, and which part of one an operand is.

* `MatrixView` turns a parameter of any layout into a matrix and back. Rows are cut into blocks with different inputs (groups of a
  convolution, parts of a packed projection); columns into pieces, when one basis for the whole fan-in would be too large.
* `AliasTable` finds the parameter, and the axes of it, that an operand of an operator is a view of.
* `Windows` gathers the layer inputs of a convolution's kernel, one row per output position.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 1 << 20
"""Numbers per block of gathered windows: what bounds the memory of a convolution's layer inputs."""

Axes = tuple[int, ...]


@dataclass(frozen=True)
class MatrixView:
    """Seen under the shape `view`, a parameter has fan-in `axes`, and output axes `outs` whose rows are cut in `blocks`.

    >>> view = MatrixView(view=(6, 4, 3, 3), outs=(0,), axes=(1, 2, 3), blocks=(3, 3))  # two groups
    >>> view.outputs, view.fan_in, view.rows(torch.zeros(1, 6, 4, 3, 3)).shape
    (6, 36, torch.Size([1, 6, 36]))
    """

    view: tuple[int, ...]
    outs: Axes
    axes: Axes
    blocks: tuple[int, ...] = ()

    @property
    def outputs(self) -> int:
        """Number of rows."""
        return math.prod(self.view[a] for a in self.outs)

    @property
    def fan_in(self) -> int:
        """D."""
        return math.prod(self.view[a] for a in self.axes)

    def cut(self, blocks: tuple[int, ...]) -> MatrixView:
        """Cut the rows into blocks of these sizes."""
        return replace(self, blocks=blocks)

    @cached_property
    def in_order(self) -> bool:
        """Whether outputs come before inputs, as almost always: then a matrix is only another view."""
        return (*self.outs, *self.axes) == tuple(range(len(self.view)))

    def rows(self, weight: Tensor) -> Tensor:
        """Turn any number L of parameters into matrices: (L, *shape) -> (L, out, D)."""
        if not self.in_order:
            weight = weight.reshape(weight.shape[0], *self.view).permute(0, *(a + 1 for a in (*self.outs, *self.axes)))
        return weight.reshape(weight.shape[0], self.outputs, self.fan_in)

    def back(self, rows: Tensor, shape: torch.Size) -> Tensor:
        """Invert `rows`: (L, out, D) -> (L, *shape)."""
        if not self.in_order:
            order = (*self.outs, *self.axes)
            rows = rows.reshape(rows.shape[0], *(self.view[a] for a in order))
            rows = rows.permute(0, *(order.index(a) + 1 for a in range(len(order))))
        return rows.reshape(rows.shape[0], *shape)

    def per_row(self, values: Tensor) -> Tensor:
        """Repeat the values of each block for each of its rows: (M, G, D) -> (M, out, D)."""
        if len(self.blocks) == 1:
            return values.expand(-1, self.outputs, -1)
        sizes = torch.tensor(self.blocks, device=values.device)
        return values.repeat_interleave(sizes, 1, output_size=self.outputs)


def in_pieces(rows: Tensor, pieces: int) -> Tensor:
    """Cut the last axis into pieces of one width, the last filled up with zeros: (..., D) -> (..., pieces, d).

    >>> in_pieces(torch.tensor([1.0, 2.0, 3.0]), 2)
    tensor([[1., 2.],
            [3., 0.]])
    """
    if pieces == 1:
        return rows.unsqueeze(-2)
    width = -(-rows.shape[-1] // pieces)
    return F.pad(rows, (0, pieces * width - rows.shape[-1])).unflatten(-1, (pieces, width))


def rotate(delta: Tensor, matrix: Tensor, view: MatrixView) -> Tensor:
    """Turn noise in the basis into noise in weights: (M, P, *shape), (M, G, N, d, d) -> (M, P, *shape), δ Vᵀ block by block."""
    members, draws, shape = delta.shape[0], delta.shape[1], delta.shape[2:]
    rows = view.rows(delta.flatten(0, 1))
    # eigh returns columns; inputs stand to the right of the weight's rows, hence Vᵀ. A draw must not depend to the bit on the
    # draws beside it: one product over many rounds by their number, and one with a transposed view by where the draw lies
    transposed = matrix.mT.contiguous()
    if delta.requires_grad and transposed.shape[1:3] == (
        1,
        1,
    ):  # a step of a fit, always with the same draws: one product is faster
        turned = torch.bmm(rows.reshape(members, -1, view.fan_in), transposed[:, 0, 0]).view(rows.shape)
    else:
        pairs = zip(rows.unflatten(0, (members, draws)), transposed, strict=True)
        parts = [_rotate_draw(draw, back, view.blocks) for member, back in pairs for draw in member]
        turned = parts[0].unsqueeze(0) if len(parts) == 1 else torch.stack(parts)  # large models draw one at a time: no copy
    return view.back(turned, shape).unflatten(0, (members, draws))


def _rotate_draw(rows: Tensor, transposed: Tensor, blocks: tuple[int, ...]) -> Tensor:
    """Rotate one draw: (out, D), (G, N, d, d) -> (out, D)."""
    groups, pieces = transposed.shape[:2]
    if groups == pieces == 1:
        return rows @ transposed[0, 0]
    if pieces == 1 and len(set(blocks)) == 1:
        return (rows.unflatten(0, (groups, -1)) @ transposed[:, 0]).flatten(0, 1)
    result, width, start = torch.empty_like(rows), transposed.shape[-1], 0
    for size, matrices in zip(blocks, transposed, strict=True):
        for first, v in zip(range(0, rows.shape[1], width), matrices, strict=True):
            place = (slice(start, start + size), slice(first, first + width))
            part = rows[place]  # the last piece may be narrower than its basis
            result[place] = part @ v[: part.shape[1], : part.shape[1]]
        start += size
    return result


@dataclass(frozen=True)
class ParamView:
    """Where an operand lies in a parameter: per dimension the parameter's axes it runs over, slowest first, and how often it
    is repeated; `part` is the one axis of which it holds only (axis, start, stop), if there is one.
    """

    name: str
    dims: tuple[Axes, ...]
    repeats: tuple[int, ...]
    part: tuple[int, int, int] | None = None

    @property
    def complete(self) -> bool:
        """Whether the operand is the parameter itself, axis by axis (those of size one say nothing)."""
        return self.part is None and all(run in ((d,), ()) for d, run in enumerate(self.dims)) and set(self.repeats) <= {1}


class AliasTable:
    """Tell whose memory an operand lies in: the parameters', and that of copies made of them on the way."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self.shapes = {name: tuple(w.shape) for name, w in weights.items()}
        self.aliases: dict[int, list[tuple[Tensor, ParamView]]] = {}  # by storage
        for name, w in weights.items():
            self.add(w, ParamView(name, tuple((a,) for a in range(w.ndim)), (1,) * w.ndim))

    def add(self, tensor: Tensor, view: ParamView) -> None:
        """Note that `tensor`, which stays alive here, holds what lies at `view`."""
        self.aliases.setdefault(tensor.untyped_storage().data_ptr(), []).append((tensor, view))

    def owner(self, tensor: Tensor | None) -> str | None:
        """Return the name of the parameter in whose memory `tensor` lies."""
        alias = self._find(tensor)
        return alias[1].name if alias else None

    def _find(self, tensor: Tensor | None) -> tuple[Tensor, ParamView] | None:
        if tensor is None or tensor.numel() == 0:
            return None
        first = tensor.storage_offset()
        for alias in self.aliases.get(tensor.untyped_storage().data_ptr(), ()):
            start = alias[0].storage_offset()
            if start <= first < start + alias[0].numel():
                return alias
        return None

    def locate(self, operand: Tensor) -> ParamView | None:
        """Tell where the operand lies in a parameter; None if that is not a plain cut of it."""
        alias = self._find(operand)
        axes_of = alias and _axes(alias[0], operand)
        if alias is None or axes_of is None:
            return None
        dims, repeats, part = axes_of
        inner = alias[1]
        if part is not None and (inner.part is not None or len(inner.dims[part[0]]) != 1 or inner.repeats[part[0]] > 1):
            return None  # a part of a part, or of several axes in one
        axes = tuple(tuple(a for d in run for a in inner.dims[d]) for run in dims)
        # the copies of one row must lie apart by whole parameters: repeated dimensions come before the others
        if any(inner.repeats[d] > 1 for run in dims for d in run[1:]):
            return None
        times = tuple(r * math.prod(inner.repeats[d] for d in run) for run, r in zip(dims, repeats, strict=True))
        return ParamView(inner.name, axes, times, (inner.dims[part[0]][0], part[1], part[2]) if part else inner.part)


def _axes(owner: Tensor, operand: Tensor) -> tuple[tuple[Axes, ...], tuple[int, ...], tuple[int, int, int] | None] | None:
    """Per dimension of a view the dimensions of `owner` it runs over and its repeats, and the one dimension that is cut.

    Dimensions of size one have no direction, so strides are compared for longer ones alone.
    """
    offset = int(operand.storage_offset()) - int(owner.storage_offset())
    strides = {t: d for d, (n, t) in enumerate(zip(owner.shape, owner.stride(), strict=True)) if n > 1}
    covered: dict[int, int] = {}  # how much of a dimension of `owner` the operand covers
    dims: list[Axes] = []
    repeats: list[int] = []
    for size, stride in zip(operand.shape, operand.stride(), strict=True):
        run: list[int] = []
        reach = 1
        if size > 1 and stride > 0:
            while reach < size:
                d = strides.get(stride * reach)
                if d is None or d in covered:
                    return None
                run.insert(0, d)
                covered[d] = min(owner.shape[d], size // reach)
                reach *= covered[d]
                if covered[d] < owner.shape[d]:
                    break
            if reach != size:
                return None
        dims.append(tuple(run))
        repeats.append(size if stride == 0 and size > 1 else 1)
    parts = [d for d, n in enumerate(owner.shape) if covered.get(d, 1) < n]
    if not parts:
        return (tuple(dims), tuple(repeats), None) if offset == 0 else None
    start, rest = divmod(offset, owner.stride(parts[0]))
    if len(parts) > 1 or rest:
        return None
    return tuple(dims), tuple(repeats), (parts[0], start, start + covered.get(parts[0], 1))


@dataclass(frozen=True)
class Windows:
    """Windows of an input (B, C, *space), one for each of `places`, with C·prod(kernel) numbers, channels first.

    >>> windows = Windows(torch.tensor([[[1.0, 2.0, 3.0]]]), kernel=(2,), places=(4,), stride=(1,), padding=(1,), dilation=(1,))
    >>> next(windows.rows(groups=1))
    tensor([[[0., 1.], [1., 2.], [2., 3.], [3., 0.]]])
    """

    x: Tensor
    kernel: tuple[int, ...]
    places: tuple[int, ...]
    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    transposed: bool = False

    @property
    def count(self) -> int:
        """Number of windows."""
        return self.x.shape[0] * math.prod(self.places)

    def rows(self, groups: int, chosen: Tensor | None = None) -> Iterator[Tensor]:
        """Gather all windows, or the `chosen` ones by number, group by group: blocks of (groups, n, C/groups·prod(kernel))."""
        if self.transposed:
            yield from self._as_convolution().rows(groups, chosen)
            return
        flat = self.x.reshape(-1)
        numbers = torch.arange(self.count, device=flat.device) if chosen is None else chosen.to(flat.device)
        for few in numbers.split(max(1, BLOCK // (self.x.shape[1] * math.prod(self.kernel)))):
            index, inside = self._index(few)
            windows = flat.take(index.clamp_(0, len(flat) - 1)).masked_fill_(~inside, 0)
            yield windows.reshape(len(few), groups, -1).transpose(0, 1)

    def _index(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Where in the flat input the windows lie, (n, C, taps), and which of it is not padding, (n, 1, taps)."""
        channels, *space = self.x.shape[1:]
        device = numbers.device
        start, offset, apart = torch.zeros_like(numbers), torch.zeros(1, dtype=torch.long, device=device), 1
        inside = torch.ones(1, 1, dtype=torch.bool, device=device)
        axes = zip(space, self.kernel, self.places, self.stride, self.padding, self.dilation, strict=True)
        for size, kernel, places, stride, padding, dilation in reversed(list(axes)):  # neighbours are `apart` in the flat input
            first, taps = numbers.remainder(places) * stride - padding, torch.arange(kernel, device=device) * dilation
            position = first[:, None] + taps
            inside = (((position >= 0) & (position < size))[:, :, None] & inside[:, None]).flatten(1)
            start, offset = start + first * apart, (taps[:, None] * apart + offset).flatten()
            numbers, apart = numbers.div(places, rounding_mode="floor"), apart * size
        within = torch.arange(channels, device=device)[:, None] * apart + offset  # (C, taps)
        return (start + numbers * (channels * apart))[:, None, None] + within, inside[:, None]

    def _as_convolution(self) -> Windows:
        """A transposed convolution is a plain one, its taps counted backwards, over the input with zeros between its numbers."""
        size = [(length - 1) * step + 1 for length, step in zip(self.x.shape[2:], self.stride, strict=True)]
        spread = self.x.new_zeros(*self.x.shape[:2], *size)
        spread[(..., *(slice(None, None, step) for step in self.stride))] = self.x
        back = [-p for p in self.padding], [-d for d in self.dilation]
        return Windows(spread, self.kernel, self.places, (1,) * len(size), *back)
