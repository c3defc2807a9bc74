"""What several processes saw of the data, each in its own batches, as one: second moments added up, bases made once.

Every rank ends with the same moments and bases, to the bit. Each basis is made by one of them, and told to the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from offmap.distributed.group import SINGLE_PROCESS, Group
from offmap.model.capture import TWICE
from offmap.model.matrix_view import MatrixView
from offmap.posterior.basis import Basis, Moment, Total, build

Key: TypeAlias = tuple[int, int, int]


@dataclass(frozen=True)
class Dealt:
    """The processes that look at the data together, and this one's batches: `feed(rows)` gives inputs, and how many rows the
    others have before each.
    """

    group: Group
    feed: Callable[[int], Iterable[tuple[Any, int]]]


def pool(moments: Sequence[dict[str, Moment]], group: Group, device: torch.device) -> None:
    """Add up what all ranks counted, in place: per member, {name: Moment}."""
    if group.size == 1:
        return
    for found in moments:
        told: list[dict[str, Any]] = group.all_gather_object({name: _said(moment) for name, moment in found.items()})
        # all ranks go through all names in one order: whoever has not met one adds nothing
        for name in dict.fromkeys(name for each in told for name in each):
            found[name] = _summed(found.get(name), [each[name] for each in told if name in each], group, device)


def _said(moment: Moment) -> dict[str, Any]:
    """Everything about a moment but its sums."""
    return {
        "frame": moment.frame and asdict(moment.frame), "bias": moment.bias, "why": moment.why, "final": moment.final,
        "limit": moment.limit, "counts": None if moment.counts is None else len(moment.counts),
        "totals": [[*key, total.rows, *total.products.shape] for key, total in moment.totals.items()],
    }  # fmt: skip


def _summed(own: Moment | None, told: list[dict[str, Any]], group: Group, device: torch.device) -> Moment:
    """One moment as if a single process had added all reads: met along two sets of axes, it cannot be rotated."""
    frames = [_frame(each["frame"]) for each in told if each["frame"]]
    final = next((each for each in told if each["final"]), None)
    clash = any(frame != frames[0] for frame in frames[1:])
    merged = Moment(told[0]["limit"], bias=next((each["bias"] for each in told if each["bias"]), None))
    if final is not None or clash:
        merged.why, merged.final = TWICE if final is None else final["why"], True
    elif frames:
        merged.frame = frames[0]
        _add_totals(merged, own, told, group, device)
    else:
        merged.why = next((each["why"] for each in told if each["why"]), "")
    length = max((each["counts"] for each in told if each["counts"] is not None), default=None)
    if length is not None:
        counts = torch.zeros(length, dtype=torch.int64, device=device)
        if own is not None and own.counts is not None:
            counts = F.pad(own.counts, (0, length - len(own.counts)))
        group.all_reduce(counts)
        merged.counts = counts
    return merged


def _add_totals(merged: Moment, own: Moment | None, told: list[dict[str, Any]], group: Group, device: torch.device) -> None:
    """Σ h hᵀ and rows of all ranks, key by key."""
    shapes: dict[Key, list[int]] = {}
    rows: dict[Key, int] = {}
    for each in told:
        for first, last, groups, count, *shape in each["totals"]:
            key = (first, last, groups)
            shapes.setdefault(key, shape)
            rows[key] = rows.get(key, 0) + count
    mine = {} if own is None else own.totals
    for key, shape in shapes.items():
        products = mine[key].products if key in mine else torch.zeros(shape, dtype=torch.float64, device=device)
        group.all_reduce(products)
        merged.totals[key] = Total(products, rows[key])


def build_together(
    moments: list[dict[str, Moment]], mean: Mapping[str, Tensor], group: Group = SINGLE_PROCESS, **options: Any
) -> tuple[dict[str, Basis], dict[str, str]]:
    """`build`, each parameter on one rank: the widest first, in turn, so that all have as much to do."""
    if group.size == 1:
        return build(moments, mean, **options)
    own = {name: weight for place, (name, weight) in enumerate(mean.items()) if place % group.size == group.rank}
    bases, why = build(moments, own, **options)
    told: list[Any] = group.all_gather_object(
        [[[n, asdict(b.frame), b.bias, b.matrix is not None] for n, b in bases.items()], why]
    )
    tensors = group.all_gather([t for b in bases.values() for t in (b.amplitude, b.reach, b.matrix) if t is not None])
    found: dict[str, Basis] = {}
    for (listed, _), sent in zip(told, tensors, strict=True):
        source = iter(sent)
        for name, frame, bias, turned in listed:
            place = mean[name].device
            made = [next(source).to(place) for _ in range(3 if turned else 2)]
            found[name] = Basis(_frame(frame), made[0], made[1], made[2] if turned else None, bias)
    reasons = {name: text for _, each in told for name, text in each.items()}
    return {n: found[n] for n in mean if n in found}, {n: reasons[n] for n in mean if n in reasons}


def _frame(state: Mapping[str, Sequence[int]]) -> MatrixView:
    return MatrixView(**{field: tuple(numbers) for field, numbers in state.items()})
