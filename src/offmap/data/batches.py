"""Data as batches that can be iterated again: held in memory, or read from a DataLoader or Dataset."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from operator import itemgetter
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from offmap._torch_private import tree_flatten, tree_map
from offmap._types import Data, Inputs
from offmap.data.batch import Batch, Place, Shared, read_batch, take_rows
from offmap.data.collate import collate
from offmap.data.shard import Shard, all_gather_batches
from offmap.distributed.group import SINGLE_PROCESS, Group
from offmap.errors import DataError, OffmapError, ShapeError
from offmap.random import generator, permutation

logger = logging.getLogger("offmap")

VALID_SHARE = 0.1
"""Share of the training data that is set aside where no validation data are given."""


@dataclass(frozen=True)
class Rows:
    """Data held in memory."""

    inputs: Inputs
    targets: Tensor
    batch_size: int
    name: str
    shard: Shard | None = None  # this rank's part of every pass

    @property
    def rows(self) -> int:
        """The number of examples."""
        return self.targets.shape[0]

    def __iter__(self) -> Iterator[Batch]:
        return self._all() if self.shard is None else self.shard.batches(self._all())

    @property
    def usual_rows(self) -> int:
        """The number of rows of every batch but the last."""
        return self.batch_size

    def _all(self) -> Iterator[Batch]:
        for start in range(0, self.rows, self.batch_size):
            rows = slice(start, start + self.batch_size)
            yield take_rows(self.inputs, rows), self.targets[rows]

    def shuffled(self, seed: int, epoch: int) -> Iterator[Batch]:
        """Yield the examples in an order that depends on (seed, epoch) alone."""
        order = permutation(self.rows, seed, "order", epoch).to(self.targets.device)
        return iter(self.take(order))

    def generators(self) -> list[torch.Generator]:
        """Return the generators that decide the order: none."""
        return []

    def take(self, rows: Tensor) -> Rows:
        """Return some of the rows."""
        return replace(self, inputs=take_rows(self.inputs, rows), targets=self.targets[rows])


@dataclass(frozen=True)
class Stream:
    """Data from a DataLoader or a Dataset, checked batch by batch."""

    source: DataLoader[Any]
    place: Place
    target: str
    name: str
    indexed: bool
    check: Callable[[Tensor], None] | None = None
    shard: Shard | None = None  # this rank's part of every pass

    @property
    def rows(self) -> int:
        """The number of examples."""
        return len(cast(Sized, self.source.dataset))

    def __iter__(self) -> Iterator[Batch]:
        if self.shard is None:
            return self._all(self.source)
        loader = self.shard.loader(self.source)
        return self.shard.batches(self._all(self.source)) if loader is None else self._all(loader)

    @property
    def usual_rows(self) -> int:
        """The number of rows of every batch but the last; 0 if the user's own sampler decides."""
        return self.source.batch_size or 0

    def _all(self, source: DataLoader[Any]) -> Iterator[Batch]:
        for position, batch in enumerate(iter_batches(source, f"`{self.name}`")):
            inputs, targets = read_batch(batch, self.place, self.target, self.name, f"batch {position} of `{self.name}`")
            if self.check is not None:
                self.check(targets)
            yield inputs, targets

    def shuffled(self, seed: int, epoch: int) -> Iterator[Batch]:
        """Yield a Dataset in an order that depends on (seed, epoch); a user's DataLoader in its own order."""
        if not self.indexed:
            return iter(self)
        order = permutation(self.rows, seed, "order", epoch).tolist()
        return iter(replace(self, source=_reorder(self.source, order, self.source.batch_size)))

    def generators(self) -> list[torch.Generator]:
        """Return the generators by which the DataLoader may shuffle, the global one first."""
        sources = [getattr(self.source, "generator", None), getattr(self.source.sampler, "generator", None)]
        return [torch.default_generator, *{id(source): source for source in sources if source is not None}.values()]


Batches: TypeAlias = Rows | Stream


def iter_batches(source: Iterable[Any], name: str) -> Iterator[Any]:
    """Yield the batches of a loader; an error of the user's data set is raised as a DataError with the number of the batch."""
    position, iterator = 0, None
    while True:
        try:
            iterator = iter(source) if iterator is None else iterator
            batch = next(iterator)
        except StopIteration:
            return
        except OffmapError:
            raise
        except Exception as error:
            reason = (str(error).strip().splitlines() or [""])[-1][:300]
            raise DataError(
                f"Expected batches from {name}, but reading batch {position} failed: {type(error).__name__}: {reason}."
            ) from error
        yield batch
        position += 1


@contextmanager
def fork_rng(seed: object) -> Generator[None]:
    """Seed the global generator, by which a shuffling DataLoader draws, and restore the user's random state afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(generator(seed, "order").initial_seed())
        yield


def as_batches(data: Data, place: Place, *, name: str, batch_size: int = 128, target: str = "labels") -> Batches:
    """Return data of any accepted form as batches; data in memory are checked at once, others as they come.

    Args:
        data: A DataLoader, a Dataset, or a pair (inputs, targets).
        place: Device and dtype of the model.
        name: The argument that holds the data, for error messages.
        batch_size: Rows per batch, unless a DataLoader decides.
        target: The key of the targets where a batch is one dict.
    """
    if isinstance(data, Rows | Stream):
        return data
    if isinstance(data, TensorDataset) and len(data.tensors) == 2:
        data = tuple(data.tensors)
    if isinstance(data, DataLoader):
        return Stream(data, place, target, name, indexed=False)
    if isinstance(data, Dataset):
        loader = DataLoader(data, batch_size=batch_size)
        return Stream(loader, place, target, name, indexed=not isinstance(data, IterableDataset))
    return Rows(*read_batch(data, place, target, name, f"`{name}`"), batch_size, name)


def load_rows(data: Batches, *, at_least: int = 1) -> Rows:
    """Read a (validation-sized) data set into memory, refused if it has fewer than `at_least` rows."""
    rows = data if isinstance(data, Rows) else _read_stream(data)
    if rows.rows < at_least:
        raise DataError(f"Expected at least {at_least} rows in `{rows.name}`, but got {rows.rows}. Pass more, or leave it out.")
    return rows


def _read_stream(data: Stream) -> Rows:
    parts = list(data)
    if not parts:
        raise DataError(f"Expected at least one example in `{data.name}`, but it is empty.")
    try:
        inputs, targets = collate(parts)
    except (RuntimeError, ValueError) as error:
        raise ShapeError(
            f"Expected batches of `{data.name}` that differ in the number of rows alone, or in length beside an "
            f"`attention_mask`, but they cannot be joined: {error}. Pad all examples to one size."
        ) from error
    return Rows(inputs, targets, max(1, parts[0][1].shape[0]), data.name)


def all_gather_rows(rows: Rows, group: Group) -> Rows:
    """Return the rows of all ranks, rank after rank."""
    if group.size == 1:
        return rows
    inputs, targets = collate(all_gather_batches([(rows.inputs, rows.targets)], group, rows.name))
    return replace(rows, inputs=inputs, targets=targets)


def sample_rows(data: Batches, size: int, seed: int, group: Group = SINGLE_PROCESS, *, sharded: bool = False) -> list[Inputs]:
    """Return the inputs of at most `size` random rows, in their order, those of one shape together.

    Which rows depends on (seed, row number) alone, whatever the form of the data. A Dataset is read at these rows only, a
    DataLoader once from end to end, by several ranks in turn; no more than these rows and one batch are held.
    """
    read_once = isinstance(data, Stream) and not data.indexed
    source = generator(seed, "sample", *([group.rank] if sharded and group.size > 1 else []))
    if group.size > 1 and (sharded or read_once):
        shard = None if sharded else Shard(group, "batches")
        rows = reservoir_sample(replace(data, shard=shard), size, source, shard)
        if min(group.all_gather_object(len(rows))):  # else there are fewer batches than ranks
            return group_by_shape(_lowest_keys(rows, size, group, sharded=sharded))
        source = generator(seed, "sample")
    if isinstance(data, Stream) and not data.indexed:
        rows = sorted(reservoir_sample(data, size, source), key=itemgetter(1))
        return group_by_shape([inputs for _, _, inputs in rows])
    chosen = _draw_keys(data.rows, source).argsort()[:size].sort().values
    if isinstance(data, Rows):
        return [take_rows(data.inputs, chosen.to(data.targets.device))]
    picked = replace(data, source=_reorder(data.source, chosen.tolist(), data.source.batch_size))
    return group_by_shape([inputs for inputs, _ in picked])


Keyed: TypeAlias = tuple[float, int, Inputs]
"""A row with a random key and its number."""


def _draw_keys(count: int, source: torch.Generator) -> Tensor:
    """Draw a key per row; keys of consecutive batches are those of one long batch."""
    return torch.rand(count, generator=source, dtype=torch.float64, device="cpu")


def reservoir_sample(data: Batches, size: int, source: torch.Generator, shard: Shard | None = None) -> list[Keyed]:
    """Return the rows with the lowest keys, one by one; other ranks read the batches between those of a `shard`."""
    heap: list[Keyed] = []  # the highest key on top
    start, bound, usual = 0, torch.inf, data.usual_rows
    for turn, (inputs, targets) in enumerate(data):
        usual = usual or targets.shape[0]
        if shard is not None:  # the keys of rows that other ranks read before
            skipped = usual * (shard.group.rank if turn == 0 else shard.group.size - 1)
            _draw_keys(skipped, source)
            start += skipped
        keys = _draw_keys(targets.shape[0], source)
        for row in (keys < bound).nonzero().flatten().tolist():
            heappush(heap, (-float(keys[row]), start + row, take_rows(inputs, [row])))  # a slice would keep its batch in memory
            if len(heap) > size:
                heappop(heap)
        start, bound = start + targets.shape[0], -heap[0][0] if len(heap) == size else bound
    return [(-key, number, inputs) for key, number, inputs in heap]


def _lowest_keys(keyed: Sequence[Keyed], size: int, group: Group, *, sharded: bool) -> list[Inputs]:
    """Return the `size` rows of lowest keys of all ranks, in the order of their numbers, counted per rank if `sharded`."""
    ranks = group.all_gather_object([[key, number] for key, number, _ in keyed])
    rows = all_gather_batches([(inputs, None) for _, _, inputs in keyed], group, "train")
    order = [(key, rank if sharded else 0, number) for rank, keys in enumerate(ranks) for key, number in keys]
    chosen = sorted(range(len(rows)), key=lambda i: order[i])[:size]
    return [rows[i][0] for i in sorted(chosen, key=lambda i: order[i][1:])]


def group_by_shape(parts: Sequence[Inputs]) -> list[Inputs]:
    """Concatenate rows of equal shapes that share the same tensors, in order of the first of them."""
    groups: dict[Any, list[Inputs]] = {}
    for part in parts:
        leaves, form = tree_flatten(part)
        shapes = [id(leaf) if isinstance(leaf, Shared) else leaf.shape[1:] for leaf in leaves if isinstance(leaf, Tensor)]
        groups.setdefault((repr(form), *shapes), []).append(part)

    def concat(*leaves: Any) -> Any:
        return leaves[0] if isinstance(leaves[0], Shared) or not isinstance(leaves[0], Tensor) else torch.cat(leaves)

    return [tree_map(concat, *group) for group in groups.values()]


def split_data(data: Data, place: Place, *, fraction: float, seed: int, batch_size: int, target: str) -> tuple[Batches, Batches]:
    """Set a random fraction of the training data aside: (train, valid)."""
    train = as_batches(data, place, name="train", batch_size=batch_size, target=target)
    if isinstance(train, Stream) and isinstance(train.source.dataset, IterableDataset):
        raise DataError("Expected `valid=` beside an iterable data set: it cannot be split.")
    if isinstance(train, Stream) and train.source.batch_sampler is None:
        raise DataError("Expected `valid=` beside a DataLoader with `batch_size=None`: its rows cannot be told apart.")
    try:
        rows = train.rows
    except TypeError as error:
        raise DataError(f"Expected `valid=` beside a data set that does not know its length ({error}).") from error
    order = permutation(rows, seed, "split")
    cut = max(2, round(fraction * rows))
    if rows - cut < 1:
        raise DataError(f"Expected at least 3 rows to set 2 aside for validation, but `train` has {rows}. Pass `valid=`.")
    if isinstance(train, Rows):
        order = order.to(train.targets.device)
        return replace(train.take(order[cut:]), name="train"), replace(train.take(order[:cut]), name="valid")
    size = train.source.batch_size or batch_size

    def part(rows: Tensor, name: str) -> Stream:
        # the user's order is lost in the split, so the library may shuffle
        return replace(train, source=_reorder(train.source, sorted(rows.tolist()), size), name=name, indexed=True)

    return part(order[cut:], "train"), part(order[:cut], "valid")


def load_train_valid(
    train: Data, valid: Data | None, place: Place, *, seed: int, batch_size: int, target: str
) -> tuple[Batches, Rows]:
    """Return training batches and validation rows; without `valid`, a tenth of the training data, with a warning."""
    if valid is not None:
        batches = as_batches(train, place, name="train", batch_size=batch_size, target=target)
        return batches, load_rows(as_batches(valid, place, name="valid", batch_size=batch_size, target=target), at_least=2)
    batches, held = split_data(train, place, fraction=VALID_SHARE, seed=seed, batch_size=batch_size, target=target)
    rows = load_rows(held, at_least=2)
    logger.warning("No validation data: %d random rows of `train` are set aside. Pass `valid=` to choose them.", rows.rows)
    return batches, rows


def _reorder(loader: DataLoader[Any], rows: list[int], batch_size: int | None) -> DataLoader[Any]:
    """Return a loader like the user's over some rows of its data set, in this order."""
    return DataLoader(
        Subset(loader.dataset, rows), batch_size=batch_size, collate_fn=loader.collate_fn, num_workers=loader.num_workers
    )
