"""Data as batches that can be iterated again: held in memory, or read from a DataLoader or Dataset; and what each of several
processes reads of them.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence, Sized
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import islice
from operator import itemgetter
from typing import Any, Literal, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Subset, TensorDataset

from offmap._torch_private import tree_flatten, tree_leaves, tree_map, tree_unflatten
from offmap._types import Data, Inputs
from offmap.data.batch import Batch, Place, Shared, collate, hash_rows, read_batch, rows_of, take_rows
from offmap.distributed.group import SINGLE_PROCESS, Group, shard_slice
from offmap.errors import DataError, OffmapError, ShapeError
from offmap.random import generator, permutation

logger: logging.Logger = logging.getLogger("offmap")


@dataclass(frozen=True)
class Shard:
    """This rank's part of data that all ranks have: every N-th of consecutive "batches", or some "rows" of each of them.

    A batch with fewer rows than there are ranks belongs to all: the mean of equal gradients is that gradient.
    """

    group: Group
    of: Literal["batches", "rows"]

    def take(self, source: Iterator[Any], cut: Callable[[Any, slice], Any], count: Callable[[Any], int]) -> Iterator[Any]:
        """Yield this rank's part of some batches, given how to cut one and count its rows."""
        if self.of == "batches":
            return islice(source, self.group.rank, None, self.group.size)
        few = self.group.size
        return (cut(batch, shard_slice(self.group, count(batch))) if count(batch) >= few else batch for batch in source)


UNCALIBRATED = "intervals and prediction sets need `guard.calibrate(new_rows)` first"

PROBES = 10_000
"""Training rows of which copies are counted, to tell rows that repeat by chance."""

REPEATED = 0.5
"""The share of held-out rows that must be training rows too, beyond the share of training rows that have a copy, to say so."""


class Repeats:
    """Counts how many held-out rows are training rows too, by hashes of the inputs, while the training rows are read.

    Tables of few values hold copies of rows, and new rows of the same kind are then found in `train` as often as rows of `train`
    have a copy there: `share` tells how much more often they are.
    """

    def __init__(self, held: Iterable[Rows]) -> None:
        self.hashes: dict[str, list[int]] = {rows.name: hash_rows(rows.inputs) for rows in held}
        self.share: dict[str, float] | None = None  # by name, once all training rows were read

    def watch(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield the batches; the first pass that reaches its end is counted."""
        counts, first = {key: 0 for keys in self.hashes.values() for key in keys}, list[int]()
        for inputs, targets in batches:
            for key in hash_rows(inputs) if self.share is None else ():
                if len(first) < PROBES:
                    first.append(key)
                    counts.setdefault(key, 0)
                if key in counts:
                    counts[key] += 1
            yield inputs, targets
        if self.share is None and first:
            copied = sum(counts[key] > 1 for key in first) / len(first)
            self.share = {name: sum(counts[k] > 0 for k in keys) / len(keys) - copied for name, keys in self.hashes.items()}


@dataclass(frozen=True)
class Rows:
    """Data held in memory; `shard` is this rank's part of every pass, `seen` tells that the model was trained on these rows."""

    inputs: Inputs
    targets: Tensor
    batch_size: int
    name: str
    shard: Shard | None = None
    seen: bool = False
    repeats: Repeats | None = None

    @property
    def rows(self) -> int:
        """The number of examples."""
        return self.targets.shape[0]

    def __iter__(self) -> Iterator[Batch]:
        slices = (slice(start, start + self.batch_size) for start in range(0, self.rows, self.batch_size))
        batches = ((take_rows(self.inputs, rows), self.targets[rows]) for rows in slices)
        return batches if self.shard is None else self.shard.take(batches, _cut_batch, lambda batch: len(batch[1]))

    def iter_shuffled(self, seed: int, epoch: int) -> Iterator[Batch]:
        """Yield the examples in an order that depends on (seed, epoch) alone."""
        return iter(self.take(permutation(self.rows, seed, "order", epoch)))

    def generators(self) -> list[torch.Generator]:
        """Return the generators that decide the order: none."""
        return []

    def take(self, rows: Tensor) -> Rows:
        """Return some of the rows."""
        rows = rows.to(self.targets.device)
        return replace(self, inputs=take_rows(self.inputs, rows), targets=self.targets[rows])


@dataclass(frozen=True)
class Stream:
    """Data from a DataLoader or a Dataset, checked batch by batch; `shard` is this rank's part of every pass."""

    source: DataLoader[Any]
    place: Place
    target: str
    name: str
    indexed: bool
    check: Callable[[Tensor], None] | None = None
    shard: Shard | None = None
    repeats: Repeats | None = None

    @property
    def rows(self) -> int:
        """The number of examples."""
        return len(cast(Sized, self.source.dataset))

    @property
    def batch_size(self) -> int:
        """The number of rows of every batch but the last; 0 if the user's own sampler decides."""
        return self.source.batch_size or 0

    def __iter__(self) -> Iterator[Batch]:
        return self._iterate() if self.repeats is None else self.repeats.watch(self._iterate())

    def _iterate(self) -> Iterator[Batch]:
        source = self.source
        if self.shard is None:
            return self._read(source)
        if isinstance(source.dataset, IterableDataset) or source.batch_sampler is None:  # rows are known when they are read
            return self.shard.take(self._read(source), _cut_batch, lambda batch: len(batch[1]))
        indices = self.shard.take((list(rows) for rows in source.batch_sampler), lambda rows, part: rows[part], len)
        return self._read(DataLoader(
            source.dataset, batch_sampler=indices, collate_fn=source.collate_fn, num_workers=source.num_workers,  # pyright: ignore
            worker_init_fn=source.worker_init_fn, generator=source.generator, timeout=source.timeout,
            multiprocessing_context=source.multiprocessing_context,
        ))  # fmt: skip

    def _read(self, source: DataLoader[Any]) -> Iterator[Batch]:
        for position, batch in enumerate(iter_batches(source, f"`{self.name}`")):
            inputs, targets = read_batch(batch, self.place, self.target, self.name, f"batch {position} of `{self.name}`")
            if self.check is not None:
                self.check(targets)
            yield inputs, targets

    def iter_shuffled(self, seed: int, epoch: int) -> Iterator[Batch]:
        """Yield a Dataset in an order that depends on (seed, epoch); a user's DataLoader in its own order."""
        return iter(self.take(permutation(self.rows, seed, "order", epoch)) if self.indexed else self)

    def generators(self) -> list[torch.Generator]:
        """Return the generators by which the DataLoader may shuffle, the global one first."""
        sources = [getattr(self.source, "generator", None), getattr(self.source.sampler, "generator", None)]
        return [torch.default_generator, *{id(source): source for source in sources if source is not None}.values()]

    def take(self, rows: Tensor, batch_size: int | None = None) -> Stream:
        """Return some of the rows, in this order, by a loader like the user's."""
        loader, data = self.source, Subset(self.source.dataset, rows.tolist())
        size = batch_size or loader.batch_size
        source = DataLoader(data, batch_size=size, collate_fn=loader.collate_fn, num_workers=loader.num_workers)
        return replace(self, source=source, repeats=None)


Batches: TypeAlias = Rows | Stream


def _cut_batch(batch: Batch, rows: slice) -> Batch:
    return take_rows(batch[0], rows), batch[1][rows]


def iter_batches(source: Iterable[Any], name: str) -> Iterator[Any]:
    """Yield the batches of a loader; an error of the user's data set is raised as a DataError with the number of the batch."""
    position = -1
    try:
        for position, batch in enumerate(source):  # noqa: B007
            yield batch
    except OffmapError:
        raise
    except Exception as error:
        reason = (str(error).strip().splitlines() or [""])[-1][:300]
        raise DataError(f"Reading batch {position + 1} of {name} failed: {type(error).__name__}: {reason}.") from error


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
    if isinstance(data, Stream):
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
        data = Rows(inputs, targets, max(1, parts[0][1].shape[0]), data.name)
    if data.rows < at_least:
        raise DataError(f"Expected at least {at_least} rows in `{data.name}`, but got {data.rows}. Pass more, or leave it out.")
    return data


def load_train_valid(
    train: Data, valid: Data | None, place: Place, *, seed: int, batch_size: int, target: str
) -> tuple[Batches, Rows]:
    """Return training batches and validation rows; without `valid`, a tenth of the training data, with a warning."""
    if valid is not None:
        batches = as_batches(train, place, name="train", batch_size=batch_size, target=target)
        return batches, load_rows(as_batches(valid, place, name="valid", batch_size=batch_size, target=target), at_least=2)
    batches, held = split_data(train, place, fraction=0.1, seed=seed, batch_size=batch_size, target=target)
    rows = replace(load_rows(held, at_least=2), seen=True)
    logger.warning(
        "No validation data: %d rows of `train`, which the model has seen, set the threshold, so %s.", rows.rows, UNCALIBRATED,
    )  # fmt: skip
    return batches, rows


AUGMENTED = "Rows of `train` differ between two reads, as by random augmentation: "
REPLACED = AUGMENTED + "they are read with the transform of `valid` instead."
KEPT = AUGMENTED + (
    "layer inputs and distances are those of changed rows, which lowers scores. Pass a loader over the same rows without "
    "augmentation as `train`."
)


def without_augmentation(train: Batches, valid: Data | None) -> tuple[Batches, str]:
    """Return the training data as read with the transform of `valid`'s data set where their own is random, and what was found."""
    if not isinstance(train, Stream) or _reads_alike(train.source):
        return train, ""
    dataset = train.source.dataset
    other = valid.dataset if isinstance(valid, DataLoader) else valid
    while isinstance(other, Subset):
        other = other.dataset
    fixed = _with_transform(dataset, other) if hasattr(other, "transform") else None
    if fixed is not None:
        source = copy(train.source)
        object.__setattr__(source, "dataset", fixed)  # which a DataLoader refuses once it is made
        if _reads_alike(source):
            return replace(train, source=source), REPLACED
    return train, KEPT


def _with_transform(dataset: Any, like: Any) -> Any | None:
    """Return a data set with the transform of another of its class, through any number of Subsets; None for other classes."""
    if isinstance(dataset, Subset):
        inner = _with_transform(dataset.dataset, like)
        return None if inner is None else Subset(inner, dataset.indices)
    if type(dataset) is not type(like):
        return None
    result = copy(dataset)
    for name in {"transform", "transforms"} & vars(like).keys():
        setattr(result, name, getattr(like, name))
    return result


def _reads_alike(source: DataLoader[Any]) -> bool:
    """Return whether a few rows of a data set are the same when they are read again; also where that cannot be told."""
    try:
        count = len(cast(Sized, source.dataset))
        if isinstance(source.dataset, IterableDataset) or source.batch_sampler is None:
            return True
        rows = sorted({i * (count - 1) // 7 for i in range(8)})
        with torch.random.fork_rng(devices=[]):
            first, second = (tree_leaves(source.collate_fn([source.dataset[row] for row in rows])) for _ in range(2))
        return all(torch.equal(a, b) for a, b in zip(first, second, strict=True) if isinstance(a, Tensor))
    except Exception:  # reading the data will tell
        return True


def watch_repeats(train: Batches, *held: Rows | None) -> Batches:
    """Return `train` with a count of the held-out rows among its own: made at once, or of a stream when it is read."""
    train = replace(train, repeats=Repeats(rows for rows in held if rows is not None and not rows.seen))
    if isinstance(train, Rows):
        read_through(replace(train, batch_size=4096))
    return train


def read_through(data: Batches) -> None:
    """Read all rows once, which counts those that repeat, unless they were counted before."""
    if data.repeats is not None and data.repeats.share is None:
        deque(data.repeats.watch(data), maxlen=0)


def mark_repeats(
    train: Batches, valid: Rows, separate: Rows | None = None, group: Group = SINGLE_PROCESS, *, sharded: bool = False
) -> tuple[Rows, Rows | None]:
    """Return validation and separate calibration rows, marked as seen, with a warning, where they repeat those of `train`."""

    def mark(rows: Rows, cost: str) -> Rows:
        share = 0.0 if rows.seen or train.repeats is None else (train.repeats.share or {}).get(rows.name, 0.0)
        if sharded or isinstance(train, Stream):  # each rank has read a part
            share = min(1.0, sum(group.all_gather_object(share)))
        return mark_seen(rows, share, cost)

    if separate is None:
        return mark(valid, UNCALIBRATED), None
    return mark(valid, "τ and the clip fit them too well: pass rows it has not seen"), mark(separate, UNCALIBRATED)


def mark_seen(rows: Rows, share: float, cost: str) -> Rows:
    """Return the rows, marked as seen, with a warning, if such a share of them are training rows."""
    if share < REPEATED:
        return rows
    logger.warning("`%s` repeats rows of `train` (%.0f %%), which the model has seen, so %s.", rows.name, 100 * share, cost)
    return replace(rows, seen=True)


def split_data(data: Data, place: Place, *, fraction: float, seed: int, batch_size: int, target: str) -> tuple[Batches, Batches]:
    """Set a random fraction of the training data aside: (train, valid)."""
    train = as_batches(data, place, name="train", batch_size=batch_size, target=target)
    try:
        if isinstance(train, Stream) and isinstance(train.source.dataset, IterableDataset):
            raise TypeError("an iterable data set cannot be split")
        if isinstance(train, Stream) and train.source.batch_sampler is None:
            raise TypeError("rows of a DataLoader with `batch_size=None` cannot be told apart")
        rows = train.rows
    except TypeError as error:
        raise DataError(f"Expected `valid=`, because the length of `train` is unknown ({error}).") from error
    order = permutation(rows, seed, "split")
    cut = max(2, round(fraction * rows))
    if rows - cut < 1:
        raise DataError(f"Expected at least 3 rows to set 2 aside for validation, but `train` has {rows}. Pass `valid=`.")
    if isinstance(train, Rows):
        return train.take(order[cut:]), replace(train.take(order[:cut]), name="valid")
    rest, valid = (train.take(part.sort().values, train.batch_size or batch_size) for part in (order[cut:], order[:cut]))
    # the user's order is lost in the split, so the library may shuffle
    return replace(rest, indexed=True), replace(valid, name="valid", indexed=True)


Keyed: TypeAlias = tuple[float, int, Any]
"""A row with a random key and its number."""


class Examples(NamedTuple):
    """Rows of one shape: inputs, targets, and their numbers in the data, (n,)."""

    inputs: Inputs
    targets: Tensor
    numbers: Tensor


def sample_rows(data: Batches, size: int, seed: int) -> list[Inputs]:
    """Return the inputs of at most `size` random rows, as `sample_examples` does."""
    return [part.inputs for part in sample_examples(data, size, seed)]


def sample_examples(
    data: Batches, size: int, seed: int, group: Group = SINGLE_PROCESS, *, sharded: bool = False
) -> list[Examples]:
    """Return at most `size` random rows, in their order, those of one shape together.

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
    if read_once:
        rows = sorted(reservoir_sample(data, size, source), key=itemgetter(1))
        return group_by_shape([row for _, _, row in rows])
    numbers = _draw_keys(data.rows, source).argsort()[:size].sort().values
    chosen = data.take(numbers)
    if isinstance(chosen, Rows):
        return [Examples(chosen.inputs, chosen.targets, numbers)]
    rest = iter(numbers.tolist())
    return group_by_shape([(x, y, torch.tensor([next(rest) for _ in range(len(y))], device="cpu")) for x, y in chosen])


def _draw_keys(count: int, source: torch.Generator) -> Tensor:
    """Draw a key per row; keys of consecutive batches are those of one long batch."""
    return torch.rand(count, generator=source, dtype=torch.float64, device="cpu")


def reservoir_sample(data: Batches, size: int, source: torch.Generator, shard: Shard | None = None) -> list[Keyed]:
    """Return the rows with the lowest keys, one by one; other ranks read the batches between those of a `shard`."""
    heap: list[Keyed] = []  # the highest key on top
    start, bound, usual = 0, torch.inf, data.batch_size
    for turn, (inputs, targets) in enumerate(data):
        usual = usual or targets.shape[0]
        if shard is not None:  # the keys of rows that other ranks read before
            skipped = usual * (shard.group.rank if turn == 0 else shard.group.size - 1)
            _draw_keys(skipped, source)
            start += skipped
        keys = _draw_keys(targets.shape[0], source)
        for row in (keys < bound).nonzero().flatten().tolist():
            number = torch.tensor([start + row], device="cpu")
            example = take_rows(inputs, [row]), targets[[row]], number  # a slice would keep its batch in memory
            heappush(heap, (-float(keys[row]), start + row, example))
            if len(heap) > size:
                heappop(heap)
        start, bound = start + targets.shape[0], -heap[0][0] if len(heap) == size else bound
    return [(-key, number, inputs) for key, number, inputs in heap]


def _lowest_keys(keyed: Sequence[Keyed], size: int, group: Group, *, sharded: bool) -> list[Any]:
    """Return the `size` rows of lowest keys of all ranks, in the order of their numbers, counted per rank if `sharded`."""
    ranks = group.all_gather_object([[key, number] for key, number, _ in keyed])
    rows = _all_gather_batches([(inputs, None) for _, _, inputs in keyed], group, "train")
    order = [(key, rank if sharded else 0, number) for rank, keys in enumerate(ranks) for key, number in keys]
    chosen = sorted(range(len(rows)), key=lambda i: order[i])[:size]
    return [rows[i][0] for i in sorted(chosen, key=lambda i: order[i][1:])]


def group_by_shape(parts: Sequence[Any]) -> list[Examples]:
    """Concatenate rows (inputs, targets, numbers) of equal shapes that share the same tensors, in order of the first of them."""
    groups: dict[Any, list[Any]] = {}
    for part in parts:
        leaves, form = tree_flatten(part)
        shapes = [id(leaf) if isinstance(leaf, Shared) else leaf.shape[1:] for leaf in leaves if isinstance(leaf, Tensor)]
        groups.setdefault((repr(form), *shapes), []).append(part)

    def concat(*leaves: Any) -> Any:
        return torch.cat(leaves) if _has_rows(leaves[0]) else leaves[0]

    return [Examples(*tree_map(concat, *group)) for group in groups.values()]


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


def all_gather_rows(rows: Rows, group: Group) -> Rows:
    """Return the rows of all ranks, rank after rank."""
    inputs, targets = collate(_all_gather_batches([(rows.inputs, rows.targets)], group, rows.name))
    return replace(rows, inputs=inputs, targets=targets)


def _all_gather_batches(batches: Sequence[tuple[Inputs, Tensor | None]], group: Group, name: str) -> list[Batch]:
    """Return the batches of all ranks, rank after rank; tensors that all rows share, and non-tensors, are this rank's own."""
    flat, specs = zip(*(tree_flatten(pair) for pair in batches), strict=True)
    forms = group.all_gather_object(str(specs[0]))
    if len(set(forms)) > 1:
        raise DataError(f"Expected `{name}` of one form on every rank, but got {sorted(set(forms))}.")
    parts: list[Any] = []
    for tensors in group.all_gather([leaf for leaves in flat for leaf in leaves if _has_rows(leaf)]):
        source, count = iter(tensors), len(tensors) // sum(map(_has_rows, flat[0]))
        for _ in range(count):
            parts.append(tree_unflatten([next(source) if _has_rows(leaf) else leaf for leaf in flat[0]], specs[0]))
    return parts


def _has_rows(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and not isinstance(leaf, Shared)
