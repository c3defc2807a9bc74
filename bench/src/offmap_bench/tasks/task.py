"""What every experiment is given: in-distribution data in three parts, and OOD data by name."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

Pair: TypeAlias = tuple[Tensor, Tensor]
"""Inputs and targets."""


@dataclass(frozen=True, eq=False)  # tensors have no equality: a task is itself
class Task:
    """`train`, `valid` and `test` are (inputs, targets) of one distribution; `ood` holds inputs of others, by name.

    `likelihood` is the name of the one that fits the targets, `outputs` how many numbers a net for it gives. Floats are
    float32, classes int64.
    """

    name: str
    train: Pair
    valid: Pair
    test: Pair
    ood: dict[str, Tensor] = field(repr=False)
    likelihood: str
    outputs: int

    @property
    def inputs(self) -> int:
        """How many numbers one example has."""
        return self.train[0][0].numel()


def pair(x: object, y: object) -> Pair:
    """Arrays as tensors: floats become float32, whole numbers int64.

    >>> [t.dtype for t in pair(np.zeros((2, 1)), np.array([0, 1]))]
    [torch.float32, torch.int64]
    """
    return tensor(x), tensor(y)


def tensor(values: object) -> Tensor:
    """One array as a float32 or int64 tensor of its own."""
    array = np.asarray(values)
    return torch.tensor(array, dtype=torch.float32 if array.dtype.kind == "f" else torch.int64)
