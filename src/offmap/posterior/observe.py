"""The pass over the data that finds the bases: planned on one batch, gone through once, shared between processes.

Every rank ends with the same moments and bases, to the bit: ranks reduce sums, and one rank makes each basis and sends it to
the others.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from offmap._types import Inputs, Weights
from offmap.data.batch import rows_of
from offmap.distributed.group import SINGLE_PROCESS, Group
from offmap.model.capture import TWICE, CaptureMode, ParamUse
from offmap.model.forward import MODEL_ERRORS, OutputFn, call, first_tensor, model_failed, no_fast_path
from offmap.model.matrix_view import MatrixView
from offmap.model.params import StackedModel
from offmap.posterior.basis import LIMIT, Basis, Moment, Rotation, Total, build_bases

logger = logging.getLogger("offmap")

MOMENT_NUMBERS = 1 << 24
"""Numbers of all second moments that are held at a time (128 MB)."""

ACTIVATIONS, MOST_ROWS = 1 << 20, 1 << 12
"""Numbers in the widest activation, and rows, of one batch of the pass over the data, where its size is free."""

BIAS = "a bias"

Feed: TypeAlias = Callable[[int], Iterable[Any]]
"""The data's inputs in batches, of about so many rows where that can be chosen; may be asked several times."""

Part: TypeAlias = tuple[str, int, int, int]
"""A part of a parameter with inputs of its own: name, first and last row, groups."""


@dataclass(frozen=True)
class ShardedFeed:
    """The processes that go through the data together, and this one's batches: `feed(rows)` gives inputs, and how many rows the
    others have before each.
    """

    group: Group
    feed: Callable[[int], Iterable[tuple[Any, int]]]


@dataclass(frozen=True)
class Observed:
    """Bases by parameter, and why the others have none."""

    bases: dict[str, Basis] = field(default_factory=dict)
    why: dict[str, str] = field(default_factory=dict)

    def rotation(self) -> Rotation:
        """Return the part of it that the equation needs."""
        matrices = {n: b.matrix for n, b in self.bases.items() if b.matrix is not None}
        return Rotation(matrices, {n: self.bases[n].view for n in matrices}, self.why)


@dataclass(frozen=True)
class Plan:
    """How the data are gone through: groups of parameters, largest first, whose moments fit in memory together; rows whose
    activations stay small; and how many layer inputs each part of a parameter has per row of the data.
    """

    names: list[list[str]]
    rows: int
    rates: dict[Part, float]


def observe(
    models: StackedModel,
    feed: Feed,
    *,
    rotated: bool,
    along: Mapping[str, Tensor] | None = None,
    output_fn: OutputFn = first_tensor,
    limit: int = LIMIT,
    shards: ShardedFeed | None = None,
) -> Observed:
    """Pass the data through every member: how large each parameter's inputs are, and along which directions.

    Args:
        models: The members.
        feed: The data; gone through once per group of parameters whose moments are held at a time, mostly once.
        rotated: Directions are the eigenvectors of the second moments; else those of `along`, else the parameter's axes.
        along: Given directions (M, G, N, d, d), by name.
        output_fn: Picks the tensor that matters of what a model returns.
        limit: A larger fan-in gets several smaller bases.
        shards: This process's batches, where several go through the data together; all see the same in the end.
    """
    group = SINGLE_PROCESS if shards is None else shards.group
    members = [models.weights(m) for m in range(models.members)]
    observed = Observed()
    plan = make_plan(models, members, next(iter(feed(1))), output_fn, limit)
    for names in group.all_gather_object(plan.names)[0]:
        inputs, others = (feed(plan.rows), None) if shards is None else _shard_inputs(shards, plan)
        options: dict[str, Any] = {"names": names, "among": models.mean, "limit": limit, "others": others}
        moments = second_moments(models.module, members, inputs, output_fn, **options)
        reduce_moments(moments, group, models.device)
        bases, why = _build_on_ranks(moments, {n: models.mean[n] for n in names}, group, rotated=rotated, along=along)
        observed.bases.update(bases)
        observed.why.update(why)
    observed.why.update({b.bias: BIAS for b in observed.bases.values() if b.bias in observed.why})
    if rotated:
        _warn_of_large(observed, limit)
    return observed if rotated or along is not None else replace(observed, why={})  # nobody asked for a rotation


@torch.no_grad()
def second_moments(
    net: nn.Module,
    members: Sequence[Mapping[str, Tensor]],
    inputs: Iterable[Inputs],
    output_fn: OutputFn = first_tensor,
    *,
    names: Collection[str] | None = None,
    among: Collection[str] | None = None,
    limit: int = LIMIT,
    others: Callable[[ParamUse], int] | None = None,
) -> list[dict[str, Moment]]:
    """Run the members over the data once; return per member the second moment of every parameter's layer inputs.

    Args:
        net: A private model, run with the weights of each member in turn.
        members: Their weights.
        inputs: Batches.
        output_fn: Picks the tensor that matters of what the model returns.
        names: Parameters to count, None for all.
        among: Parameters that are random, None for all: a copy of one of them stands for it.
        limit: A larger fan-in is cut into pieces.
        others: Tells how many rows other processes counted before a use, in batches of their own.
    """
    moments: list[dict[str, Moment]] = [{} for _ in members]

    def visitor(counted: dict[str, Moment]) -> Callable[[ParamUse], None]:
        def visit(use: ParamUse) -> None:
            if names is None or use.name in names:
                counted.setdefault(use.name, Moment(limit)).add(use, others(use) if others else 0)

        return visit

    for x in inputs:
        for weights, counted in zip(members, moments, strict=True):
            with no_fast_path, CaptureMode({n: w for n, w in weights.items() if among is None or n in among}, visitor(counted)):
                _run(net, weights, x, output_fn)
    return moments


def _run(net: nn.Module, weights: Mapping[str, Tensor], x: Inputs, output_fn: OutputFn) -> None:
    try:
        call(net, weights, x, output_fn)
    except MODEL_ERRORS as error:
        raise model_failed(net, x, error) from error


@torch.no_grad()
def make_plan(models: StackedModel, members: Sequence[Weights], first: Inputs, output_fn: OutputFn, limit: int) -> Plan:
    """Plan the pass by what one batch shows."""
    sizes = dict.fromkeys(models.mean, 0)
    counts: Counter[Part] = Counter()

    def visit(use: ParamUse) -> None:
        if use.input is not None and use.name in sizes:
            fan_in = use.input.view.fan_in
            blocks = use.input.groups * -(-fan_in // limit)
            sizes[use.name] = max(sizes[use.name], blocks * min(fan_in, limit) ** 2 * len(members))
            counts[_part(use)] += use.input.count

    with no_fast_path, CaptureMode({n: members[0][n] for n in models.mean}, visit) as mode:
        _run(models.module, members[0], first, output_fn)
    groups: list[list[str]] = [[]]
    room = MOMENT_NUMBERS
    for name in sorted(sizes, key=lambda n: -sizes[n]):
        if sizes[name] > room and groups[-1]:
            groups.append([])
            room = MOMENT_NUMBERS
        groups[-1].append(name)
        room -= sizes[name]
    rows = min(MOST_ROWS, ACTIVATIONS * rows_of(first) // max(1, mode.widest))
    return Plan(groups, rows, {part: count / rows_of(first) for part, count in counts.items()})


def _part(use: ParamUse) -> Part:
    assert use.input is not None
    return (use.name, use.input.start, use.input.stop, use.input.groups)


def _shard_inputs(shards: ShardedFeed, plan: Plan) -> tuple[Iterator[Any], Callable[[ParamUse], int]]:
    """This process's batches, and how many rows of a use the others had before: so it samples those that one alone would."""
    before = 0

    def inputs() -> Iterator[Any]:
        nonlocal before
        for x, before in shards.feed(plan.rows):  # noqa: B007
            yield x

    return inputs(), lambda use: round(before * plan.rates.get(_part(use), 0.0)) if use.input else 0


def _warn_of_large(observed: Observed, limit: int) -> None:
    large = {n: b.view.fan_in for n, b in observed.bases.items() if b.view.fan_in > limit}
    if large:
        logger.warning(
            "A basis for the whole fan-in of %s would be larger than `fan_in_limit` = %d: each gets several smaller ones, which "
            "do not see correlations between them.", ", ".join(f"`{n}` ({d:,})" for n, d in large.items()), limit,
        )  # fmt: skip


# -------------------------------------------------------------------------------------------------- several processes


def reduce_moments(moments: Sequence[dict[str, Moment]], group: Group, device: torch.device) -> None:
    """Add up what all ranks counted, in place: per member, {name: Moment}."""
    if group.size == 1:
        return
    for member in moments:
        described: list[dict[str, Any]] = group.all_gather_object({name: _describe(moment) for name, moment in member.items()})
        # all ranks go through all names in one order: whoever has none of one adds nothing
        for name in dict.fromkeys(name for ranks in described for name in ranks):
            member[name] = _reduce(member.get(name), [ranks[name] for ranks in described if name in ranks], group, device)


def _describe(moment: Moment) -> dict[str, Any]:
    """Everything about a moment but its sums."""
    return {
        "view": moment.view and asdict(moment.view), "bias": moment.bias, "why": moment.why, "final": moment.final,
        "limit": moment.limit, "counts": None if moment.counts is None else len(moment.counts),
        "totals": [[*key, total.rows, *total.products.shape] for key, total in moment.totals.items()],
    }  # fmt: skip


def _reduce(mine: Moment | None, ranks: list[dict[str, Any]], group: Group, device: torch.device) -> Moment:
    """One moment as if a single process had added all uses: with two sets of axes, it cannot be rotated."""
    views = [_view(rank["view"]) for rank in ranks if rank["view"]]
    final = next((rank for rank in ranks if rank["final"]), None)
    clash = any(view != views[0] for view in views[1:])
    merged = Moment(ranks[0]["limit"], bias=next((rank["bias"] for rank in ranks if rank["bias"]), None))
    if final is not None or clash:
        merged.why, merged.final = TWICE if final is None else final["why"], True
    elif views:
        merged.view = views[0]
        _reduce_totals(merged, {} if mine is None else mine.totals, ranks, group, device)
    else:
        merged.why = next((rank["why"] for rank in ranks if rank["why"]), "")
    length = max((rank["counts"] for rank in ranks if rank["counts"] is not None), default=None)
    if length is not None:
        counts = torch.zeros(length, dtype=torch.int64, device=device)
        if mine is not None and mine.counts is not None:
            counts = F.pad(mine.counts, (0, length - len(mine.counts)))
        group.all_reduce(counts)
        merged.counts = counts
    return merged


def _reduce_totals(
    merged: Moment, mine: dict[tuple[int, int, int], Total], ranks: list[dict[str, Any]], group: Group, device: torch.device
) -> None:
    """Σ h hᵀ and rows of all ranks, key by key."""
    shapes: dict[tuple[int, int, int], list[int]] = {}
    rows: Counter[tuple[int, int, int]] = Counter()
    for rank in ranks:
        for first, last, groups, count, *shape in rank["totals"]:
            shapes.setdefault((first, last, groups), shape)
            rows[first, last, groups] += count
    for key, shape in shapes.items():
        products = mine[key].products if key in mine else torch.zeros(shape, dtype=torch.float64, device=device)
        group.all_reduce(products)
        merged.totals[key] = Total(products, rows[key])


def _build_on_ranks(
    moments: list[dict[str, Moment]], mean: Mapping[str, Tensor], group: Group, **options: Any
) -> tuple[dict[str, Basis], dict[str, str]]:
    """Do as `build_bases`, each parameter on one rank: the widest first, in turn, so that all have as much to do."""
    if group.size == 1:
        return build_bases(moments, mean, **options)
    mine = {name: weight for place, (name, weight) in enumerate(mean.items()) if place % group.size == group.rank}
    bases, why = build_bases(moments, mine, **options)
    headers: list[Any] = group.all_gather_object(
        [[[n, asdict(b.view), b.bias, b.matrix is not None] for n, b in bases.items()], why]
    )
    tensors = group.all_gather([t for b in bases.values() for t in (b.input_rms, b.output_rms, b.matrix) if t is not None])
    result: dict[str, Basis] = {}
    for (header, _), sent in zip(headers, tensors, strict=True):
        source = iter(sent)
        for name, view, bias, rotated in header:
            parts = [next(source).to(mean[name].device) for _ in range(3 if rotated else 2)]
            result[name] = Basis(_view(view), parts[0], parts[1], parts[2] if rotated else None, bias)
    reasons = {name: text for _, texts in headers for name, text in texts.items()}
    return {n: result[n] for n in mean if n in result}, {n: reasons[n] for n in mean if n in reasons}


def _view(state: Mapping[str, Sequence[int]]) -> MatrixView:
    return MatrixView(**{field: tuple(numbers) for field, numbers in state.items()})
