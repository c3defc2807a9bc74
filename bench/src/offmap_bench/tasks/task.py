"""What every experiment is given: in-distribution data in three parts, and OOD data by name."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from offmap._types import Inputs
from offmap.errors import ConfigError, DataError, nearest

Pair: TypeAlias = tuple[Inputs, Tensor]
"""Inputs, a tensor or a dict of tensors, and targets."""

Array: TypeAlias = NDArray[np.float64]
Index: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True, eq=False)  # tensors have no equality: a task is itself
class Task:
    """`train`, `valid` and `test` are (inputs, targets) of one distribution; `ood` holds inputs of others, by name.

    `likelihood` is the name of the one that fits the targets, `outputs` how many numbers a net for it gives. Floats are
    float32, classes int64. `unit` is what targets were divided by.
    """

    name: str
    train: Pair
    valid: Pair
    test: Pair
    ood: dict[str, Inputs] = field(repr=False)
    likelihood: str
    outputs: int
    unit: float = 1.0

    @property
    def inputs(self) -> int:
        """How many numbers one example has, where inputs are one tensor."""
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


def moments(values: Array) -> tuple[Array, Array]:
    """Mean and standard deviation of each column; 1 for columns that do not vary."""
    mean, spread = values.mean(0), values.std(0)
    # the mean of equal numbers is rounded, so that their deviation may be a few last digits instead of 0
    return mean, np.where(spread > 1e-12 * np.maximum(np.abs(mean), 1e-300), spread, 1.0)


def split(rows: Index, seed: int, shares: tuple[float, float] = (0.1, 0.05)) -> tuple[Index, Index, Index]:
    """Training, validation and test rows: a tenth is for testing, a twentieth of the rest for validation, rounded up.

    `shares` are others, of all rows and of the rest.

    >>> [len(part) for part in split(np.arange(154), 0)]
    [131, 7, 16]
    """
    mixed = np.random.RandomState(seed).permutation(rows)
    test = math.ceil(shares[0] * len(mixed))
    valid = math.ceil(shares[1] * (len(mixed) - test))
    return mixed[test + valid :], mixed[test : test + valid], mixed[:test]


def check_name(what: str, value: object, valid: Collection[str]) -> str:
    """Return a name if it is valid, else raise with the nearest that is."""
    if not isinstance(value, str) or value not in valid:
        raise ConfigError(f"Expected {what} {nearest(str(value), valid)}, but got {value!r}.")
    return value


def table_task(
    name: str, x: Array, y: NDArray[Any], parts: Sequence[Index], ood: Mapping[str, Index], *, likelihood: str = "gaussian"
) -> Task:
    """Rows of a table as a task. Inputs, and targets but classes, are standardised by the first of `parts`, the training rows."""
    classes = likelihood == "categorical"
    shift, scale = moments(x[parts[0]])
    middle, unit = (0, 1) if classes else moments(y[parts[0]])
    train, valid, test = (pair((x[p] - shift) / scale, y[p] if classes else (y[p] - middle) / unit) for p in parts)
    sets: dict[str, Inputs] = {label: tensor((x[rows] - shift) / scale) for label, rows in ood.items()}
    return Task(name, train, valid, test, sets, likelihood, 2, float(unit))


def data_root(holds: str) -> Path:
    """The folder that OFFMAP_DATA names."""
    root = os.environ.get("OFFMAP_DATA")
    if not root:
        raise DataError(
            f"Expected OFFMAP_DATA to name the folder of downloaded data sets, but it is not set. Set it to a folder that holds "
            f"`{holds}`, or pass `folder=`."
        )
    return Path(root)
