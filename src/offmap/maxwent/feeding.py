"""The training data as the pass over them wants it: inputs alone, in batches of a chosen size, dealt among processes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from offmap.data import Batches, Rows, Shard
from offmap.data.inputs import rows_of
from offmap.distributed.group import Group
from offmap.posterior.construct import Feed
from offmap.posterior.merge_moments import Dealt


def feed_of(train: Batches) -> Feed:
    """The inputs of the training data; those in memory in batches of at least so many rows."""
    return lambda rows: (x for x, _ in _sized(train, rows))


def sharded_among(train: Batches, group: Group, *, sharded: bool) -> Dealt | None:
    """Every process's own batches: each N-th of them, or all if it was given rows of its own, `sharded`."""
    if group.size == 1:
        return None

    def feed(rows: int) -> Iterator[tuple[Any, int]]:
        if sharded:
            yield from ((x, 0) for x, _ in _sized(train, rows))
            return
        data = replace(_sized(train, rows), shard=Shard(group, "batches"))
        for turn, (x, _) in enumerate(data):
            yield x, (data.usual_rows or rows_of(x)) * (turn * (group.size - 1) + group.rank)

    return Dealt(group, feed)


def _sized(train: Batches, rows: int) -> Batches:
    return replace(train, batch_size=max(rows, train.batch_size)) if isinstance(train, Rows) else train
