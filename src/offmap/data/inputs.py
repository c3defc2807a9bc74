"""Inputs of a model: one tensor, a tuple or a dict of them, cut into rows; some tensors belong to all rows."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from offmap._torch_private import NO_TORCH_FUNCTION, tree_leaves, tree_map
from offmap._types import Inputs


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
