"""A user's data, whatever its form, as re-iterable batches (inputs, targets) on the host's device and in its dtype."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sized
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from offmap._types import Data, Inputs
from offmap.core.forward import rows_of, take_rows
from offmap.core.noise import permutation
from offmap.errors import DataError, ShapeError

Batch: TypeAlias = tuple[Inputs, Tensor]


@dataclass(frozen=True)
class Place:
    """Where a host lives: batches are moved to its device, floating-point numbers cast to its dtype."""

    device: torch.device
    dtype: torch.dtype

    @staticmethod
    def of(net: nn.Module) -> Place:
        """The device and dtype of a host's first floating-point parameter."""
        first = next(p for p in net.parameters() if p.is_floating_point())
        return Place(first.device, first.dtype)

    def put(self, value: Any) -> Any:
        """One leaf of a batch; anything that is not an array or a tensor passes through."""
        if hasattr(value, "__array__") and not isinstance(value, Tensor):
            array = np.asarray(value)
            if array.dtype.kind not in "biufc":
                raise DataError(
                    f"Expected numeric arrays, but got dtype {array.dtype}. Encode text, dates and missing values first."
                )
            # torch reads native numbers of at most 64 bits, in order and writeable
            native = np.dtype(np.float64) if array.dtype == np.longdouble else array.dtype.newbyteorder("=")
            value = torch.from_numpy(np.require(array, native, ["C", "W"]))
        if not isinstance(value, Tensor):
            return value
        return value.to(self.device, self.dtype if value.is_floating_point() else value.dtype)


@dataclass(frozen=True)
class Rows:
    """Data held in memory."""

    inputs: Inputs
    targets: Tensor
    batch_size: int
    name: str

    @property
    def rows(self) -> int:
        """How many examples there are."""
        return self.targets.shape[0]

    def __iter__(self) -> Iterator[Batch]:
        for start in range(0, self.rows, self.batch_size):
            rows = slice(start, start + self.batch_size)
            yield take_rows(self.inputs, rows), self.targets[rows]

    def shuffled(self, seed: int, epoch: int) -> Iterator[Batch]:
        """The same examples in an order that depends on (seed, epoch) alone."""
        order = permutation(self.rows, seed, "order", epoch).to(self.targets.device)
        return iter(self.take(order))

    def take(self, rows: Tensor) -> Rows:
        """Some of the rows, as other rows."""
        inputs = tree_map(lambda t: t[rows] if isinstance(t, Tensor) and t.ndim and len(t) == self.rows else t, self.inputs)
        return replace(self, inputs=inputs, targets=self.targets[rows])


@dataclass(frozen=True)
class Stream:
    """Data that come from a DataLoader or a Dataset, checked batch by batch."""

    source: DataLoader[Any]
    place: Place
    target: str
    name: str
    indexed: bool
    check: Callable[[Tensor], None] | None = None

    @property
    def rows(self) -> int:
        """How many examples there are."""
        return len(cast(Sized, self.source.dataset))

    def __iter__(self) -> Iterator[Batch]:
        for position, batch in enumerate(self.source):
            inputs, targets = divide(batch, self.target, self.name)
            inputs, targets = tree_map(self.place.put, inputs), as_targets(targets, self.place)
            check_batch(inputs, targets, f"batch {position} of `{self.name}`")
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
    inputs, targets = divide(data, target, name)
    inputs, targets = tree_map(place.put, inputs), as_targets(targets, place)
    check_batch(inputs, targets, f"`{name}`")
    return Rows(inputs, targets, batch_size, name)


def divide(batch: Any, target: str, name: str) -> tuple[Inputs, Any]:
    """Inputs and targets of one batch: a pair, or a dict that holds the target under its own key."""
    if isinstance(batch, dict) or hasattr(batch, "keys"):
        fields = dict(batch)
        if target not in fields:
            raise DataError(f"Expected batches of `{name}` to hold the target under {target!r}, but got the keys "
                            f"{sorted(fields)}. Pass `target=`.")  # fmt: skip
        targets = fields.pop(target)
        return fields, targets
    if isinstance(batch, tuple | list) and len(batch) == 2:
        return tuple(batch[0]) if isinstance(batch[0], list) else batch[0], batch[1]
    raise DataError(
        f"Expected `{name}` to be a DataLoader, a Dataset or a pair (inputs, targets), or batches of that form, "
        f"but got {type(batch).__name__}{f' of length {len(batch)}' if isinstance(batch, tuple | list) else ''}."
    )


def unlabelled(batch: Any, target: str) -> Inputs:
    """Inputs of a batch that may come without targets."""
    if isinstance(batch, tuple | list):
        return batch[0] if len(batch) == 1 else divide(batch, target, "x")[0] if len(batch) == 2 else batch
    if hasattr(batch, "keys") and not hasattr(batch, "__array__"):
        return {name: value for name, value in dict(batch).items() if name != target}
    return batch


def as_targets(targets: Any, place: Place) -> Tensor:
    """Targets as a tensor: floats in the host's dtype, whole numbers as int64."""
    try:
        tensor = place.put(targets if hasattr(targets, "__array__") else np.asarray(targets))
    except ValueError as error:  # rows of different lengths
        raise DataError(f"Expected targets that make one array, but numpy says: {str(error).rstrip('.')}.") from error
    if tensor.is_complex():
        raise DataError(f"Expected real targets, but got {tensor.dtype}. Split them into real and imaginary parts.")
    if tensor.ndim == 0:
        raise DataError("Expected one target per example, but got a single number.")
    return tensor if tensor.is_floating_point() or tensor.dtype == torch.bool else tensor.long()


def check_inputs(inputs: Inputs, where: str) -> None:
    """Raise a DataError unless there is a tensor with a batch axis in front."""
    first = next((leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)), None)
    if first is None or first.ndim == 0:
        got = type(inputs).__name__ if first is None else "a single number"
        raise DataError(
            f"Expected tensors or arrays with one row per example as the inputs of {where}, but got {got}. "
            "Wrap a Dataset in a DataLoader, and lists in torch.tensor."
        )


def check_batch(inputs: Inputs, targets: Tensor, where: str) -> None:
    """Raise unless inputs and targets describe the same examples, at least one, in finite numbers."""
    check_inputs(inputs, where)
    if targets.shape[0] == 0 or rows_of(inputs) == 0:
        raise DataError(f"Expected at least one example in {where}, but it is empty.")
    if rows_of(inputs) != targets.shape[0]:
        raise ShapeError(
            f"Expected as many inputs as targets in {where}, but got {rows_of(inputs)} and {targets.shape[0]}. "
            "Check that both describe the same examples."
        )
    check_finite(inputs, targets, where)


def check_finite(inputs: Inputs, targets: Tensor | None, where: str) -> None:
    """Raise a DataError that names the first row with NaN or infinite numbers."""
    for word, leaves in (("inputs", tree_leaves(inputs)), ("targets", [targets])):
        for leaf in leaves:
            if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.ndim and not _finite(leaf):
                row = (
                    int((~leaf.isfinite()).flatten(1).any(1).nonzero()[0])
                    if leaf.ndim > 1
                    else int((~leaf.isfinite()).nonzero()[0])
                )
                raise DataError(f"Expected finite {word}, but row {row} of {where} holds NaN or infinite values. "
                                "Drop or impute such rows.")  # fmt: skip


def _finite(tensor: Tensor) -> bool:
    # a finite sum has finite terms, and needs no copies of a large tensor; a sum may overflow, so look closer then
    return bool(tensor.sum().isfinite()) or bool(tensor.isfinite().all())


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
        inputs = tree_map(
            lambda *leaves: torch.cat(leaves) if isinstance(leaves[0], Tensor) else leaves[0], *[x for x, _ in parts]
        )
        targets = torch.cat([y for _, y in parts])
    except (RuntimeError, ValueError) as error:
        raise ShapeError(
            f"Expected batches of `{data.name}` that differ in the number of rows alone, but they cannot be joined: {error}. "
            "Pad all examples to one size."
        ) from error
    return Rows(inputs, targets, max(1, parts[0][1].shape[0]), data.name)


def split(data: Data, place: Place, *, fraction: float, seed: int, batch_size: int, target: str) -> tuple[Batches, Batches]:
    """Set a random share of the training data aside: (train, valid)."""
    whole = batches(data, place, name="train", batch_size=batch_size, target=target)
    if isinstance(whole, Stream) and isinstance(whole.source.dataset, IterableDataset):
        raise DataError("Expected `valid=` beside an iterable data set: it cannot be split.")
    if isinstance(whole, Stream) and whole.source.batch_sampler is None:
        raise DataError("Expected `valid=` beside a DataLoader with `batch_size=None`: its rows cannot be told apart.")
    order = permutation(whole.rows, seed, "split")
    cut = max(2, round(fraction * whole.rows))
    if whole.rows - cut < 1:
        raise DataError(f"Expected at least 3 rows to set 2 aside for validation, but `train` has {whole.rows}. Pass `valid=`.")
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
