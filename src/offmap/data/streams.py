"""Data as re-iterable batches: held in memory, or read from a DataLoader or Dataset as they come."""

from __future__ import annotations

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
from offmap.data.batch import Batch, Place, read
from offmap.data.collate import join
from offmap.data.inputs import Shared, take_rows
from offmap.data.shard import Share
from offmap.errors import DataError, OffmapError, ShapeError
from offmap.random import generator, permutation


@dataclass(frozen=True)
class Rows:
    """Data held in memory."""

    inputs: Inputs
    targets: Tensor
    batch_size: int
    name: str
    share: Share | None = None  # of several ranks: what of every pass is this one's

    @property
    def rows(self) -> int:
        """How many examples there are."""
        return self.targets.shape[0]

    def __iter__(self) -> Iterator[Batch]:
        return self._all() if self.share is None else self.share.batches(self._all())

    @property
    def usual_rows(self) -> int:
        """Rows of every batch but the last."""
        return self.batch_size

    def _all(self) -> Iterator[Batch]:
        for start in range(0, self.rows, self.batch_size):
            rows = slice(start, start + self.batch_size)
            yield take_rows(self.inputs, rows), self.targets[rows]

    def shuffled(self, seed: int, epoch: int) -> Iterator[Batch]:
        """The same examples in an order that depends on (seed, epoch) alone."""
        order = permutation(self.rows, seed, "order", epoch).to(self.targets.device)
        return iter(self.take(order))

    def take(self, rows: Tensor) -> Rows:
        """Some of the rows, as other rows."""
        return replace(self, inputs=take_rows(self.inputs, rows), targets=self.targets[rows])


@dataclass(frozen=True)
class Stream:
    """Data that come from a DataLoader or a Dataset, checked batch by batch."""

    source: DataLoader[Any]
    place: Place
    target: str
    name: str
    indexed: bool
    check: Callable[[Tensor], None] | None = None
    share: Share | None = None  # of several ranks: what of every pass is this one's

    @property
    def rows(self) -> int:
        """How many examples there are."""
        return len(cast(Sized, self.source.dataset))

    def __iter__(self) -> Iterator[Batch]:
        if self.share is None:
            return self._all(self.source)
        own = self.share.loader(self.source)
        return self.share.batches(self._all(self.source)) if own is None else self._all(own)

    @property
    def usual_rows(self) -> int:
        """Rows of every batch but the last, 0 if the user's own sampler decides."""
        return self.source.batch_size or 0

    def _all(self, source: DataLoader[Any]) -> Iterator[Batch]:
        for position, batch in enumerate(given(source, f"`{self.name}`")):
            inputs, targets = read(batch, self.place, self.target, self.name, f"batch {position} of `{self.name}`")
            if self.check is not None:
                self.check(targets)
            yield inputs, targets

    def shuffled(self, seed: int, epoch: int) -> Iterator[Batch]:
        """A Dataset in an order that depends on (seed, epoch); a user's own DataLoader in its own."""
        if not self.indexed:
            return iter(self)
        order = permutation(self.rows, seed, "order", epoch).tolist()
        return iter(replace(self, source=_reordered(self.source, order, self.source.batch_size)))


Batches: TypeAlias = Rows | Stream


def given(source: Iterable[Any], name: str) -> Iterator[Any]:
    """The batches of a loader; what a user's data set raises, or cannot be collated, is told with the number of the batch."""
    position, batches_of = 0, None
    while True:
        try:
            batches_of = iter(source) if batches_of is None else batches_of
            batch = next(batches_of)
        except StopIteration:
            return
        except OffmapError:
            raise
        except Exception as error:
            said = (str(error).strip().splitlines() or [""])[-1][:300]
            raise DataError(
                f"Expected batches from {name}, but reading batch {position} failed: {type(error).__name__}: {said}."
            ) from error
        yield batch
        position += 1


@contextmanager
def own_order(seed: object) -> Generator[None]:
    """A shuffling DataLoader draws from the global generator: here it repeats, and the user's random state is left alone."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(generator(seed, "order").initial_seed())
        yield


def batches(data: Data, place: Place, *, name: str, batch_size: int = 128, target: str = "labels") -> Batches:
    """Read `data` in any accepted form; in-memory data are checked at once, the rest as they come."""
    if isinstance(data, Rows | Stream):
        return data
    if isinstance(data, TensorDataset) and len(data.tensors) == 2:
        data = tuple(data.tensors)
    if isinstance(data, DataLoader):
        return Stream(data, place, target, name, indexed=False)
    if isinstance(data, Dataset):
        loader = DataLoader(data, batch_size=batch_size)
        return Stream(loader, place, target, name, indexed=not isinstance(data, IterableDataset))
    return Rows(*read(data, place, target, name, f"`{name}`"), batch_size, name)


def gather(data: Batches, *, least: int = 1) -> Rows:
    """All of a (validation-sized) data set in memory, refused if it has fewer than `least` rows."""
    rows = data if isinstance(data, Rows) else _read(data)
    if rows.rows < least:
        raise DataError(f"Expected at least {least} rows in `{rows.name}`, but got {rows.rows}. Pass more, or leave it out.")
    return rows


def _read(data: Stream) -> Rows:
    parts = list(data)
    if not parts:
        raise DataError(f"Expected at least one example in `{data.name}`, but it is empty.")
    try:
        inputs, targets = join(parts)
    except (RuntimeError, ValueError) as error:
        raise ShapeError(
            f"Expected batches of `{data.name}` that differ in the number of rows alone, or in length beside an "
            f"`attention_mask`, but they cannot be joined: {error}. Pad all examples to one size."
        ) from error
    return Rows(inputs, targets, max(1, parts[0][1].shape[0]), data.name)


def sample(data: Batches, size: int, seed: int) -> list[Inputs]:
    """The inputs of at most so many random rows, in their order, those of one shape together.

    Which rows depends on (seed, row number) alone, whatever the form of the data. A Dataset is read at these rows only, a
    DataLoader once from end to end; no more than these rows and one batch are held.
    """
    source = generator(seed, "sample")
    if isinstance(data, Stream) and not data.indexed:
        rows = sorted(lowest_of(data, size, source), key=itemgetter(1))
        return by_shape([inputs for _, _, inputs in rows])
    chosen = _keys(data.rows, source).argsort()[:size].sort().values
    if isinstance(data, Rows):
        return [take_rows(data.inputs, chosen.to(data.targets.device))]
    picked = replace(data, source=_reordered(data.source, chosen.tolist(), data.source.batch_size))
    return by_shape([inputs for inputs, _ in picked])


def _keys(count: int, source: torch.Generator) -> Tensor:
    """The rows of lowest keys are chosen. Keys of consecutive batches are those of one long batch."""
    return torch.rand(count, generator=source, dtype=torch.float64, device="cpu")


def lowest_of(data: Batches, size: int, source: torch.Generator, skip: Share | None = None) -> list[tuple[float, int, Inputs]]:
    """The rows with the lowest keys, one by one, with key and number. With `skip`, others read the batches in between."""
    kept: list[tuple[float, int, Inputs]] = []  # a heap with the highest key on top
    start, bound, usual = 0, torch.inf, data.usual_rows
    group = None if skip is None else skip.group
    for turn, (inputs, targets) in enumerate(data):
        usual = usual or targets.shape[0]
        if group is not None:  # the keys of rows that come before, and belong to others
            passed = usual * (group.rank if turn == 0 else group.size - 1)
            _keys(passed, source)
            start += passed
        keys = _keys(targets.shape[0], source)
        for row in (keys < bound).nonzero().flatten().tolist():
            alone = take_rows(inputs, [row])  # a copy: a slice would keep its batch in memory
            heappush(kept, (-float(keys[row]), start + row, alone))
            if len(kept) > size:
                heappop(kept)
        start, bound = start + targets.shape[0], -kept[0][0] if len(kept) == size else bound
    return [(-key, number, inputs) for key, number, inputs in kept]


def by_shape(parts: Sequence[Inputs]) -> list[Inputs]:
    """Rows of equal shapes that share the same tensors as one, in order of the first of them."""
    groups: dict[Any, list[Inputs]] = {}
    for part in parts:
        leaves, form = tree_flatten(part)
        shapes = [id(leaf) if isinstance(leaf, Shared) else leaf.shape[1:] for leaf in leaves if isinstance(leaf, Tensor)]
        groups.setdefault((repr(form), *shapes), []).append(part)

    def joined(*leaves: Any) -> Any:
        return leaves[0] if isinstance(leaves[0], Shared) or not isinstance(leaves[0], Tensor) else torch.cat(leaves)

    return [tree_map(joined, *group) for group in groups.values()]


def split(data: Data, place: Place, *, fraction: float, seed: int, batch_size: int, target: str) -> tuple[Batches, Batches]:
    """Set a random share of the training data aside: (train, valid)."""
    whole = batches(data, place, name="train", batch_size=batch_size, target=target)
    if isinstance(whole, Stream) and isinstance(whole.source.dataset, IterableDataset):
        raise DataError("Expected `valid=` beside an iterable data set: it cannot be split.")
    if isinstance(whole, Stream) and whole.source.batch_sampler is None:
        raise DataError("Expected `valid=` beside a DataLoader with `batch_size=None`: its rows cannot be told apart.")
    try:
        rows = whole.rows
    except TypeError as error:
        raise DataError(f"Expected `valid=` beside a data set that does not know its length ({error}).") from error
    order = permutation(rows, seed, "split")
    cut = max(2, round(fraction * rows))
    if rows - cut < 1:
        raise DataError(f"Expected at least 3 rows to set 2 aside for validation, but `train` has {rows}. Pass `valid=`.")
    if isinstance(whole, Rows):
        order = order.to(whole.targets.device)
        return replace(whole.take(order[cut:]), name="train"), replace(whole.take(order[:cut]), name="valid")
    size = whole.source.batch_size or batch_size

    def part(rows: Tensor, name: str) -> Stream:
        # the user's order is gone with the split, so the order is ours to shuffle
        return replace(whole, source=_reordered(whole.source, sorted(rows.tolist()), size), name=name, indexed=True)

    return part(order[cut:], "train"), part(order[:cut], "valid")


def _reordered(loader: DataLoader[Any], rows: list[int], batch_size: int | None) -> DataLoader[Any]:
    """A loader like the user's over some rows of its data set, in this order."""
    return DataLoader(
        Subset(loader.dataset, rows), batch_size=batch_size, collate_fn=loader.collate_fn, num_workers=loader.num_workers
    )
