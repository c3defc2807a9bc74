"""What of the data is whose, when several processes read them: batches dealt in turn, or the rows of every batch divided."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal, TypeVar

from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, Sampler

from offmap.data.batch import Batch
from offmap.data.inputs import take_rows
from offmap.distributed.group import Group, part

Item = TypeVar("Item")


@dataclass(frozen=True)
class Share:
    """Of consecutive "batches" every N-th, or of each of them some "rows".

    A batch with fewer rows than there are ranks is everyone's: the mean of equal gradients is that gradient.
    """

    group: Group
    of: Literal["batches", "rows"]

    def batches(self, source: Iterator[Batch]) -> Iterator[Batch]:
        """This rank's part of batches that were read whole."""
        if self.of == "batches":
            return islice(source, self.group.rank, None, self.group.size)
        return ((take_rows(x, rows), y[rows]) for x, y in source for rows in [self._rows(len(y))])

    def numbers(self, source: Iterator[list[int]]) -> Iterator[list[int]]:
        """This rank's part of batches that are still lists of row numbers."""
        if self.of == "batches":
            return islice(source, self.group.rank, None, self.group.size)
        return (numbers[self._rows(len(numbers))] for numbers in source)

    def _rows(self, count: int) -> slice:
        return slice(0, count) if count < self.group.size else part(self.group, count)

    def loader(self, whole: DataLoader[Any]) -> DataLoader[Any] | None:
        """A loader like this one that reads this rank's rows alone; None if its rows cannot be told before they are read."""
        if isinstance(whole.dataset, IterableDataset) or whole.batch_sampler is None:
            return None
        return DataLoader(
            whole.dataset, batch_sampler=_Shared(whole.batch_sampler, self), collate_fn=whole.collate_fn,
            num_workers=whole.num_workers, worker_init_fn=whole.worker_init_fn, generator=whole.generator, timeout=whole.timeout,
            multiprocessing_context=whole.multiprocessing_context,
        )  # fmt: skip


class _Shared(Sampler[list[int]]):
    """The user's own batches of row numbers, asked for in the same order on every rank, and this rank's part of them."""

    def __init__(self, whole: Any, share: Share) -> None:
        self.whole, self.share = whole, share

    def __iter__(self) -> Iterator[list[int]]:
        return self.share.numbers(list(numbers) for numbers in self.whole)


def is_sharded(data: Any) -> bool:
    """Whether a loader gives every rank rows of its own already: it has a DistributedSampler."""
    samplers = [getattr(data, "sampler", None), getattr(getattr(data, "batch_sampler", None), "sampler", None)]
    return isinstance(data, DataLoader) and any(isinstance(each, DistributedSampler) for each in samplers)
