"""How a parameter stands to its inputs: which of its axes they run along, and how it is cut into blocks.

A frame turns a parameter of any layout into a matrix (out, D), whose rows each meet an input h of D numbers, and back. Rows are
cut into blocks that meet different inputs (groups of a convolution, the parts of a packed projection); columns into pieces, when
one basis for the whole fan-in would be too large.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class MatrixView:
    """Seen under the shape `view`, a parameter has fan-in `axes`, and output axes `outs` whose rows are cut in `blocks`.

    >>> frame = MatrixView(view=(6, 4, 3, 3), outs=(0,), axes=(1, 2, 3), blocks=(3, 3))  # two groups
    >>> frame.outputs, frame.fan_in, frame.rows(torch.zeros(1, 6, 4, 3, 3)).shape
    (6, 36, torch.Size([1, 6, 36]))
    """

    view: tuple[int, ...]
    outs: tuple[int, ...]
    axes: tuple[int, ...]
    blocks: tuple[int, ...] = ()

    @property
    def outputs(self) -> int:
        """How many rows there are."""
        return math.prod(self.view[a] for a in self.outs)

    @property
    def fan_in(self) -> int:
        """D."""
        return math.prod(self.view[a] for a in self.axes)

    def cut(self, blocks: tuple[int, ...]) -> MatrixView:
        """The same frame with its rows cut into blocks of these sizes."""
        return replace(self, blocks=blocks)

    @cached_property
    def in_order(self) -> bool:
        """Whether outputs come before inputs, as almost always: then a matrix is only another view."""
        return (*self.outs, *self.axes) == tuple(range(len(self.view)))

    def rows(self, weight: Tensor) -> Tensor:
        """The parameter as matrices, for any number L of them: (L, *shape) -> (L, out, D)."""
        if self.in_order:
            return weight.reshape(weight.shape[0], self.outputs, self.fan_in)
        order = (*self.outs, *self.axes)
        seen = weight.reshape(weight.shape[0], *self.view)
        return seen.permute(0, *(a + 1 for a in order)).reshape(weight.shape[0], self.outputs, self.fan_in)

    def back(self, rows: Tensor, shape: torch.Size) -> Tensor:
        """The inverse of `rows`: (L, out, D) -> (L, *shape)."""
        if self.in_order:
            return rows.reshape(rows.shape[0], *shape)
        order = (*self.outs, *self.axes)
        seen = rows.reshape(rows.shape[0], *(self.view[a] for a in order))
        inverse = [order.index(a) for a in range(len(order))]
        return seen.permute(0, *(a + 1 for a in inverse)).reshape(rows.shape[0], *shape)

    def per_row(self, values: Tensor) -> Tensor:
        """What is known of each block, told to each of its rows: (M, G, D) -> (M, out, D)."""
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


def rotate(delta: Tensor, matrix: Tensor, frame: MatrixView) -> Tensor:
    """Noise in the basis to noise in weights: (M, P, *shape), (M, G, N, d, d) -> (M, P, *shape), δ Vᵀ block by block."""
    members, draws, shape = delta.shape[0], delta.shape[1], delta.shape[2:]
    flat = frame.rows(delta.flatten(0, 1))
    # eigh returns columns; rows of the weight meet h on the right, hence Vᵀ. A draw must not depend on its company to the bit:
    # one product over many draws rounds by their number, and one with a transposed view by where the draw lies in memory
    backs = matrix.mT.contiguous()
    if delta.requires_grad and backs.shape[1:3] == (1, 1):  # a step of a fit, always in the same company: one product is faster
        turned = torch.bmm(flat.reshape(members, -1, frame.fan_in), backs[:, 0, 0]).view(flat.shape)
    else:
        apart = flat.unflatten(0, (members, draws))
        each = [_turn(draw, back, frame.blocks) for member, back in zip(apart, backs, strict=True) for draw in member]
        turned = each[0].unsqueeze(0) if len(each) == 1 else torch.stack(each)  # large models draw one at a time: no copy
    return frame.back(turned, shape).unflatten(0, (members, draws))


def _turn(rows: Tensor, back: Tensor, blocks: tuple[int, ...]) -> Tensor:
    """One draw: (out, D), (G, N, d, d) -> (out, D)."""
    groups, pieces = back.shape[:2]
    if groups == pieces == 1:
        return rows @ back[0, 0]
    if pieces == 1 and len(set(blocks)) == 1:
        return (rows.unflatten(0, (groups, -1)) @ back[:, 0]).flatten(0, 1)
    result, width, start = torch.empty_like(rows), back.shape[-1], 0
    for size, own in zip(blocks, back, strict=True):
        for first, v in zip(range(0, rows.shape[1], width), own, strict=True):
            place = (slice(start, start + size), slice(first, first + width))
            part = rows[place]  # the last piece may be narrower than its basis
            result[place] = part @ v[: part.shape[1], : part.shape[1]]
        start += size
    return result
