"""Second moments of layer inputs, streaming, and their eigenbasis.

For a parameter with layer inputs h: E[h hᵀ] = V diag(s²) Vᵀ, one per block. Eigenvectors are not continuous in the moment, so
signs are fixed, and what may be compared between runs is s, φ and V diag(φ²) Vᵀ, never V itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from offmap._types import Weights
from offmap.model.capture import TWICE, LayerInput, ParamUse
from offmap.model.matrix_view import MatrixView, in_pieces
from offmap.random import sample

LIMIT = 4096
"""A fan-in above this gets several smaller bases instead of one."""

EXACT_ROWS, EXACT_PRODUCTS = 1 << 11, 1 << 26
"""All layer inputs count up to so many rows (or two for each input of the fan-in) or multiplications; a sample stands for
further ones."""

UNREAD = "no product with an input"
VECTOR = "a vector: nothing to rotate"
OTHER = "met its inputs in other blocks than at fit time"


@dataclass(frozen=True)
class Rotation:
    """The bases V (M, G, N, d, d) of rotated parameters and how each is cut, by name; for the others why they are not."""

    matrices: Weights = field(default_factory=dict)
    views: dict[str, MatrixView] = field(default_factory=dict)
    why: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Basis:
    """Where a parameter's noise lives: columns of `matrix` (M, G, pieces, d, d) span the fan-in of each block, or None for the
    parameter's own axes.

    `input_rms` (M, G, D) is s, the root mean square of the inputs along each direction; `output_rms` (M, out) that of what
    each row of the parameter makes of them, √(w̄_jᵀ E[h hᵀ] w̄_j), pieces taken as uncorrelated.
    """

    view: MatrixView
    input_rms: Tensor
    output_rms: Tensor
    matrix: Tensor | None = None
    bias: str | None = None


@dataclass
class Total:
    """Σ h hᵀ of the inputs of some output rows, (groups, pieces, d, d) in float64, and how many they were."""

    products: Tensor
    rows: int = 0


@dataclass
class Moment:
    """Uncentred second moment E[h hᵀ] of a parameter's layer inputs, per block of its rows; or `why` it has none."""

    limit: int = LIMIT
    view: MatrixView | None = None
    bias: str | None = None
    totals: dict[tuple[int, int, int], Total] = field(default_factory=dict)  # by (start, stop, groups)
    counts: Tensor | None = None  # how often each row was looked up
    why: str = ""
    final: bool = False

    def add(self, use: ParamUse, others: int = 0) -> None:
        """Count the inputs of one use, after so many of `others`; a parameter used along two sets of axes cannot be rotated."""
        h = use.input
        clash = h is not None and self.view is not None and self.view != h.view
        if clash or use.final:
            self.view, self.why, self.final = None, TWICE if clash else use.why, True
            self.totals.clear()
        self.bias = self.bias or use.bias
        if self.final or h is None:
            self.why = self.why or ("" if self.view else use.why)
            if use.index is not None:
                counts = use.index.flatten().bincount(minlength=0 if self.counts is None else len(self.counts))
                self.counts = counts if self.counts is None else counts + F.pad(self.counts, (0, len(counts) - len(self.counts)))
            return
        self.view, self.why = h.view, ""
        self._count(h, use.name, others)

    def _count(self, h: LayerInput, name: str, others: int) -> None:
        pieces = -(-h.view.fan_in // self.limit)
        key = (h.start, h.stop, h.groups)
        total = self.totals.get(key)
        chosen = _sample_rows(h, name, others + (0 if total is None else total.rows))
        weight = 1.0 if chosen is None else h.count / len(chosen)
        for block in h.rows(chosen):
            rows = in_pieces(block.double(), pieces).transpose(1, 2).flatten(0, 1)  # (groups·pieces, n, d)
            total = total or Total(rows.new_zeros(h.groups, pieces, rows.shape[2], rows.shape[2]))
            total.products.flatten(0, 1).baddbmm_(rows.mT, rows, alpha=weight)
        assert total is not None
        total.rows += h.count
        self.totals[key] = total

    def blocks(self) -> tuple[int, ...]:
        """Return the sizes of the blocks of rows that have different inputs."""
        assert self.view is not None
        edges = {0, self.view.outputs}
        for start, stop, groups in self.totals:
            edges |= {start + i * (stop - start) // groups for i in range(groups + 1)}
        return tuple(b - a for a, b in pairwise(sorted(edges)))

    def value(self, *, consume: bool = False) -> Tensor:
        """Return the mean of h hᵀ per block, (G, pieces, d, d); zero for rows without inputs. `consume`: it is the last call."""
        blocks = self.blocks()
        (_, stop, groups), only = next(iter(self.totals.items()))
        if len(self.totals) == 1 and sum(blocks) == stop and len(blocks) == groups:
            return only.products.div_(only.rows) if consume else only.products / only.rows
        result: list[Tensor] = []
        first = 0
        for size in blocks:
            shares = [(t.products[(first - a) * g // (b - a)], t.rows) for (a, b, g), t in self.totals.items() if a <= first < b]
            total = sum((p for p, _ in shares), torch.zeros_like(only.products[0]))
            result.append(total / max(1, sum(n for _, n in shares)))
            first += size
        return torch.stack(result)


def _sample_rows(h: LayerInput, name: str, before: int) -> Tensor | None:
    """Numbers of the rows to count after `before` others, None for all of them.

    Beyond the exact ones, their products cost about a thirtieth of what the forward pass itself spends on this parameter.
    """
    fan_in = h.view.fan_in
    exact = max(EXACT_ROWS, 2 * fan_in, EXACT_PRODUCTS // fan_in**2) - before
    size = max(16, exact, h.count * (h.stop - h.start) // h.groups // (64 * fan_in))
    return None if size >= h.count else sample(h.count, size, "rows", name, before)


def eigenbasis(moment: Tensor) -> tuple[Tensor, Tensor]:
    """Return s (..., D), falling, and eigenvectors V (..., D, D) in columns, the largest entry of each made positive.

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


def build_bases(
    moments: list[dict[str, Moment]], mean: Mapping[str, Tensor], *, rotated: bool, along: Mapping[str, Tensor] | None = None
) -> tuple[dict[str, Basis], dict[str, str]]:
    """Build the bases of all members, stacked, for every parameter with inputs along known axes; for the others say why not.

    Args:
        moments: Per member, {name: Moment}; those that are used are taken out, for they are large.
        mean: w̄, {name: (M, ...)}.
        rotated: Directions are the eigenvectors; else those of `along`, else the axes.
        along: Given directions (M, G, N, d, d), by name.
    """
    bases: dict[str, Basis] = {}
    why: dict[str, str] = {}
    for name, weight in mean.items():
        uses = [m[name] for m in moments if name in m]
        views = {m.view.cut(m.blocks()) if m.view else None for m in uses}
        view = views.pop() if len(views) == 1 and len(uses) == len(moments) else None
        if view is None:
            why[name] = next((m.why for m in uses if m.why), TWICE if uses else VECTOR if weight.ndim == 2 else UNREAD)
            counts = [m.counts for m in uses if m.counts is not None and not m.final]
            if len(counts) == len(moments):
                bases[name] = _table_basis(counts, weight)
            continue
        bias = uses[0].bias
        values = [m.pop(name).value(consume=True) for m in moments]  # (G, N, d, d) each
        stacked = torch.stack(values) if len(values) > 1 else values[0].unsqueeze(0)
        del uses, values
        given = (along or {}).get(name)
        if given is not None and given.shape != stacked.shape:
            why[name] = OTHER
        else:
            input_rms, matrix = _directions(stacked, view.fan_in, weight.dtype, given, rotated)
            bases[name] = Basis(view, input_rms, _output_rms(view.rows(weight), stacked, view), matrix, bias)
    return bases, why


def _directions(
    moment: Tensor, fan_in: int, dtype: torch.dtype, given: Tensor | None, rotated: bool
) -> tuple[Tensor, Tensor | None]:
    """S (M, G, D) along the given directions, the eigenvectors or the axes, and those directions."""
    if given is not None:
        v = given.to(moment)
        squares = ((moment @ v) * v).sum(-2).flatten(2)[..., :fan_in]  # s_k² = v_kᵀ M v_k
        return squares.clamp_min(0).sqrt(), given
    if not rotated:
        return moment.diagonal(dim1=-2, dim2=-1).flatten(2)[..., :fan_in].clamp_min(0).sqrt(), None
    parts: list[Tensor] = []
    # like the scales, the bases of half-precision models are kept in float32; Vᵀ is what draws need, so that one is laid out
    matrix = torch.zeros_like(moment, dtype=torch.promote_types(dtype, torch.float32)).mT
    for piece in range(moment.shape[2]):
        width = min(moment.shape[-1], fan_in - piece * moment.shape[-1])  # the last may be filled up with zeros
        s, v = eigenbasis(moment[:, :, piece, :width, :width])
        matrix[:, :, piece, :width, :width] = v
        matrix[:, :, piece].diagonal(dim1=-2, dim2=-1)[..., width:] = 1
        parts.append(s)
    return torch.cat(parts, -1), matrix


def _table_basis(counts: list[Tensor], weight: Tensor) -> Basis:
    """The basis of a table looked up by index: its inputs are one-hot, so V = I, and s² is how often each row is asked for.

    Every row counts half a time more than it was asked for: one that never was is rare, not impossible.
    """
    rows = weight.shape[1]
    totals = torch.stack([F.pad(c, (0, rows - len(c))) for c in counts]).double() + 0.5
    shares = totals / totals.sum(1, keepdim=True)  # (M, rows)
    output_rms = torch.einsum("mk,mkj->mj", shares, weight.double().square().flatten(2)).sqrt()
    view = MatrixView(tuple(weight.shape[1:]), tuple(range(1, weight.ndim - 1)), (0,), (output_rms.shape[1],))
    return Basis(view, shares.sqrt().unsqueeze(1), output_rms)


def _output_rms(rows: Tensor, moments: Tensor, view: MatrixView) -> Tensor:
    """√(w̄_jᵀ E[h hᵀ] w̄_j) of every row: (M, out, D), (M, G, N, d, d) -> (M, out), a few rows at a time."""
    parts: list[Tensor] = []
    step = max(1, (1 << 19) // view.fan_in)
    for block, moment in zip(rows.split(view.blocks, 1), moments.unbind(1), strict=True):
        for few in block.split(step, 1):
            w = in_pieces(few.double(), moments.shape[2]).transpose(1, 2)  # (M, N, n, d)
            parts.append(((w @ moment) * w).sum((1, 3)))
    return torch.cat(parts, 1).clamp_min(0).sqrt()
