"""Rows that several processes hold apart, made known to all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from torch import Tensor

from offmap._torch_private import tree_flatten, tree_unflatten
from offmap._types import Inputs
from offmap.data.batch import Batch
from offmap.data.collate import join
from offmap.data.inputs import Shared
from offmap.data.shard import Share
from offmap.data.streams import Batches, Rows, Stream, by_shape, lowest_of, sample
from offmap.distributed.group import Group
from offmap.errors import DataError
from offmap.random import generator

Keyed: TypeAlias = tuple[float, int, Inputs]
"""A row with a random key and its number."""


def pooled(rows: Rows, group: Group) -> Rows:
    """The rows of all ranks, in their order: each passed some of its own."""
    if group.size == 1:
        return rows
    inputs, targets = join(_everyones([(rows.inputs, rows.targets)], group, rows.name))
    return replace(rows, inputs=inputs, targets=targets)


def sample_together(data: Batches, size: int, seed: int, group: Group, *, apart: bool) -> list[Inputs]:
    """`sample` of data that all ranks have, or each has some rows of, `apart`: the same rows on every rank.

    Of the same DataLoader each reads its share of the batches; the rows are those that one process would choose.
    """
    if group.size == 1 or not (apart or (isinstance(data, Stream) and not data.indexed)):
        return sample(data, size, seed)
    source = generator(seed, "sample", *([group.rank] if apart else []))
    share = None if apart else Share(group, "batches")
    own = lowest_of(replace(data, share=share), size, source, share)
    if min(group.tell(len(own))) == 0:  # fewer batches than ranks: there is nothing to save
        return sample(data, size, seed)
    return by_shape(_lowest_keys(own, size, group, apart=apart))


def _lowest_keys(own: Sequence[Keyed], size: int, group: Group, *, apart: bool) -> list[Inputs]:
    """Of the rows of all ranks the `size` of lowest keys, in the order of their numbers, or of ranks if those count `apart`."""
    told = group.tell([[key, number] for key, number, _ in own])
    rows = _everyones([(inputs, None) for _, _, inputs in own], group, "train")
    where = [(key, rank if apart else 0, number) for rank, each in enumerate(told) for key, number in each]
    chosen = sorted(range(len(where)), key=lambda i: where[i])[:size]
    return [rows[i][0] for i in sorted(chosen, key=lambda i: where[i][1:])]


def _everyones(own: Sequence[tuple[Inputs, Tensor | None]], group: Group, name: str) -> list[Batch]:
    """Everyone's parts, rank after rank; tensors that all rows share, and what is no tensor, are this rank's own."""
    flat, forms = zip(*(tree_flatten(pair) for pair in own), strict=True)
    told = group.tell(str(forms[0]))
    if len(set(told)) > 1:
        raise DataError(f"Expected `{name}` of one form on every rank, but got {sorted(set(told))}.")
    counts = group.tell(len(own))
    said = group.all_gather([leaf for leaves in flat for leaf in leaves if _sent(leaf)])
    parts: list[Any] = []
    for count, tensors in zip(counts, said, strict=True):
        source = iter(tensors)
        for _ in range(count):
            parts.append(tree_unflatten([next(source) if _sent(leaf) else leaf for leaf in flat[0]], forms[0]))
    return parts


def _sent(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and not isinstance(leaf, Shared)
