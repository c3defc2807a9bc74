"""Ranks that are threads of this process: what several do together, where a failure and a debugger can see it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any, TypeVar

import torch
from torch import Tensor

from offmap.distributed.group import Group

T = TypeVar("T")


class Thread(Group):
    """The group as one of its ranks sees it; all share a board, and wait for each other."""

    def __init__(self, rank: int, board: list[Any], gate: Barrier) -> None:
        self.rank, self.size, self.board, self.gate = rank, len(board), board, gate

    def _all(self, value: Any) -> list[Any]:
        self.board[self.rank] = value
        self.gate.wait()
        found = list(self.board)
        self.gate.wait()
        return found

    def all_reduce(self, *tensors: Tensor) -> None:
        everyone = self._all([t.clone() for t in tensors])
        for tensor, *parts in zip(tensors, *everyone, strict=True):
            with torch.no_grad():
                tensor.copy_(torch.stack(parts).sum(0))

    def broadcast(self, *tensors: Tensor) -> None:
        for tensor, first in zip(tensors, self._all([t.clone() for t in tensors])[0], strict=True):
            with torch.no_grad():
                tensor.copy_(first)

    def all_gather_object(self, value: Any) -> list[Any]:
        return [json.loads(text) for text in self._all(json.dumps(value))]

    def all_gather(self, tensors: Sequence[Tensor]) -> list[list[Tensor]]:
        return [[t.clone() for t in each] for each in self._all(list(tensors))]


def in_ranks(size: int, job: Callable[[Thread], T]) -> list[T]:
    """What `job(group)` gives on each of so many ranks; an error of one ends the others too."""
    board, gate = [None] * size, Barrier(size, timeout=60)

    def run(rank: int) -> T:
        try:
            return job(Thread(rank, board, gate))
        except BaseException:
            gate.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        return [each.result() for each in [pool.submit(run, rank) for rank in range(size)]]
