"""Consecutive batches as one, whatever their lengths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from offmap._torch_private import tree_map
from offmap._types import IGNORED
from offmap.data.batch import Batch, Shared, shared


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
    """Concatenate tensors along `dim`; shorter ones are padded along their other axes.

    Args:
        parts: Tensors with the same number of axes.
        dim: The axis along which they follow each other.
        fill: The value of the padding; None: NaN, −100 or False by type.
        front: Whether to pad in front instead of at the end.

    >>> concat_padded([torch.tensor([[0.5, 1.0]]), torch.tensor([[2.0]])])
    tensor([[0.5000, 1.0000],
            [2.0000,    nan]])
    """
    shape = [max(sizes) for sizes in zip(*(part.shape for part in parts), strict=True)]
    shape[dim] = sum(part.shape[dim] for part in parts)
    if all(part.shape[:dim] == tuple(shape[:dim]) and part.shape[dim + 1 :] == tuple(shape[dim + 1 :]) for part in parts):
        return torch.cat(list(parts), dim)
    dtype = parts[0].dtype
    default = torch.nan if dtype.is_floating_point else False if dtype == torch.bool else IGNORED
    result = parts[0].new_full(shape, default if fill is None else fill)
    for part, block in zip(parts, result.split([part.shape[dim] for part in parts], dim), strict=True):
        sizes = zip(part.shape, block.shape, strict=True)
        block[tuple(slice(length - size, length) if front else slice(size) for size, length in sizes)] = part
    return result
