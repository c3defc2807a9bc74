"""Parameters as matrices (out, D) over their layer inputs: which axes inputs run along, and which part of one an operand is.

Rows are cut into blocks with different inputs (groups of a convolution, parts of a packed projection); columns into pieces, when
one basis for the whole fan-in would be too large.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

Axes = tuple[int, ...]


@dataclass(frozen=True)
class MatrixView:
    """Seen under the shape `view`, a parameter has fan-in `axes`, and output axes `outs` whose rows are cut in `blocks`."""

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

    @cached_property
    def _order(self) -> Axes | None:
        """Axes of the matrix; None where they are in order, as almost always: then a matrix is only another view."""
        order = (*self.outs, *self.axes)
        return None if order == tuple(range(len(order))) else order

    def rows(self, weight: Tensor) -> Tensor:
        """Turn any number L of parameters into matrices: (L, *shape) -> (L, out, D)."""
        if self._order:
            weight = weight.reshape(weight.shape[0], *self.view).permute(0, *(a + 1 for a in self._order))
        return weight.reshape(weight.shape[0], self.outputs, self.fan_in)

    def back(self, rows: Tensor, shape: torch.Size) -> Tensor:
        """Invert `rows`: (L, out, D) -> (L, *shape)."""
        if order := self._order:
            rows = rows.reshape(rows.shape[0], *(self.view[a] for a in order))
            rows = rows.permute(0, *(order.index(a) + 1 for a in range(len(order))))
        return rows.reshape(rows.shape[0], *shape)

    def per_row(self, values: Tensor) -> Tensor:
        """Repeat the values of each block for each of its rows: (M, G, D) -> (M, out, D)."""
        if len(self.blocks) == 1:
            return values.expand(-1, self.outputs, -1)
        return values.repeat_interleave(torch.tensor(self.blocks, device=values.device), 1, output_size=self.outputs)


def in_pieces(rows: Tensor, pieces: int) -> Tensor:
    """Cut the last axis into pieces of one width, the last filled up with zeros: (..., D) -> (..., pieces, d)."""
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
    if delta.requires_grad and transposed.shape[1] == transposed.shape[2] == 1:
        # a step of a fit, always with the same draws: one product is faster
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
    """Where an operand lies in a parameter."""

    name: str
    dims: tuple[Axes, ...]  # per dimension the parameter's axes that it runs over, slowest first
    repeats: tuple[int, ...]  # per dimension
    part: tuple[int, int, int] | None = None  # the one axis of which it holds a part alone: (axis, start, stop)

    @property
    def complete(self) -> bool:
        """Whether the operand is the parameter itself, axis by axis (those of size one say nothing)."""
        return self.part is None and all(run in ((d,), ()) for d, run in enumerate(self.dims)) and set(self.repeats) <= {1}


class AliasTable:
    """Tell whose memory an operand lies in: the parameters', and that of copies made of them on the way."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self.shapes: dict[str, tuple[int, ...]] = {name: tuple(w.shape) for name, w in weights.items()}
        self._aliases: dict[int, list[tuple[Tensor, ParamView]]] = {}  # by storage
        for name, w in weights.items():
            self.add(w, ParamView(name, tuple((a,) for a in range(w.ndim)), (1,) * w.ndim))

    def add(self, tensor: Tensor, view: ParamView) -> None:
        """Note that `tensor`, which stays alive here, holds what lies at `view`."""
        self._aliases.setdefault(tensor.untyped_storage().data_ptr(), []).append((tensor, view))

    def _find(self, tensor: Tensor | None) -> tuple[Tensor, ParamView] | None:
        if tensor is None or tensor.numel() == 0:
            return None
        offset = tensor.storage_offset()
        aliases = self._aliases.get(tensor.untyped_storage().data_ptr(), ())
        return next((a for a in aliases if 0 <= offset - a[0].storage_offset() < a[0].numel()), None)

    def owner(self, tensor: Tensor | None) -> str | None:
        """Return the name of the parameter in whose memory `tensor` lies."""
        alias = self._find(tensor)
        return alias[1].name if alias else None

    def locate(self, operand: Tensor) -> ParamView | None:
        """Tell where the operand lies in a parameter; None if that is not a plain cut of it."""
        alias = self._find(operand)
        outer = alias and _locate_in(alias[0], operand)
        if alias is None or outer is None:
            return None
        inner, part = alias[1], outer.part
        if part is not None and (inner.part is not None or len(inner.dims[part[0]]) != 1 or inner.repeats[part[0]] > 1):
            return None  # a part of a part, or of several axes in one
        # the copies of one row must lie apart by whole parameters: repeated dimensions come before the others
        if any(inner.repeats[d] > 1 for run in outer.dims for d in run[1:]):
            return None
        axes = tuple(tuple(a for d in run for a in inner.dims[d]) for run in outer.dims)
        runs = zip(outer.dims, outer.repeats, strict=True)
        repeats = tuple(r * math.prod(inner.repeats[d] for d in run) for run, r in runs)
        return ParamView(inner.name, axes, repeats, (inner.dims[part[0]][0], part[1], part[2]) if part else inner.part)


def _locate_in(owner: Tensor, operand: Tensor) -> ParamView | None:
    """Tell where a view lies in the tensor `owner` of its storage."""
    offset = int(operand.storage_offset()) - int(owner.storage_offset())
    # dimensions of size one have no direction, so strides are compared for longer ones alone
    strides = {t: d for d, (n, t) in enumerate(zip(owner.shape, owner.stride(), strict=True)) if n > 1}
    covered: dict[int, int] = {}  # how much of a dimension of `owner` the operand covers
    dims: list[Axes] = []
    for size, stride in zip(operand.shape, operand.stride(), strict=True):
        run: list[int] = []
        reach = 1 if stride else size
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
    repeats = tuple(size if stride == 0 else 1 for size, stride in zip(operand.shape, operand.stride(), strict=True))
    parts = [d for d, n in enumerate(owner.shape) if covered.get(d, 1) < n]
    if not parts:
        return ParamView("", tuple(dims), repeats) if offset == 0 else None
    start, rest = divmod(offset, owner.stride(parts[0]))
    if len(parts) > 1 or rest:
        return None
    return ParamView("", tuple(dims), repeats, (parts[0], start, start + covered.get(parts[0], 1)))
