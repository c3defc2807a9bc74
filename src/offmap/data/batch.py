"""One batch in any form that users have, as checked tensors: inputs (a tensor, a tuple or a dict, cut into rows) and targets.

Several batches are collated to one, whatever their lengths.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
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

WIDEST = 4096
"""Inputs of more numbers per row are no vectors to compare: the inputs of layers are."""


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

    Args:
        tensor: The tensor, such as an attention mask (T, T).

    >>> x, mask = torch.zeros(4, 2), shared(torch.ones(4, 4))
    >>> [tuple(t.shape) for t in take_rows((x, mask), slice(0, 3))]
    [(3, 2), (4, 4)]
    """
    return tensor.as_subclass(Shared)  # pyright: ignore[reportReturnType]


def mark_shared(inputs: Inputs) -> Inputs:
    """Mark tensors without a batch axis in front. Called once, with all rows: a later cut to T rows would mistake a (T, T)."""
    if isinstance(inputs, Tensor) and inputs.ndim:
        return inputs
    size = rows_of(inputs)
    return tree_map(lambda t: t if not isinstance(t, Tensor) or (t.ndim and t.shape[0] == size) else shared(t), inputs)


def rows_of(inputs: Inputs) -> int:
    """Return the batch size B, that of the first tensor that is not marked as shared."""
    if isinstance(inputs, Tensor):
        return inputs.shape[0]
    leaves = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
    return next((leaf for leaf in leaves if not isinstance(leaf, Shared)), leaves[0]).shape[0]


def take_rows(inputs: Inputs, rows: slice | Tensor | list[int]) -> Inputs:
    """Return some rows, a slice or their numbers, of every tensor with a batch axis in front that is not marked as shared."""
    if isinstance(inputs, Tensor) and not isinstance(inputs, Shared):
        return inputs[rows]
    size = rows_of(inputs)

    def take(leaf: Any) -> Any:
        has_rows = isinstance(leaf, Tensor) and not isinstance(leaf, Shared) and leaf.ndim > 0 and leaf.shape[0] == size
        return leaf[rows] if has_rows else leaf

    return tree_map(take, inputs)


def hash_rows(inputs: Inputs) -> list[int]:
    """Return a number per row, equal for rows of equal bytes; positions that an `attention_mask` calls padding are left out.

    >>> len(set(hash_rows(torch.tensor([[1.0, 2.0], [2.0, 1.0], [1.0, 2.0]]))))
    2
    """
    leaves = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor) and not isinstance(leaf, Shared)]
    rows = [leaf.detach().cpu().reshape(len(leaf), math.prod(leaf.shape[1:])) for leaf in leaves]
    # a column of stride 0 counts as contiguous, and cannot be viewed: a copy can
    arrays = [array.clone(memory_format=torch.contiguous_format).view(torch.uint8).numpy() for array in rows]
    mask = inputs.get("attention_mask") if isinstance(inputs, dict) else None
    if isinstance(mask, Tensor) and mask.ndim == 2:
        kept = [mask.cpu().numpy() != 0 if leaf.shape == mask.shape else None for leaf in leaves]
        kept = [None if m is None else m.repeat(a.shape[1] // m.shape[1], 1) for m, a in zip(kept, arrays, strict=True)]
        pairs = list(zip(arrays, kept, strict=True))
        return [hash(tuple((a[i] if m is None else a[i][m[i]]).tobytes() for a, m in pairs)) for i in range(len(mask))]
    return [hash(tuple(parts)) for parts in zip(*(map(bytes, array) for array in arrays), strict=True)]


def is_table(inputs: Inputs) -> bool:
    """Return whether the inputs are one matrix, a row per example."""
    return isinstance(inputs, Tensor) and inputs.ndim == 2


def is_image(x: Inputs) -> bool:
    """Return whether inputs are one tensor (B, channels, height, width)."""
    return isinstance(x, Tensor) and x.ndim == 4


def flatten_inputs(x: Inputs) -> Tensor | None:
    """Return floating-point inputs as rows, (B, D). None if there are none or too many, and for series beside lengths, masks or
    ids: their padding is not part of them.
    """
    size = rows_of(x)
    leaves = [x] if isinstance(x, Tensor) else tree_leaves(dict(sorted(x.items())) if isinstance(x, dict) else x)
    rows = [t for t in leaves if isinstance(t, Tensor) and not isinstance(t, Shared) and t.shape[:1] == (size,)]
    floats = [t for t in rows if t.is_floating_point()]
    masked = len(floats) < len(rows) or (isinstance(x, dict) and "attention_mask" in x)
    padded = masked and any(t.ndim > 2 for t in floats)
    width = sum(t[0].numel() for t in floats)
    flat = [t.reshape(size, -1) for t in floats] if 0 < width <= WIDEST and not padded else []
    return torch.cat(flat, 1) if len(flat) > 1 else next(iter(flat), None)


def flatten_codes(x: Inputs) -> Tensor | None:
    """Return whole numbers beside the numbers of a table, (B, K); None if there are none, and for what may be tokens or masks."""
    if isinstance(x, Tensor) or (isinstance(x, dict) and {"attention_mask", "input_ids"} & x.keys()) or flatten_inputs(x) is None:
        return None
    size = rows_of(x)
    leaves = tree_leaves(dict(sorted(x.items())) if isinstance(x, dict) else x)
    rows = [t for t in leaves if isinstance(t, Tensor) and not isinstance(t, Shared) and t.shape[:1] == (size,)]
    alike = [t.shape for t in rows if t.is_floating_point() and t[0].numel() > 1]  # masks are as wide as what they mask
    codes = [t for t in rows if not t.is_floating_point() and t.ndim <= 2 and t.shape not in alike]
    return torch.cat([t.reshape(size, -1).long() for t in codes], 1) if codes else None


def concat_rows(parts: Sequence[Tensor | None]) -> Tensor | None:
    """Concatenate matrices, if none is missing and they are equally wide."""
    matrices = [part for part in parts if part is not None]
    alike = matrices and len(matrices) == len(parts) and len({m.shape[1] for m in matrices}) == 1
    return torch.cat(matrices) if alike else None


def check_unmasked(array: Any) -> None:
    """Raise if values of a numpy array are masked: numpy gives them as if they were not."""
    if np.ma.is_masked(array):
        raise DataError(
            f"Expected arrays without masked values, but got {int(np.ma.count_masked(array))} of them. "
            "Fill them, `array.filled(value)`, or drop their rows."
        )


@dataclass(frozen=True)
class Place:
    """Device and dtype of a model: batches are moved to the device, floating-point numbers cast to the dtype.

    `allow_nan`: inputs may be missing, for the model says what it makes of them.
    """

    device: torch.device
    dtype: torch.dtype
    allow_nan: bool = False

    @staticmethod
    def of(model: nn.Module | None, *, allow_nan: bool = False) -> Place:
        """Return the device and dtype of a model's first floating-point parameter; the CPU and float32 without a model."""
        tensors = [torch.empty(0, dtype=torch.float32, device="cpu")] if model is None else model.parameters()
        first = next(t for t in tensors if t.is_floating_point())
        return Place(first.device, first.dtype, allow_nan)

    def put(self, value: Any) -> Any:
        """Move one leaf of a batch; anything that is not an array or a tensor passes through."""
        if hasattr(value, "__array__") and not isinstance(value, Tensor):
            check_unmasked(value)
            array = np.asarray(value)
            if array.dtype.kind not in "biufc":
                raise DataError(f"Expected numeric arrays, but got {array.dtype}. Encode text, dates and missing values first.")
            # torch reads native numbers of at most 64 bits, in order and writeable
            native = np.dtype(np.float64) if array.dtype == np.longdouble else array.dtype.newbyteorder("=")
            reversed_ = any(stride < 0 for stride in array.strides)  # also where numpy calls them in order, as of one row
            value = torch.from_numpy(np.require(array.copy() if reversed_ else array, native, ["C", "W"]))
        if not isinstance(value, Tensor):
            return value
        if value.is_meta or value.is_nested or value.layout != torch.strided:
            kind = "on the device 'meta', without values" if value.is_meta else f"of layout {value.layout}; pass `.to_dense()`"
            if value.is_nested:
                kind = "that is nested; pass `torch.nested.to_padded_tensor(x, 0.0)`"
            raise DataError(f"Expected dense tensors with values, but got one {kind}.")
        moved = value.to(self.device, self.dtype if value.is_floating_point() else value.dtype)
        return shared(moved) if isinstance(value, Shared) else moved


def read_batch(batch: Any, place: Place, target: str, name: str, where: str) -> Batch:
    """Return inputs and targets of one batch as checked tensors on the model's device, at least one row, all finite."""
    inputs, targets = split_batch(batch, target, name)
    inputs, targets = tree_map(place.put, inputs), _as_targets(targets, place)
    check_inputs(inputs, where)
    if targets.shape[0] == 0 or rows_of(inputs) == 0:
        raise DataError(f"Expected at least one example in {where}, but it is empty.")
    if rows_of(inputs) != targets.shape[0]:
        raise ShapeError(
            f"Expected as many inputs as targets in {where}, but got {rows_of(inputs)} and {targets.shape[0]}. "
            "Check that both describe the same examples."
        )
    check_finite(inputs, targets, where, allow_nan=place.allow_nan)
    return mark_shared(inputs), next_tokens(inputs, targets) if is_mapping(batch) else targets


def is_mapping(batch: Any) -> bool:
    """Return whether a batch is a dict, or something like one, as the `BatchEncoding` of a tokenizer."""
    return hasattr(batch, "keys") and not hasattr(batch, "__array__")


def _as_inputs(inputs: Any) -> Inputs:
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
        return _as_inputs(batch[0]), batch[1]
    raise DataError(
        f"Expected `{name}` to be a DataLoader, a Dataset or a pair (inputs, targets), or batches of that form, "
        f"but got {type(batch).__name__}{f' of length {len(batch)}' if isinstance(batch, tuple | list) else ''}."
    )


def drop_targets(batch: Any, target: str) -> Inputs:
    """Return the inputs of a batch, with or without targets."""
    if isinstance(batch, tuple | list):
        return _as_inputs(batch[0] if len(batch) == 1 else split_batch(batch, target, "x")[0] if len(batch) == 2 else batch)
    return {name: value for name, value in dict(batch).items() if name != target} if is_mapping(batch) else batch


def _as_targets(targets: Any, place: Place) -> Tensor:
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


def check_finite(inputs: Inputs, targets: Tensor | None, where: str, *, allow_nan: bool | None = None) -> None:
    """Raise a DataError that names the first row with NaN or infinite numbers; inputs may hold NaN if `allow_nan`.

    None: so may nothing, and the caller has no such option.
    """
    for kind, leaves in (("inputs", tree_leaves(inputs)), ("targets", [targets])):
        for leaf in leaves:
            if not isinstance(leaf, Tensor) or not leaf.is_floating_point() or not leaf.ndim:
                continue
            # a finite sum has finite terms and needs no copy of a large tensor; a sum that overflows needs a closer look
            if bool(leaf.sum().isfinite()):
                continue
            wrong = leaf.isinf() if allow_nan and kind == "inputs" else ~leaf.isfinite()
            if bool(wrong.any()):
                row = int(wrong.view(leaf.shape[0], -1).any(1).nonzero()[0])
                what = "infinite" if allow_nan and kind == "inputs" else "NaN or infinite"
                offer = allow_nan is False and kind == "inputs" and bool(leaf.isnan().any())
                hint = ", or fit with `allow_nan=True` if the model handles missing values" if offer else ""
                raise DataError(f"Expected finite {kind}, but row {row} of {where} holds {what} values. "
                                f"Drop or impute such rows{hint}.")  # fmt: skip


def collate(parts: Sequence[Batch]) -> Batch:
    """Return consecutive batches as one; beside an `attention_mask` they may differ in length.

    Shorter ones are padded to the longest, in front if that is where the user's own padding is, else at the end. The mask gets 0,
    other inputs what they hold where it is 0 (or 0), class targets −100. A tensor without a row per example belongs to all rows.
    """
    inputs, targets = [x for x, _ in parts], [y for _, y in parts]
    masks = [x["attention_mask"] for x in inputs if isinstance(x, dict) and isinstance(x.get("attention_mask"), Tensor)]
    masked = len(masks) == len(parts)
    front = masked and any(bool((m[:, 0] == 0).any()) for m in masks) and all(bool((m[:, -1] != 0).all()) for m in masks)

    def concat(*leaves: Any) -> Any:
        if not isinstance(leaves[0], Tensor):
            return leaves[0]
        if any(isinstance(leaf, Shared) for leaf in leaves):
            if not all(torch.equal(leaf, leaves[0]) for leaf in leaves):
                raise ValueError("a tensor that all rows share differs between them")
            return shared(leaves[0])
        if not masked:
            return torch.cat(leaves)
        padding = [t[m == 0].flatten() for t, m in zip(leaves, masks, strict=True) if m.shape == t.shape[:2]]
        return concat_padded(leaves, fill=next((t[0].item() for t in padding if t.numel()), 0), front=front)

    ragged = masked and len({y.shape for y in targets}) > 1 and targets[0].ndim > 1 and not targets[0].is_floating_point()
    y = concat_padded([y.long() for y in targets], fill=IGNORED, front=front) if ragged else torch.cat(targets)
    return tree_map(concat, *inputs), y


def concat_padded(parts: Sequence[Tensor], dim: int = 0, *, fill: float | None = None, front: bool = False) -> Tensor:
    """Concatenate tensors along `dim`; shorter ones are padded along their other axes, at the end or in `front`.

    The padding is `fill`; None: NaN, −100 or False by type.

    >>> concat_padded([torch.tensor([[0.5, 1.0]]), torch.tensor([[2.0]])])
    tensor([[0.5000, 1.0000],
            [2.0000,    nan]])
    """
    shape = [max(sizes) for sizes in zip(*(part.shape for part in parts), strict=True)]
    if all([*part.shape[:dim], *part.shape[dim + 1 :]] == [*shape[:dim], *shape[dim + 1 :]] for part in parts):
        return torch.cat(list(parts), dim)
    shape[dim], dtype = sum(part.shape[dim] for part in parts), parts[0].dtype
    default = torch.nan if dtype.is_floating_point else False if dtype == torch.bool else IGNORED
    result = parts[0].new_full(shape, default if fill is None else fill)
    for part, block in zip(parts, result.split([part.shape[dim] for part in parts], dim), strict=True):
        sizes = zip(part.shape, block.shape, strict=True)
        block[tuple(slice(length - size, length) if front else slice(size) for size, length in sizes)] = part
    return result
