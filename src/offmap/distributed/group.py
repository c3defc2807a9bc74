"""The processes that fit one guard together: a rank, a size, a few collectives.

`SINGLE_PROCESS` is one process by itself: nothing is sent, nothing is copied. `distributed/process_group.py` has the group of
several.
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
        """The number of this process."""
        ...

    @property
    def size(self) -> int:
        """The number of processes N."""
        ...

    def all_reduce(self, *tensors: Tensor) -> None:
        """Replace every tensor, in place, by its sum over the ranks: the same bits on all of them."""
        ...

    def broadcast(self, *tensors: Tensor) -> None:
        """Replace every tensor, in place, by that of rank 0."""
        ...

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return the plain values of all ranks, in their order."""
        ...

    def all_gather(self, tensors: Sequence[Tensor]) -> list[list[Tensor]]:
        """Return the tensors of all ranks, in their order; they may differ in number, shape and type."""
        ...


class SingleProcess:
    """One process by itself.

    >>> SINGLE_PROCESS.all_gather_object("here")
    ['here']
    """

    rank = 0
    size = 1

    def all_reduce(self, *tensors: Tensor) -> None:
        """Leave the tensors as they are."""

    def broadcast(self, *tensors: Tensor) -> None:
        """Leave the tensors as they are."""

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return the value in a list."""
        return [value]

    def all_gather(self, tensors: Sequence[Tensor]) -> list[list[Tensor]]:
        """Return the tensors in a list."""
        return [list(tensors)]


SINGLE_PROCESS = SingleProcess()


def shard_slice(group: Group, rows: int) -> slice:
    """Return which of so many rows are this rank's: consecutive ones, as many as any other's up to one.

    >>> shard_slice(SINGLE_PROCESS, 7)
    slice(0, 7, None)
    """
    return slice(rows * group.rank // group.size, rows * (group.rank + 1) // group.size)


def all_gather_concat(group: Group, tensor: Tensor | None, dim: int = 0) -> Tensor:
    """Return the shards of all ranks as one tensor; None from ranks without rows."""
    if group.size == 1:
        assert tensor is not None
        return tensor
    parts = group.all_gather([] if tensor is None else [tensor])
    return torch.cat([part for parts_of_rank in parts for part in parts_of_rank], dim)
