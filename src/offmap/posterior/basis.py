"""Streaming second moments of what each matrix meets, and their eigenbasis.

For a parameter read by rows h: M = E[h hᵀ] = V diag(s²) Vᵀ, one per block. Eigenvectors are not continuous in M, so signs are
fixed, and what may be compared between runs is s, φ and V diag(φ²) Vᵀ, never V itself.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from offmap.model.capture import TWICE, CaptureMode, LayerInput, ParamUse
from offmap.model.forward import no_fast_path
from offmap.model.matrix_view import MatrixView, in_pieces
from offmap.random import sample

LIMIT = 4096
"""A fan-in above this gets several smaller bases instead of one."""

EXACT_ROWS, EXACT_PRODUCTS = 1 << 11, 1 << 26
"""Inputs of a matrix are all counted up to so many rows (or two for every one of its fan-in), or multiplications; of further ones
a sample stands for all."""

UNREAD = "no product with an input"
VECTOR = "a vector: nothing to rotate"
BIAS = "a bias"
OTHER = "met its inputs in other blocks than at fit time"


@dataclass
class Total:
    """Σ h hᵀ of the inputs of some output rows, (groups, pieces, d, d) in float64, and how many they were."""

    products: Tensor
    rows: int = 0


@dataclass
class Moment:
    """Uncentred second moment E[h hᵀ] of what a parameter met, per block of its rows; or `why` it has none."""

    limit: int = LIMIT
    frame: MatrixView | None = None
    bias: str | None = None
    totals: dict[tuple[int, int, int], Total] = field(default_factory=dict)  # by (start, stop, groups)
    counts: Tensor | None = None  # how often each row was looked up
    why: str = ""
    final: bool = False

    def add(self, read: ParamUse, others: int = 0) -> None:
        """Count the inputs of one read, after so many of `others`; a parameter met along two sets of axes cannot be rotated."""
        met = read.input
        clash = met is not None and self.frame is not None and self.frame != met.view
        if clash or read.final:
            self.frame, self.why, self.final = None, TWICE if clash else read.why, True
            self.totals.clear()
        self.bias = self.bias or read.bias
        if self.final or met is None:
            self.why = self.why or ("" if self.frame else read.why)
            if read.index is not None:
                seen = read.index.flatten().bincount(minlength=0 if self.counts is None else len(self.counts))
                self.counts = seen if self.counts is None else seen + F.pad(self.counts, (0, len(seen) - len(self.counts)))
            return
        self.frame, self.why = met.view, ""
        self._count(met, read.name, others)

    def _count(self, met: LayerInput, name: str, others: int) -> None:
        pieces = -(-met.view.fan_in // self.limit)
        key = (met.start, met.stop, met.groups)
        total = self.totals.get(key)
        chosen = _sample(met, name, others + (0 if total is None else total.rows))
        weight = 1.0 if chosen is None else met.count / len(chosen)
        for block in met.rows(chosen):
            rows = in_pieces(block.double(), pieces).transpose(1, 2).flatten(0, 1)  # (groups·pieces, n, d)
            total = total or Total(rows.new_zeros(met.groups, pieces, rows.shape[2], rows.shape[2]))
            total.products.flatten(0, 1).baddbmm_(rows.mT, rows, alpha=weight)
        assert total is not None
        total.rows += met.count
        self.totals[key] = total

    def blocks(self) -> tuple[int, ...]:
        """Sizes of the blocks of rows that met different inputs."""
        assert self.frame is not None
        edges = {0, self.frame.outputs}
        for start, stop, groups in self.totals:
            edges |= {start + i * (stop - start) // groups for i in range(groups + 1)}
        ordered = sorted(edges)
        return tuple(b - a for a, b in pairwise(ordered))

    def value(self, *, spent: bool = False) -> Tensor:
        """The mean of h hᵀ per block, (G, pieces, d, d); zero for rows that met nothing. `spent`: nobody will ask again."""
        blocks = self.blocks()
        if len(self.totals) == 1 and sum(blocks) == next(iter(self.totals))[1] and len(blocks) == next(iter(self.totals))[2]:
            only = next(iter(self.totals.values()))
            return only.products.div_(only.rows) if spent else only.products / only.rows
        result: list[Tensor] = []
        first = 0
        for size in blocks:
            shares = [(t.products[(first - a) * g // (b - a)], t.rows) for (a, b, g), t in self.totals.items() if a <= first < b]
            whole = sum((p for p, _ in shares), torch.zeros_like(next(iter(self.totals.values())).products[0]))
            result.append(whole / max(1, sum(n for _, n in shares)))
            first += size
        return torch.stack(result)


def _sample(met: LayerInput, name: str, before: int) -> Tensor | None:
    """Numbers of the rows to count after `before` others, None for all of them.

    Beyond the exact ones, their products cost about a thirtieth of what the forward pass itself spends on this parameter.
    """
    fan_in = met.view.fan_in
    exact = max(EXACT_ROWS, 2 * fan_in, EXACT_PRODUCTS // fan_in**2) - before
    size = max(16, exact, met.count * (met.stop - met.start) // met.groups // (64 * fan_in))
    if size >= met.count:
        return None
    return sample(met.count, size, "rows", name, before)


@dataclass(frozen=True)
class Basis:
    """Where a parameter's noise lives: columns of `matrix` (M, G, pieces, d, d) span the fan-in of each block, or None for the
    parameter's own axes.

    `amplitude` (M, G, D) is s, the root mean square of the inputs along each direction; `reach` (M, out) is the root mean square
    of what each row of the parameter makes of them, r_j = √(w̄_jᵀ M w̄_j), pieces taken as uncorrelated.
    """

    frame: MatrixView
    amplitude: Tensor
    reach: Tensor
    matrix: Tensor | None = None
    bias: str | None = None


@torch.no_grad()
def second_moments(
    net: nn.Module,
    members: Sequence[Mapping[str, Tensor]],
    inputs: Iterable[Any],
    call: Callable[..., Any],
    *,
    names: Collection[str] | None = None,
    among: Collection[str] | None = None,
    limit: int = LIMIT,
    others: Callable[[ParamUse], int] | None = None,
) -> list[dict[str, Moment]]:
    """One pass of the base models over the data: per member, the second moment of every parameter's inputs.

    `call(net, weights, x)` runs the model with one member's weights; `names` are the parameters to look at `among` those that
    are random, None for all. `others` tells how many rows other processes met before, in batches of their own.
    """
    moments: list[dict[str, Moment]] = [{} for _ in members]
    with no_fast_path:
        for x in inputs:
            for weights, found in zip(members, moments, strict=True):

                def visit(read: ParamUse, found: dict[str, Moment] = found) -> None:
                    if names is None or read.name in names:
                        found.setdefault(read.name, Moment(limit)).add(read, others(read) if others else 0)

                known = {n: w for n, w in weights.items() if among is None or n in among}
                with CaptureMode(known, visit):
                    call(net, weights, x)
    return moments


def eigenbasis(moment: Tensor) -> tuple[Tensor, Tensor]:
    """Amplitudes s (..., D), falling, and eigenvectors V (..., D, D) in columns, the largest entry of each made positive.

    >>> s, v = eigenbasis(torch.tensor([[2.0, 1.0], [1.0, 2.0]], dtype=torch.float64))
    >>> s.square()
    tensor([3.0000, 1.0000], dtype=torch.float64)
    """
    values, vectors = torch.linalg.eigh(moment)
    values, vectors = values.flip(-1), vectors.flip(-1)
    # the first among entries of nearly the largest size, so that rounding does not choose between equals
    size = vectors.abs()
    first = (size >= size.amax(-2, keepdim=True) * (1 - 1e-6)).to(torch.int8).argmax(-2, keepdim=True)
    return values.clamp_min(0).sqrt(), vectors * vectors.gather(-2, first).sign()


def build(
    moments: list[dict[str, Moment]],
    mean: Mapping[str, Tensor],
    *,
    rotated: bool,
    along: Mapping[str, Tensor] | None = None,
) -> tuple[dict[str, Basis], dict[str, str]]:
    """Bases of all members, stacked, for every parameter that some input met along known axes; for the others why not.

    Amplitudes are along the eigenvectors if `rotated`, else along the columns of `along` where it has that name, else the axes.
    """
    bases: dict[str, Basis] = {}
    why: dict[str, str] = {}
    for name, weight in mean.items():
        seen = [m[name] for m in moments if name in m]
        frames = {m.frame.cut(m.blocks()) if m.frame else None for m in seen}
        frame = frames.pop() if len(frames) == 1 and len(seen) == len(moments) else None
        if frame is None:
            why[name] = next((m.why for m in seen if m.why), TWICE if seen else VECTOR if weight.ndim == 2 else UNREAD)
            counts = [m.counts for m in seen if m.counts is not None and not m.final]
            if len(counts) == len(moments):
                bases[name] = _table(counts, weight)
            continue
        bias = seen[0].bias
        values = [m.pop(name).value(spent=True) for m in moments]  # (G, N, d, d) each
        stacked = torch.stack(values) if len(values) > 1 else values[0].unsqueeze(0)
        del seen, values
        given = (along or {}).get(name)
        if given is not None and given.shape != stacked.shape:
            why[name] = OTHER
        elif given is not None:
            bases[name] = _along(frame, stacked, weight, bias, given)
        else:
            bases[name] = _basis(frame, stacked, weight, bias, rotated=rotated)
    return bases, why


def _along(frame: MatrixView, values: Tensor, weight: Tensor, bias: str | None, matrix: Tensor) -> Basis:
    """Amplitudes along given directions: s_k² = v_kᵀ M v_k."""
    v = matrix.to(values)
    squares = ((values @ v) * v).sum(-2).flatten(2)[..., : frame.fan_in]
    return Basis(frame, squares.clamp_min(0).sqrt(), _reach(frame.rows(weight), values, frame), matrix, bias)


def _basis(frame: MatrixView, values: Tensor, weight: Tensor, bias: str | None, *, rotated: bool) -> Basis:
    pieces, fan_in = values.shape[2], frame.fan_in
    reached = _reach(frame.rows(weight), values, frame)
    if not rotated:
        amplitude = values.diagonal(dim1=-2, dim2=-1).flatten(2)[..., :fan_in].clamp_min(0).sqrt()
        return Basis(frame, amplitude, reached, bias=bias)
    amplitudes: list[Tensor] = []
    # like the scales, the bases of half-precision models are kept in float32; Vᵀ is what draws need, so that one is laid out
    matrix = torch.zeros_like(values, dtype=torch.promote_types(weight.dtype, torch.float32)).mT
    for piece in range(pieces):
        width = min(values.shape[-1], fan_in - piece * values.shape[-1])  # the last may be filled up with zeros
        s, v = eigenbasis(values[:, :, piece, :width, :width])
        matrix[:, :, piece, :width, :width] = v
        matrix[:, :, piece].diagonal(dim1=-2, dim2=-1)[..., width:] = 1
        amplitudes.append(s)
    return Basis(frame, torch.cat(amplitudes, -1), reached, matrix, bias)


def _table(counts: list[Tensor], weight: Tensor) -> Basis:
    """Of a table looked up by index: its inputs are one-hot, so V = I, and s² is how often each row is asked for.

    Every row counts half a time more than it was seen: one that never was is rare, not impossible.
    """
    rows = weight.shape[1]
    seen = torch.stack([F.pad(c, (0, rows - len(c))) for c in counts]).double() + 0.5
    shares = seen / seen.sum(1, keepdim=True)  # (M, rows)
    reach = torch.einsum("mk,mkj->mj", shares, weight.double().square().flatten(2)).sqrt()
    frame = MatrixView(tuple(weight.shape[1:]), tuple(range(1, weight.ndim - 1)), (0,), (reach.shape[1],))
    return Basis(frame, shares.sqrt().unsqueeze(1), reach)


def _reach(rows: Tensor, values: Tensor, frame: MatrixView) -> Tensor:
    """√(w̄_jᵀ M w̄_j) of every row: (M, out, D), (M, G, N, d, d) -> (M, out), a few rows at a time."""
    parts: list[Tensor] = []
    step = max(1, (1 << 19) // frame.fan_in)
    for block, moment in zip(rows.split(frame.blocks, 1), values.unbind(1), strict=True):
        for few in block.split(step, 1):
            w = in_pieces(few.double(), values.shape[2]).transpose(1, 2)  # (M, N, n, d)
            parts.append(((w @ moment) * w).sum((1, 3)))
    return torch.cat(parts, 1).clamp_min(0).sqrt()
