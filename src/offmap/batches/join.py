"""Consecutive batches as one, whatever their lengths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from offmap._types import Inputs
from offmap.core.forward import Shared, shared


def join(parts: Sequence[Inputs]) -> Inputs:
    """Inputs of consecutive batches as one, padded to the longest where an `attention_mask` tells padding apart.

    What has not one row per example in every batch is shared by all.
    """
    masks = [x.get("attention_mask") if isinstance(x, dict) else None for x in parts]

    def joined(*leaves: Any) -> Any:
        if not isinstance(leaves[0], Tensor):
            return leaves[0]
        if any(isinstance(leaf, Shared) for leaf in leaves):
            if not all(torch.equal(leaf, leaves[0]) for leaf in leaves):
                raise ValueError("a tensor that all rows share differs between them")
            return shared(leaves[0])
        if masks[0] is None or len({leaf.shape[1:] for leaf in leaves}) == 1:
            return torch.cat(leaves)
        held = [t[m == 0] for t, m in zip(leaves, masks, strict=True) if m is not None and m.shape == t.shape[:2]]
        return lay(leaves, next((t.flatten()[0].item() for t in held if t.numel()), 0))

    return tree_map(joined, *parts)


def lay(parts: Sequence[Tensor], fill: float, dim: int = 0) -> Tensor:
    """Tensors one after another along `dim`; shorter ones are filled up at the end of their other axes.

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
        piece[tuple(slice(size) for size in part.shape)] = part
    return whole
