"""Data among several processes: what each reads of shared data, and what each holds made known to all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, Sampler

from offmap._torch_private import tree_flatten, tree_unflatten
from offmap._types import Inputs
from offmap.data.batch import Batch, Shared, rows_of, take_rows
from offmap.distributed.group import Group, shard_slice
from offmap.errors import DataError


@dataclass(frozen=True)
class Shard:
    """This rank's part of data that all ranks have: every N-th of consecutive "batches", or some "rows" of each of them.

    A batch with fewer rows than there are ranks belongs to all: the mean of equal gradients is that gradient.
    """

    group: Group
    of: Literal["batches", "rows"]

    def batches(self, source: Iterator[Batch]) -> Iterator[Batch]:
        """Yield this rank's part of batches that were read in full."""
        if self.of == "batches":
            return islice(source, self.group.rank, None, self.group.size)
        return ((take_rows(x, rows), y[rows]) for x, y in source for rows in [self._rows(len(y))])

    def indices(self, source: Iterator[list[int]]) -> Iterator[list[int]]:
        """Yield this rank's part of batches that are still lists of row numbers."""
        if self.of == "batches":
            return islice(source, self.group.rank, None, self.group.size)
        return (numbers[self._rows(len(numbers))] for numbers in source)

    def loader(self, source: DataLoader[Any]) -> DataLoader[Any] | None:
        """Return a loader like this one that reads this rank's rows alone; None if rows cannot be chosen before they are read."""
        if isinstance(source.dataset, IterableDataset) or source.batch_sampler is None:
            return None
        return DataLoader(
            source.dataset, batch_sampler=_ShardSampler(source.batch_sampler, self), collate_fn=source.collate_fn,
            num_workers=source.num_workers, worker_init_fn=source.worker_init_fn, generator=source.generator,
            timeout=source.timeout, multiprocessing_context=source.multiprocessing_context,
        )  # fmt: skip

    def _rows(self, count: int) -> slice:
        return slice(0, count) if count < self.group.size else shard_slice(self.group, count)


class _ShardSampler(Sampler[list[int]]):
    """The user's own batches of row numbers, in the same order on every rank, and this rank's part of them."""

    def __init__(self, source: Any, shard: Shard) -> None:
        self.source, self.shard = source, shard

    def __iter__(self) -> Iterator[list[int]]:
        return self.shard.indices(list(numbers) for numbers in self.source)


def is_sharded(data: Any) -> bool:
    """Return whether a loader gives every rank rows of its own already, by a DistributedSampler."""
    samplers = [getattr(data, "sampler", None), getattr(getattr(data, "batch_sampler", None), "sampler", None)]
    return isinstance(data, DataLoader) and any(isinstance(sampler, DistributedSampler) for sampler in samplers)


def map_rows(work: Callable[[Inputs], dict[str, Tensor]], inputs: Inputs, group: Group) -> dict[str, Tensor]:
    """Return `work(inputs)`, a dict of tensors (B, ...), each process computing its shard of the rows."""
    if group.size == 1:
        return work(inputs)
    rows = shard_slice(group, rows_of(inputs))
    local = work(take_rows(inputs, rows)) if rows.start < rows.stop else {}
    names = next(names for names in group.all_gather_object(list(local)) if names)
    parts = [tensors for tensors in group.all_gather(list(local.values())) if tensors]
    return {name: torch.cat([tensors[i] for tensors in parts]) for i, name in enumerate(names)}


def all_gather_batches(batches: Sequence[tuple[Inputs, Tensor | None]], group: Group, name: str) -> list[Batch]:
    """Return the batches of all ranks, rank after rank; tensors that all rows share, and non-tensors, are this rank's own."""
    flat, specs = zip(*(tree_flatten(pair) for pair in batches), strict=True)
    forms = group.all_gather_object(str(specs[0]))
    if len(set(forms)) > 1:
        raise DataError(f"Expected `{name}` of one form on every rank, but got {sorted(set(forms))}.")
    counts = group.all_gather_object(len(batches))
    ranks = group.all_gather([leaf for leaves in flat for leaf in leaves if _is_rows(leaf)])
    parts: list[Any] = []
    for count, tensors in zip(counts, ranks, strict=True):
        source = iter(tensors)
        for _ in range(count):
            parts.append(tree_unflatten([next(source) if _is_rows(leaf) else leaf for leaf in flat[0]], specs[0]))
    return parts


def _is_rows(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and not isinstance(leaf, Shared)
