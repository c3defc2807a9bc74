"""Which axes of a parameter an operand runs over: operators see views of a parameter, or copies of such views."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

Axes = tuple[int, ...]


@dataclass(frozen=True)
class Place:
    """Where an operand lies in a parameter: per dimension the parameter's axes it runs over, slowest first, and how often it
    is repeated; `part` is the one axis of which it holds only (axis, start, stop), if there is one.
    """

    name: str
    dims: tuple[Axes, ...]
    repeats: tuple[int, ...]
    part: tuple[int, int, int] | None = None

    @property
    def whole(self) -> bool:
        """Whether the operand is the parameter itself, axis by axis (those of size one say nothing)."""
        return self.part is None and all(run in ((d,), ()) for d, run in enumerate(self.dims)) and set(self.repeats) <= {1}


@dataclass(frozen=True)
class Known:
    """A tensor whose memory holds a parameter, and the place of its own dimensions in it."""

    tensor: Tensor
    place: Place

    @property
    def first(self) -> int:
        """Where its numbers begin in their storage."""
        return int(self.tensor.storage_offset())

    @property
    def last(self) -> int:
        """Where they end."""
        return self.first + self.tensor.numel()


class AliasTable:
    """Knows whose memory an operand lies in: the parameters', and that of copies made of them on the way."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self.shapes = {name: tuple(w.shape) for name, w in weights.items()}
        self.known: dict[int, list[Known]] = {}  # by storage
        for name, w in weights.items():
            self.follow(w, Place(name, tuple((a,) for a in range(w.ndim)), (1,) * w.ndim))

    def follow(self, tensor: Tensor, place: Place) -> None:
        """Remember that `tensor`, which stays alive here, holds what lies at `place`."""
        self.known.setdefault(_storage(tensor), []).append(Known(tensor, place))

    def owns(self, tensor: Tensor | None) -> str | None:
        """The name of the parameter in whose memory `tensor` lies."""
        known = self._known(tensor)
        return known.place.name if known else None

    def _known(self, tensor: Tensor | None) -> Known | None:
        if tensor is None or tensor.numel() == 0:
            return None
        first = tensor.storage_offset()
        return next((k for k in self.known.get(_storage(tensor), ()) if k.first <= first < k.last), None)

    def locate(self, operand: Tensor) -> Place | None:
        """Where the operand lies in a parameter; None if that is not a plain cut of it."""
        known = self._known(operand)
        if known is None:
            return None
        found = _axes(known.tensor, operand)
        if found is None:
            return None
        dims, repeats, part = found
        inner = known.place
        if part is not None and (inner.part is not None or len(inner.dims[part[0]]) != 1 or inner.repeats[part[0]] > 1):
            return None  # a part of a part, or of several axes in one
        axes = tuple(tuple(a for d in run for a in inner.dims[d]) for run in dims)
        # the copies of one row must lie apart by whole parameters: repeated dimensions come before the others
        if any(inner.repeats[d] > 1 for run in dims for d in run[1:]):
            return None
        times = tuple(r * math.prod(inner.repeats[d] for d in run) for run, r in zip(dims, repeats, strict=True))
        where = (inner.dims[part[0]][0], part[1], part[2]) if part else inner.part
        return Place(inner.name, axes, times, where)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _axes(whole: Tensor, operand: Tensor) -> tuple[tuple[Axes, ...], tuple[int, ...], tuple[int, int, int] | None] | None:
    """Per dimension of a view the dimensions of `whole` it runs over and its repeats, and the one dimension seen in part.

    Dimensions of size one have no direction, so strides are compared for longer ones alone.
    """
    offset = int(operand.storage_offset()) - int(whole.storage_offset())
    strides = {t: d for d, (n, t) in enumerate(zip(whole.shape, whole.stride(), strict=True)) if n > 1}
    covered: dict[int, int] = {}  # dimension of `whole`: how much of it is seen
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
                covered[d] = min(whole.shape[d], size // reach)
                reach *= covered[d]
                if covered[d] < whole.shape[d]:
                    break
            if reach != size:
                return None
        dims.append(tuple(run))
        repeats.append(size if stride == 0 and size > 1 else 1)
    parts = [d for d, n in enumerate(whole.shape) if covered.get(d, 1) < n]
    if not parts:
        return (tuple(dims), tuple(repeats), None) if offset == 0 else None
    start, rest = divmod(offset, whole.stride(parts[0]))
    if len(parts) > 1 or rest:
        return None
    return tuple(dims), tuple(repeats), (parts[0], start, start + covered.get(parts[0], 1))
