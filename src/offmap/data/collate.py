"""Consecutive batches as one, whatever their lengths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from offmap._torch_private import tree_map
from offmap._types import IGNORED
from offmap.data.batch import Batch
from offmap.data.inputs import Shared, shared


def join(parts: Sequence[Batch]) -> Batch:
    """Consecutive batches as one. Where an `attention_mask` tells padding apart they may differ in length: shorter ones are
    padded to the longest, in front if that is where the user's own padding is, else at the end.

    The mask gets 0, other inputs what they hold where it is 0 (or 0), class targets −100. What has not one row per example in
    every batch is shared by all.
    """
    inputs, targets = [x for x, _ in parts], [y for _, y in parts]
    masks = [x["attention_mask"] for x in inputs if isinstance(x, dict) and isinstance(x.get("attention_mask"), Tensor)]
    masked = len(masks) == len(parts)
    front = masked and any(bool((m[:, 0] == 0).any()) for m in masks) and all(bool((m[:, -1] != 0).all()) for m in masks)

    def joined(*leaves: Any) -> Any:
        if not isinstance(leaves[0], Tensor):
            return leaves[0]
        if any(isinstance(leaf, Shared) for leaf in leaves):
            if not all(torch.equal(leaf, leaves[0]) for leaf in leaves):
                raise ValueError("a tensor that all rows share differs between them")
            return shared(leaves[0])
        if not masked:
            return torch.cat(leaves)
        padding = [t[m == 0].flatten() for t, m in zip(leaves, masks, strict=True) if m.shape == t.shape[:2]]
        return lay(leaves, next((t[0].item() for t in padding if t.numel()), 0), front=front)

    ragged = masked and len({y.shape for y in targets}) > 1 and targets[0].ndim > 1 and not targets[0].is_floating_point()
    whole = lay([y.long() for y in targets], IGNORED, front=front) if ragged else torch.cat(targets)
    return tree_map(joined, *inputs), whole


def lay(parts: Sequence[Tensor], fill: float, dim: int = 0, *, front: bool = False) -> Tensor:
    """Tensors one after another along `dim`; shorter ones are filled up at the end of their other axes, or in front of them.

    >>> lay([torch.tensor([[1, 2]]), torch.tensor([[3]])], -100)
    tensor([[   1,    2],
            [   3, -100]])
    """
    shape = [max(sizes) for sizes in zip(*(part.shape for part in parts), strict=True)]
    shape[dim] = sum(part.shape[dim] for part in parts)
    if all(part.shape[:dim] == tuple(shape[:dim]) and part.shape[dim + 1 :] == tuple(shape[dim + 1 :]) for part in parts):
        return torch.cat(list(parts), dim)
    whole = parts[0].new_full(shape, fill)
    for part, piece in zip(parts, whole.split([part.shape[dim] for part in parts], dim), strict=True):
        places = zip(part.shape, piece.shape, strict=True)
        piece[tuple(slice(room - size, room) if front else slice(size) for size, room in places)] = part
    return whole
