"""The pass over the data that finds the bases: second moments of layer inputs, streaming, and their eigenvectors.

For a parameter with layer inputs h: E[h hᵀ] = V diag(s²) Vᵀ, one per block. Eigenvectors are not continuous in the moment, so
signs are fixed, and what may be compared between runs is s, φ and V diag(φ²) Vᵀ, never V itself. Every rank of several ends with
the same bases, to the bit: ranks reduce sums, and one rank makes each basis and sends it to the others.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from offmap._types import Inputs, Weights
from offmap.data.batch import rows_of, take_rows
from offmap.distributed.group import SINGLE_PROCESS, Group
from offmap.model.capture import TWICE, CaptureMode, LayerInput, ParamUse
from offmap.model.forward import MODEL_ERRORS, OutputFn, call, first_tensor, model_failed, no_fast_path
from offmap.model.matrix_view import MatrixView, in_pieces
from offmap.model.params import StackedModel
from offmap.random import sample

logger: logging.Logger = logging.getLogger("offmap")

LIMIT = 4096
"""A fan-in above this gets several smaller bases instead of one."""

EXACT_ROWS, EXACT_PRODUCTS = 1 << 11, 1 << 26
"""All layer inputs count up to so many rows (or two for each input of the fan-in) or multiplications; then a sample of them."""

MOMENT_NUMBERS = 1 << 24
"""Numbers of all second moments that are held at a time (128 MB)."""

ACTIVATIONS, MOST_ROWS, PLAN_ROWS = 1 << 20, 1 << 12, 32
"""Numbers in the widest activation, and rows, of one batch of the pass over the data, where its size is free; so many tell."""

Feed: TypeAlias = Callable[[int], Iterable[Any]]
"""The data's inputs in batches, of about so many rows where that can be chosen; may be asked several times."""


@dataclass(frozen=True)
class Rotation:
    """The bases V (M, G, N, d, d) of rotated parameters and how each is cut, by name; for the others why they are not."""

    matrices: Weights = field(default_factory=dict)
    views: dict[str, MatrixView] = field(default_factory=dict)
    why: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Basis:
    """Where a parameter's noise lives."""

    view: MatrixView
    input_rms: Tensor  # (M, G, D), s: the root mean square of the inputs along each direction
    output_rms: Tensor  # (M, out), √(w̄_jᵀ E[h hᵀ] w̄_j): of what each row makes of them, pieces taken as uncorrelated
    matrix: Tensor | None = None  # (M, G, pieces, d, d), whose columns span the fan-in of each block; None for the axes
    bias: str | None = None


@dataclass(frozen=True)
class Observed:
    """Bases by parameter, and why the others have none."""

    bases: dict[str, Basis] = field(default_factory=dict)
    why: dict[str, str] = field(default_factory=dict)

    def rotation(self) -> Rotation:
        """Return the part of it that the equation needs."""
        matrices = {n: b.matrix for n, b in self.bases.items() if b.matrix is not None}
        return Rotation(matrices, {n: self.bases[n].view for n in matrices}, self.why)


def observe(
    models: StackedModel,
    feed: Feed,
    *,
    rotated: bool,
    along: Mapping[str, Tensor] | None = None,
    output_fn: OutputFn = first_tensor,
    limit: int = LIMIT,
    group: Group = SINGLE_PROCESS,
    shard: Feed | None = None,
) -> Observed:
    """Pass the data through every member: how large each parameter's inputs are, and along which directions.

    `feed` is gone through once per group of parameters whose moments are held at a time, mostly once. Directions are the
    eigenvectors of the second moments if `rotated`, else those given by name in `along` (M, G, N, d, d), else the axes. Several
    processes of a `group` each go through their `shard`, and all see the same in the end.
    """
    members = [models.weights(m) for m in range(models.members)]
    observed = Observed()
    plan, rows = plan_pass(models, members, take_rows(next(iter(feed(1))), slice(0, PLAN_ROWS)), output_fn, limit)
    for names in group.all_gather_object(plan)[0]:
        moments = second_moments(
            models.module, members, (shard or feed)(rows), output_fn, names=names, among=models.mean, limit=limit, group=group
        )
        if group.size > 1:
            reduce_moments(moments, group, models.device)
        bases, why = _build_on_ranks(moments, {n: models.mean[n] for n in names}, group, rotated=rotated, along=along)
        observed.bases.update(bases)
        observed.why.update(why)
    observed.why.update({b.bias: "a bias, nothing to rotate" for b in observed.bases.values() if b.bias in observed.why})
    large = [f"`{n}` ({b.view.fan_in:,})" for n, b in observed.bases.items() if rotated and b.view.fan_in > limit]
    if large:
        logger.warning(
            "A basis for the whole fan-in of %s would be larger than `fan_in_limit` = %d: each gets several smaller ones, which "
            "do not see correlations between them.", ", ".join(large), limit,
        )  # fmt: skip
    return observed if rotated or along is not None else replace(observed, why={})  # nobody asked for a rotation


# ------------------------------------------------------------------------------------------------------------ moments


@dataclass
class Total:
    """Σ h hᵀ of the inputs of some output rows, (groups, pieces, d, d) in float64; how many they are, and were at `first`."""

    products: Tensor
    rows: int = 0
    first: int = 0


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
    group: Group = SINGLE_PROCESS

    def add(self, use: ParamUse) -> None:
        """Count the inputs of one use; a parameter used along two sets of axes cannot be rotated."""
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
        pieces = -(-h.view.fan_in // self.limit)
        key = (h.start, h.stop, h.groups)
        total = self.totals.get(key)
        # other processes count rows too, in batches of their own: so this one samples those that one alone would
        before = self.group.size * total.rows + self.group.rank * total.first if total else self.group.rank * h.count
        chosen = _sample_rows(h, use.name, before)
        weight = 1.0 if chosen is None else h.count / len(chosen)
        for block in h.rows(chosen):
            rows = in_pieces(block.double(), pieces).transpose(1, 2).flatten(0, 1)  # (groups·pieces, n, d)
            total = total or Total(rows.new_zeros(h.groups, pieces, rows.shape[2], rows.shape[2]), first=h.count)
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
    """Choose the rows to count after `before` others, None for all of them."""
    fan_in = h.view.fan_in
    # beyond the exact ones, their products cost about a thirtieth of what the forward pass itself spends on this parameter
    exact = max(EXACT_ROWS, 2 * fan_in, EXACT_PRODUCTS // fan_in**2) - before
    size = max(16, exact, h.count * (h.stop - h.start) // h.groups // (64 * fan_in))
    return None if size >= h.count else sample(h.count, size, "rows", name, before)


@torch.no_grad()
def second_moments(
    module: nn.Module,
    members: Sequence[Mapping[str, Tensor]],
    inputs: Iterable[Inputs],
    output_fn: OutputFn = first_tensor,
    *,
    names: Collection[str] | None = None,
    among: Collection[str] | None = None,
    limit: int = LIMIT,
    group: Group = SINGLE_PROCESS,
) -> list[dict[str, Moment]]:
    """Run the members over the data once; return per member the second moment of every parameter's layer inputs.

    `names` are counted; `among` are random, so that copies stand for them. None is all.
    """
    moments: list[dict[str, Moment]] = [{} for _ in members]
    for x in inputs:
        for weights, counted in zip(members, moments, strict=True):
            _run(
                module, weights, {n: w for n, w in weights.items() if among is None or n in among}, x, output_fn,
                lambda use, counted=counted: counted.setdefault(use.name, Moment(limit, group=group)).add(use)
                if names is None or use.name in names else None,
            )  # fmt: skip
    return moments


def _run(
    module: nn.Module, weights: Mapping[str, Tensor], watched: Mapping[str, Tensor], x: Inputs, output_fn: OutputFn,
    visit: Callable[[ParamUse], None],
) -> int:  # fmt: skip
    """Call the model, show `visit` every use of the watched weights, and return the numbers of the widest activation."""
    with no_fast_path, CaptureMode(watched, visit) as mode:
        try:
            call(module, weights, x, output_fn)
        except MODEL_ERRORS as error:
            raise model_failed(module, x, error) from error
    return mode.widest


@torch.no_grad()
def plan_pass(
    models: StackedModel, members: Sequence[Weights], first: Inputs, output_fn: OutputFn, limit: int
) -> tuple[list[list[str]], int]:
    """Group parameters, largest first, whose moments fit in memory together; and choose rows whose activations stay small."""
    sizes = dict.fromkeys(models.mean, 0)

    def visit(use: ParamUse) -> None:
        if use.input is not None and use.name in sizes:
            fan_in = use.input.view.fan_in
            blocks = use.input.groups * -(-fan_in // limit)
            sizes[use.name] = max(sizes[use.name], blocks * min(fan_in, limit) ** 2 * len(members))

    widest = _run(models.module, members[0], {n: members[0][n] for n in models.mean}, first, output_fn, visit)
    groups: list[list[str]] = [[]]
    room = MOMENT_NUMBERS
    for name in sorted(sizes, key=lambda n: -sizes[n]):
        if sizes[name] > room and groups[-1]:
            groups.append([])
            room = MOMENT_NUMBERS
        groups[-1].append(name)
        room -= sizes[name]
    return groups, min(MOST_ROWS, ACTIVATIONS * rows_of(first) // max(1, widest))


# -------------------------------------------------------------------------------------------------------------- bases


def eigenbasis(moment: Tensor) -> tuple[Tensor, Tensor]:
    """Return s (..., D), falling, and eigenvectors V (..., D, D) in columns, the largest entry of each made positive."""
    values, vectors = torch.linalg.eigh(moment)
    values, vectors = values.flip(-1), vectors.flip(-1)
    # the first among entries of nearly the largest size, so that rounding does not choose between equals
    size = vectors.abs()
    first = (size >= size.amax(-2, keepdim=True) * (1 - 1e-6)).to(torch.int8).argmax(-2, keepdim=True)
    return values.clamp_min(0).sqrt(), vectors * vectors.gather(-2, first).sign()


def build_bases(
    moments: list[dict[str, Moment]], mean: Mapping[str, Tensor], *, rotated: bool, along: Mapping[str, Tensor] | None = None
) -> tuple[dict[str, Basis], dict[str, str]]:
    """Build the bases of all members, stacked, of parameters with inputs along known axes; say why not for the others."""
    bases: dict[str, Basis] = {}
    why: dict[str, str] = {}
    for name, weight in mean.items():
        uses = [m[name] for m in moments if name in m]
        views = {replace(m.view, blocks=m.blocks()) if m.view else None for m in uses}
        view = views.pop() if len(views) == 1 and len(uses) == len(moments) else None
        if view is None:
            unread = "a vector: nothing to rotate" if weight.ndim == 2 else "no product with an input"
            why[name] = next((m.why for m in uses if m.why), TWICE if uses else unread)
            counts = [m.counts for m in uses if m.counts is not None and not m.final]
            if len(counts) == len(moments):
                bases[name] = _table_basis(counts, weight)
            continue
        bias = uses[0].bias
        values = [m.pop(name).value(consume=True) for m in moments]  # (G, N, d, d) each; taken out, for they are large
        stacked = torch.stack(values) if len(values) > 1 else values[0].unsqueeze(0)
        del uses, values
        given = (along or {}).get(name)
        if given is not None and given.shape != stacked.shape:
            why[name] = "had its inputs in other blocks than at fit time"
            continue
        # like the scales, the bases of half-precision models are kept in float32
        dtype = torch.promote_types(weight.dtype, torch.float32)
        input_rms, matrix = _directions(stacked, view.fan_in, dtype, given, rotated)
        bases[name] = Basis(view, input_rms, _output_rms(view.rows(weight), stacked, view), matrix, bias)
    return bases, why


def _directions(moment: Tensor, fan_in: int, dtype: torch.dtype, given: Tensor | None, rotated: bool) -> tuple[Tensor, Any]:
    """S (M, G, D) along the given directions, the eigenvectors or the axes, and those directions."""
    if given is not None:
        v = given.to(moment)
        squares = ((moment @ v) * v).sum(-2).flatten(2)[..., :fan_in]  # s_k² = v_kᵀ M v_k
        return squares.clamp_min(0).sqrt(), given
    if not rotated:
        return moment.diagonal(dim1=-2, dim2=-1).flatten(2)[..., :fan_in].clamp_min(0).sqrt(), None
    parts: list[Tensor] = []
    matrix = torch.zeros_like(moment, dtype=dtype).mT  # Vᵀ is what draws need: that one lies in one piece
    for piece in range(moment.shape[2]):
        width = min(moment.shape[-1], fan_in - piece * moment.shape[-1])  # the last may be filled up with zeros
        s, v = eigenbasis(moment[:, :, piece, :width, :width])
        matrix[:, :, piece, :width, :width] = v
        matrix[:, :, piece].diagonal(dim1=-2, dim2=-1)[..., width:] = 1
        parts.append(s)
    return torch.cat(parts, -1), matrix


def _table_basis(counts: list[Tensor], weight: Tensor) -> Basis:
    """The basis of a table looked up by index: its inputs are one-hot, so V = I, and s² is how often each row is asked for."""
    # half a time more than it was asked for: a row that never was is rare, not impossible
    totals = torch.stack([F.pad(c, (0, weight.shape[1] - len(c))) for c in counts]).double() + 0.5
    shares = totals / totals.sum(1, keepdim=True)  # (M, rows)
    output_rms = torch.einsum("mk,mkj->mj", shares, weight.double().square().flatten(2)).sqrt()
    view = MatrixView(tuple(weight.shape[1:]), tuple(range(1, weight.ndim - 1)), (0,), (output_rms.shape[1],))
    return Basis(view, shares.sqrt().unsqueeze(1), output_rms)


def _output_rms(rows: Tensor, moments: Tensor, view: MatrixView) -> Tensor:
    """√(w̄_jᵀ E[h hᵀ] w̄_j) of every row: (M, out, D), (M, G, N, d, d) -> (M, out), a few rows at a time."""
    parts: list[Tensor] = []
    for block, moment in zip(rows.split(view.blocks, 1), moments.unbind(1), strict=True):
        for few in block.split(max(1, (1 << 19) // view.fan_in), 1):
            w = in_pieces(few.double(), moments.shape[2]).transpose(1, 2)  # (M, N, n, d)
            parts.append(((w @ moment) * w).sum((1, 3)))
    return torch.cat(parts, 1).clamp_min(0).sqrt()


# -------------------------------------------------------------------------------------------------- several processes


def reduce_moments(moments: Sequence[dict[str, Moment]], group: Group, device: torch.device) -> None:
    """Add up what all ranks counted, in place: per member, {name: Moment}."""
    for member in moments:
        described: list[dict[str, Any]] = group.all_gather_object(
            {
                name: {
                    "view": m.view and asdict(m.view), "bias": m.bias, "why": m.why, "final": m.final, "limit": m.limit,
                    "counts": None if m.counts is None else len(m.counts),
                    "totals": [[*key, total.rows, *total.products.shape] for key, total in m.totals.items()],
                }
                for name, m in member.items()
            }
        )  # fmt: skip
        # all ranks go through all names in one order: whoever has none of one adds nothing
        for name in dict.fromkeys(name for ranks in described for name in ranks):
            member[name] = _reduce(member.get(name) or Moment(), [r[name] for r in described if name in r], group, device)


def _reduce(mine: Moment, ranks: list[dict[str, Any]], group: Group, device: torch.device) -> Moment:
    """One moment as if a single process had added all uses: with two sets of axes, it cannot be rotated."""
    views = [_view(rank["view"]) for rank in ranks if rank["view"]]
    final = next((rank["why"] for rank in ranks if rank["final"]), TWICE if any(v != views[0] for v in views[1:]) else None)
    merged = Moment(ranks[0]["limit"], bias=next((rank["bias"] for rank in ranks if rank["bias"]), None))
    if final is not None:
        merged.why, merged.final = final, True
    elif not views:
        merged.why = next((rank["why"] for rank in ranks if rank["why"]), "")
    else:
        merged.view = views[0]
        for start, stop, groups, rows, *shape in (total for rank in ranks for total in rank["totals"]):
            key = (start, stop, groups)
            if key not in merged.totals:
                local = mine.totals.get(key)
                merged.totals[key] = Total(local.products if local else torch.zeros(shape, dtype=torch.float64, device=device))
                group.all_reduce(merged.totals[key].products)
            merged.totals[key].rows += rows
    length = max((rank["counts"] for rank in ranks if rank["counts"] is not None), default=None)
    if length is not None:
        counts = torch.zeros(0, dtype=torch.int64, device=device) if mine.counts is None else mine.counts
        merged.counts = F.pad(counts, (0, length - len(counts)))
        group.all_reduce(merged.counts)
    return merged


def _build_on_ranks(
    moments: list[dict[str, Moment]], mean: Mapping[str, Tensor], group: Group, **options: Any
) -> tuple[dict[str, Basis], dict[str, str]]:
    """Do as `build_bases`, each parameter on one rank: the widest first, in turn, so that all have as much to do."""
    bases, why = build_bases(moments, dict(list(mean.items())[group.rank :: group.size]), **options)
    if group.size == 1:
        return bases, why
    parts = {n: [t for t in (b.input_rms, b.output_rms, b.matrix) if t is not None] for n, b in bases.items()}
    headers = group.all_gather_object([[[n, asdict(b.view), b.bias, len(parts[n])] for n, b in bases.items()], why])
    tensors = group.all_gather([t for part in parts.values() for t in part])
    for (header, reasons), sent in zip(headers, tensors, strict=True):
        source = iter(sent)
        for name, view, bias, count in header:
            fields = [next(source).to(mean[name].device) for _ in range(count)]
            bases[name] = Basis(_view(view), *fields, bias=bias)
        why |= reasons
    return {n: bases[n] for n in mean if n in bases}, {n: why[n] for n in mean if n in why}


def _view(state: Mapping[str, Sequence[int]]) -> MatrixView:
    return MatrixView(**{field: tuple(numbers) for field, numbers in state.items()})
