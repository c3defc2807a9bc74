"""The processes that fit one guard together, as everything below the engine sees them: a rank, a size, a few exchanges.

`SINGLE_PROCESS` is one process by itself: nothing is sent, nothing is copied. `offmap.distributed.torchrun` has the group of several.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor


class Group(Protocol):
    """N processes, each with a rank from 0 on. Every one of them makes the same calls in the same order."""

    @property
    def rank(self) -> int:
        """Which of them this one is."""
        ...

    @property
    def size(self) -> int:
        """N."""
        ...

    def sum(self, *tensors: Tensor) -> None:
        """Replace every tensor, in place, by its sum over the ranks: the same bits on all of them."""
        ...

    def copy(self, *tensors: Tensor) -> None:
        """Replace every tensor, in place, by that of rank 0."""
        ...

    def tell(self, value: Any) -> list[Any]:
        """The plain values (as JSON has them) that all ranks tell, in their order."""
        ...

    def all_gather(self, tensors: Sequence[Tensor]) -> list[list[Tensor]]:
        """The tensors of all ranks, in their order; they may differ in number, shape and type."""
        ...


class Alone:
    """One process.

    >>> SINGLE_PROCESS.tell("here")
    ['here']
    """

    rank = 0
    size = 1

    def sum(self, *tensors: Tensor) -> None:
        """As they are."""

    def copy(self, *tensors: Tensor) -> None:
        """As they are."""

    def tell(self, value: Any) -> list[Any]:
        """What it tells itself."""
        return [value]

    def all_gather(self, tensors: Sequence[Tensor]) -> list[list[Tensor]]:
        """Its own."""
        return [list(tensors)]


SINGLE_PROCESS = Alone()


def part(group: Group, rows: int) -> slice:
    """Which of so many rows are this rank's: one after another, the same number up to one; none where rows are too few.

    >>> part(SINGLE_PROCESS, 7)
    slice(0, 7, None)
    """
    return slice(rows * group.rank // group.size, rows * (group.rank + 1) // group.size)


def joined(group: Group, tensor: Tensor | None, dim: int = 0) -> Tensor:
    """What the ranks made of their parts as one tensor; None from those that had none."""
    if group.size == 1:
        assert tensor is not None
        return tensor
    parts = group.all_gather([] if tensor is None else [tensor])
    return torch.cat([own for each in parts for own in each], dim)
