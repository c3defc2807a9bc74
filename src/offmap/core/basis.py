"""Streaming second moments of what each matrix meets, their eigenbasis, and the rotation of weights along the fan-in axes.

For a parameter read by rows h: M = E[h hᵀ] = V diag(s²) Vᵀ. Eigenvectors are not continuous in M, so signs are fixed, and what
may be compared between runs is s, φ and V diag(φ²) Vᵀ, never V itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from offmap.core.reads import Read, ReadWatcher, slow_attention


@dataclass
class Moment:
    """Uncentred second moment E[h hᵀ] (D, D) in float64 of the rows h that a parameter met along its fan-in `axes`."""

    axes: tuple[int, ...] = ()
    bias: str | None = None
    total: Tensor | None = None
    rows: int = 0
    why: str = ""

    def add(self, read: Read) -> None:
        """Count the rows of one read; a parameter read in two incompatible ways cannot be rotated."""
        if read.rows is None or (self.total is not None and self.axes != read.axes):
            self.total, self.why = None, read.why or "read in two ways"
        if self.why or read.rows is None:
            return
        self.axes, self.bias = read.axes, self.bias or read.bias
        for block in read.rows():
            rows = block.double()
            product = rows.mT @ rows
            self.total = product if self.total is None else self.total.add_(product)
            self.rows += rows.shape[0]

    def value(self) -> Tensor:
        """The mean of h hᵀ, (D, D)."""
        assert self.total is not None
        return self.total / max(self.rows, 1)


@dataclass(frozen=True)
class Basis:
    """Where a parameter's noise lives: columns of `matrix` (M, D, D) span the fan-in, or None for the parameter's own axes.

    `amplitude` (M, D) is s, the root mean square of the inputs along each direction; `reach` (M, out) is the root mean square
    of what each row of the parameter makes of them, r_j = √(w̄_jᵀ M w̄_j).
    """

    axes: tuple[int, ...]
    amplitude: Tensor
    reach: Tensor
    matrix: Tensor | None = None
    bias: str | None = None


@dataclass
class Reads:
    """What one pass over the data saw: a moment per parameter, by name."""

    moments: dict[str, Moment] = field(default_factory=dict)

    def visit(self, read: Read) -> None:
        """File one read under its parameter."""
        self.moments.setdefault(read.name, Moment()).add(read)


@torch.no_grad()
def second_moments(
    net: nn.Module, members: Sequence[Mapping[str, Tensor]], inputs: Iterable[Any], call: Callable[..., Any]
) -> list[dict[str, Moment]]:
    """One pass of the plain hosts over the data: per member, the second moment of every parameter's inputs.

    `call(net, weights, x)` runs the host with one member's weights.
    """
    reads = [Reads() for _ in members]
    with slow_attention():
        for x in inputs:
            for weights, seen in zip(members, reads, strict=True):
                with ReadWatcher(weights, seen.visit):
                    call(net, weights, x)
    return [seen.moments for seen in reads]


def eigenbasis(moment: Tensor) -> tuple[Tensor, Tensor]:
    """Amplitudes s (D,), falling, and eigenvectors V (D, D) in columns, the largest entry of each made positive.

    >>> s, v = eigenbasis(torch.tensor([[2.0, 1.0], [1.0, 2.0]], dtype=torch.float64))
    >>> s.square()
    tensor([3.0000, 1.0000], dtype=torch.float64)
    """
    values, vectors = torch.linalg.eigh(moment)
    values, vectors = values.flip(0), vectors.flip(1)
    # the first among entries of nearly the largest size, so that rounding does not choose between equals
    size = vectors.abs()
    first = (size >= size.amax(0) * (1 - 1e-6)).to(torch.int8).argmax(0)
    signs = vectors.gather(0, first.unsqueeze(0)).sign()
    return values.clamp_min(0).sqrt(), vectors * signs


def fan_in_last(weight: Tensor, axes: tuple[int, ...]) -> Tensor:
    """Move the fan-in axes to the end and flatten them: (L, *shape) -> (L, out, D), for any number L of leading stacks.

    >>> fan_in_last(torch.zeros(1, 5, 4, 3, 3), (1, 2, 3)).shape
    torch.Size([1, 5, 36])
    """
    shape = weight.shape[1:]
    others = [a for a in range(len(shape)) if a not in axes]
    moved = weight.permute(0, *(a + 1 for a in others), *(a + 1 for a in axes))
    return moved.reshape(weight.shape[0], -1, _size(shape, axes))


def fan_in_back(weight: Tensor, shape: torch.Size, axes: tuple[int, ...]) -> Tensor:
    """The inverse of `fan_in_last`: (L, out, D) -> (L, *shape)."""
    others = [a for a in range(len(shape)) if a not in axes]
    order = [*others, *axes]
    moved = weight.reshape(weight.shape[0], *(shape[a] for a in order))
    inverse = [order.index(a) for a in range(len(shape))]
    return moved.permute(0, *(a + 1 for a in inverse))


def rotate(delta: Tensor, matrix: Tensor, axes: tuple[int, ...]) -> Tensor:
    """Noise in the basis to noise in weights: (M, P, *shape), (M, D, D) -> (M, P, *shape), δ Vᵀ along the fan-in axes."""
    members, draws, shape = delta.shape[0], delta.shape[1], delta.shape[2:]
    flat = fan_in_last(delta.flatten(0, 1), axes).unflatten(0, (members, draws))
    # eigh returns columns; rows of the weight meet h on the right, hence Vᵀ. A draw must not depend on its company to the bit:
    # one product over many draws rounds by their number, and one with a transposed view by where the draw lies in memory
    backs = matrix.mT.contiguous()
    turned = [draw @ back for member, back in zip(flat, backs, strict=True) for draw in member]
    return fan_in_back(torch.stack(turned), shape, axes).unflatten(0, (members, draws))


def build(moments: list[dict[str, Moment]], mean: Mapping[str, Tensor], *, rotated: bool) -> dict[str, Basis]:
    """Bases of all members, stacked: one entry for every parameter that some input met along known axes."""
    bases: dict[str, Basis] = {}
    for name, weight in mean.items():
        seen = [m[name] for m in moments if name in m and m[name].total is not None]
        if len(seen) < len(moments):
            continue
        axes = seen[0].axes
        values = torch.stack([m.value() for m in seen])
        rows = fan_in_last(weight.double(), axes)
        reach = torch.einsum("mod,mde,moe->mo", rows, values, rows).clamp_min(0).sqrt()
        basis = Basis(axes, values.diagonal(dim1=1, dim2=2).clamp_min(0).sqrt(), reach, bias=seen[0].bias)
        if rotated:
            pairs = [eigenbasis(v) for v in values]
            # like the scales, the bases of half-precision hosts are kept in float32
            matrix = torch.stack([v for _, v in pairs]).to(torch.promote_types(weight.dtype, torch.float32))
            basis = replace(basis, amplitude=torch.stack([s for s, _ in pairs]), matrix=matrix)
        bases[name] = basis
    return bases


def _size(shape: torch.Size, axes: tuple[int, ...]) -> int:
    return int(torch.Size([shape[a] for a in axes]).numel())
