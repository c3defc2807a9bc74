"""One batch in any form that users have, as checked tensors: inputs (a tensor, a tuple or a dict, cut into rows) and targets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from offmap._torch_private import NO_TORCH_FUNCTION, tree_leaves, tree_map
from offmap._types import IGNORED, Inputs
from offmap.errors import DataError, ShapeError

Batch: TypeAlias = tuple[Inputs, Tensor]


def arguments(inputs: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and keyword arguments that `inputs` stand for."""
    if isinstance(inputs, dict):
        return (), inputs
    return (tuple(inputs), {}) if isinstance(inputs, tuple | list) else ((inputs,), {})


class Shared(Tensor):
    """A tensor that belongs to all rows together, such as an attention mask (T, T): it is never cut into rows."""

    # what is computed from it is a plain tensor
    __torch_function__ = NO_TORCH_FUNCTION

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return memo.setdefault(id(self), shared(self.detach().clone()))


def shared(tensor: Tensor) -> Tensor:
    """Mark a tensor that all rows share. Needed only where its first axis may be as long as the first batch.

    >>> x, mask = torch.zeros(4, 2), shared(torch.ones(4, 4))
    >>> [tuple(t.shape) for t in take_rows((x, mask), slice(0, 3))]
    [(3, 2), (4, 4)]
    """
    return tensor.as_subclass(Shared)  # pyright: ignore[reportReturnType]


def mark_shared(inputs: Inputs) -> Inputs:
    """Mark tensors without a batch axis in front. Called once, with all rows: a later cut to T rows would mistake a (T, T)."""
    size = rows_of(inputs)
    return tree_map(lambda t: t if not isinstance(t, Tensor) or (t.ndim and t.shape[0] == size) else shared(t), inputs)


def rows_of(inputs: Inputs) -> int:
    """Return the batch size B, that of the first tensor that is not marked as shared."""
    leaves = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
    return next((leaf for leaf in leaves if not isinstance(leaf, Shared)), leaves[0]).shape[0]


def take_rows(inputs: Inputs, rows: slice | Tensor | list[int]) -> Inputs:
    """Return some rows, a slice or their numbers, of every tensor with a batch axis in front that is not marked as shared."""
    size = rows_of(inputs)

    def take(leaf: Any) -> Any:
        has_rows = isinstance(leaf, Tensor) and not isinstance(leaf, Shared) and leaf.ndim > 0 and leaf.shape[0] == size
        return leaf[rows] if has_rows else leaf

    return tree_map(take, inputs)


def is_table(inputs: Inputs) -> bool:
    """Return whether the inputs are one matrix, a row per example."""
    return isinstance(inputs, Tensor) and inputs.ndim == 2


@dataclass(frozen=True)
class Place:
    """Device and dtype of a model: batches are moved to the device, floating-point numbers cast to the dtype."""

    device: torch.device
    dtype: torch.dtype

    @staticmethod
    def of(net: nn.Module) -> Place:
        """Return the device and dtype of a model's first floating-point parameter."""
        first = next(p for p in net.parameters() if p.is_floating_point())
        return Place(first.device, first.dtype)

    def put(self, value: Any) -> Any:
        """Move one leaf of a batch; anything that is not an array or a tensor passes through."""
        if hasattr(value, "__array__") and not isinstance(value, Tensor):
            array = np.asarray(value)
            if array.dtype.kind not in "biufc":
                raise DataError(
                    f"Expected numeric arrays, but got dtype {array.dtype}. Encode text, dates and missing values first."
                )
            # torch reads native numbers of at most 64 bits, in order and writeable
            native = np.dtype(np.float64) if array.dtype == np.longdouble else array.dtype.newbyteorder("=")
            reversed_ = any(stride < 0 for stride in array.strides)  # also where numpy calls them in order, as of one row
            value = torch.from_numpy(np.require(array.copy() if reversed_ else array, native, ["C", "W"]))
        if not isinstance(value, Tensor):
            return value
        if value.is_meta or value.layout != torch.strided:
            kind = "on the device 'meta', without values" if value.is_meta else f"of layout {value.layout}; pass `.to_dense()`"
            raise DataError(f"Expected dense tensors with values, but got one {kind}.")
        moved = value.to(self.device, self.dtype if value.is_floating_point() else value.dtype)
        return shared(moved) if isinstance(value, Shared) else moved


def read_batch(batch: Any, place: Place, target: str, name: str, where: str) -> Batch:
    """Return inputs and targets of one batch as checked tensors on the model's device."""
    inputs, targets = split_batch(batch, target, name)
    inputs, targets = tree_map(place.put, inputs), as_targets(targets, place)
    check_batch(inputs, targets, where)
    return mark_shared(inputs), next_tokens(inputs, targets) if is_mapping(batch) else targets


def is_mapping(batch: Any) -> bool:
    """Return whether a batch is a dict, or something like one, as the `BatchEncoding` of a tokenizer."""
    return hasattr(batch, "keys") and not hasattr(batch, "__array__")


def as_inputs(inputs: Any) -> Inputs:
    """Return inputs as the model is called with: a dict of whatever is like one, a tuple of a list."""
    return dict(inputs) if is_mapping(inputs) else tuple(inputs) if isinstance(inputs, list) else inputs


def next_tokens(inputs: Inputs, targets: Tensor) -> Tensor:
    """Shift labels that repeat the `input_ids` beside them by one position, as language models do: (B, T) -> (B, T).

    The last position, and padding, become −100. Other targets are returned unchanged.

    >>> ids = torch.tensor([[5, 6, 7, 0]])
    >>> next_tokens({"input_ids": ids, "attention_mask": torch.tensor([[1, 1, 1, 0]])}, ids)
    tensor([[   6,    7, -100, -100]])
    """
    ids, mask = inputs.get("input_ids"), inputs.get("attention_mask")
    counted = targets != IGNORED
    if not isinstance(ids, Tensor) or ids.shape != targets.shape or ids.ndim < 2 or bool(((ids != targets) & counted).any()):
        return targets
    if isinstance(mask, Tensor) and mask.shape == targets.shape:
        counted = counted & (mask != 0)
    return F.pad(targets.masked_fill(~counted, IGNORED)[:, 1:], (0, 1), value=IGNORED)


def split_batch(batch: Any, target: str, name: str) -> tuple[Inputs, Any]:
    """Return inputs and targets of one batch: a pair, or a dict that holds the targets under the key `target`."""
    if is_mapping(batch):
        fields = dict(batch)
        if target not in fields:
            raise DataError(f"Expected batches of `{name}` to hold the target under {target!r}, but got the keys "
                            f"{sorted(fields)}. Pass `target=`.")  # fmt: skip
        targets = fields.pop(target)
        return fields, targets
    if isinstance(batch, tuple | list) and len(batch) == 2:
        return as_inputs(batch[0]), batch[1]
    raise DataError(
        f"Expected `{name}` to be a DataLoader, a Dataset or a pair (inputs, targets), or batches of that form, "
        f"but got {type(batch).__name__}{f' of length {len(batch)}' if isinstance(batch, tuple | list) else ''}."
    )


def drop_targets(batch: Any, target: str) -> Inputs:
    """Return the inputs of a batch, with or without targets."""
    if isinstance(batch, tuple | list):
        return as_inputs(batch[0] if len(batch) == 1 else split_batch(batch, target, "x")[0] if len(batch) == 2 else batch)
    return {name: value for name, value in dict(batch).items() if name != target} if is_mapping(batch) else batch


def as_targets(targets: Any, place: Place) -> Tensor:
    """Return targets as a tensor: floats in the model's dtype, whole numbers as int64."""
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
    for kind, leaves in (("inputs", tree_leaves(inputs)), ("targets", [targets])):
        for leaf in leaves:
            if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.ndim and not _is_finite(leaf):
                row = int((~leaf.isfinite()).view(leaf.shape[0], -1).any(1).nonzero()[0])
                raise DataError(f"Expected finite {kind}, but row {row} of {where} holds NaN or infinite values. "
                                "Drop or impute such rows.")  # fmt: skip


def _is_finite(tensor: Tensor) -> bool:
    # a finite sum has finite terms and needs no copy of a large tensor; a sum that overflows needs a closer look
    return bool(tensor.sum().isfinite()) or bool(tensor.isfinite().all())
