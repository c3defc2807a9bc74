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
            if array.dtype == object or array.dtype.kind in "US":
                raise DataError(f"Expected numeric arrays, but got dtype {array.dtype}. Encode text and missing values first.")
            value = torch.from_numpy(np.ascontiguousarray(array).copy() if not array.flags.writeable else array)
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
            check_finite(inputs, targets, f"batch {position} of `{self.name}`")
            if self.check is not None:
                self.check(targets)
            yield inputs, targets

    def shuffled(self, seed: int, epoch: int) -> Iterator[Batch]:
        """A Dataset in an order that depends on (seed, epoch); a user's own DataLoader in its own."""
        if not self.indexed:
            return iter(self)
        order = permutation(self.rows, seed, "order", epoch).tolist()
        loader = DataLoader(Subset(self.source.dataset, order), batch_size=self.source.batch_size)
        return iter(replace(self, source=loader))


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
        return Stream(DataLoader(data, batch_size=batch_size), place, target, name, indexed=True)
    inputs, targets = divide(data, target, name)
    inputs, targets = tree_map(place.put, inputs), as_targets(targets, place)
    if not any(isinstance(leaf, Tensor) for leaf in tree_leaves(inputs)):
        raise DataError(f"Expected tensors or arrays as the inputs of `{name}`, but got {type(inputs).__name__}.")
    if targets.shape[0] == 0 or rows_of(inputs) == 0:
        raise DataError(f"Expected at least one example in `{name}`, but it is empty.")
    if rows_of(inputs) != targets.shape[0]:
        raise ShapeError(f"Expected as many inputs as targets in `{name}`, but got {rows_of(inputs)} and {targets.shape[0]}.")
    check_finite(inputs, targets, f"`{name}`")
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


def as_targets(targets: Any, place: Place) -> Tensor:
    """Targets as a tensor: floats in the host's dtype, whole numbers as int64."""
    tensor = place.put(targets if hasattr(targets, "__array__") else np.asarray(targets))
    if tensor.ndim == 0:
        raise DataError("Expected one target per example, but got a single number.")
    return tensor if tensor.is_floating_point() or tensor.dtype == torch.bool else tensor.long()


def check_finite(inputs: Inputs, targets: Tensor | None, where: str) -> None:
    """Raise a DataError that names the first row with NaN or infinite numbers."""
    for word, leaves in (("inputs", tree_leaves(inputs)), ("targets", [targets])):
        for leaf in leaves:
            if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.ndim and not bool(leaf.isfinite().all()):
                row = (
                    int((~leaf.isfinite()).flatten(1).any(1).nonzero()[0])
                    if leaf.ndim > 1
                    else int((~leaf.isfinite()).nonzero()[0])
                )
                raise DataError(f"Expected finite {word}, but row {row} of {where} holds NaN or infinite values. "
                                "Drop or impute such rows.")  # fmt: skip


def gather(data: Batches) -> Rows:
    """All of a (validation-sized) data set in memory."""
    if isinstance(data, Rows):
        return data
    parts = list(data)
    if not parts:
        raise DataError(f"Expected at least one example in `{data.name}`, but it is empty.")
    inputs = tree_map(lambda *leaves: torch.cat(leaves) if isinstance(leaves[0], Tensor) else leaves[0], *[x for x, _ in parts])
    return Rows(inputs, torch.cat([y for _, y in parts]), max(1, parts[0][1].shape[0]), data.name)


def split(data: Data, place: Place, *, fraction: float, seed: int, batch_size: int, target: str) -> tuple[Batches, Batches]:
    """Set a random share of the training data aside: (train, valid)."""
    whole = batches(data, place, name="train", batch_size=batch_size, target=target)
    if isinstance(whole, Stream) and isinstance(whole.source.dataset, IterableDataset):
        raise DataError("Expected `valid=` beside an iterable data set: it cannot be split.")
    order = permutation(whole.rows, seed, "split")
    cut = max(2, round(fraction * whole.rows))
    if whole.rows - cut < 1:
        raise DataError(f"Expected at least 3 rows to set 2 aside for validation, but `train` has {whole.rows}. Pass `valid=`.")
    if isinstance(whole, Rows):
        order = order.to(whole.targets.device)
        return replace(whole.take(order[cut:]), name="train"), replace(whole.take(order[:cut]), name="valid")
    loader = whole.source

    def part(rows: Tensor, name: str) -> Stream:
        subset = Subset(loader.dataset, sorted(rows.tolist()))
        again = DataLoader(subset, batch_size=loader.batch_size or batch_size, collate_fn=loader.collate_fn,
                           num_workers=loader.num_workers)  # fmt: skip
        return replace(whole, source=again, name=name, indexed=whole.indexed)

    return part(order[cut:], "train"), part(order[:cut], "valid")
