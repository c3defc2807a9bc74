"""Rows of a table through a guard, block by block: what a table of scores has for each of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from offmap.data.tables.schema import ColumnError, Schema, find_columns
from offmap.data.tables.table import Table, Write
from offmap.detector import Result
from offmap.errors import DataError
from offmap.guard import Guard


@dataclass(frozen=True)
class Chosen:
    """Columns of a table: inputs in the order of the net, those to copy, and those of no use."""

    inputs: tuple[str, ...]
    kept: tuple[str, ...] = ()
    spare: tuple[str, ...] = ()


def choose(data: Table, schema: Schema, keep: Sequence[str], drop: Sequence[str]) -> Chosen:
    """By the names of fit time."""
    inputs, unused = schema.find_inputs(data, drop)
    kept = tuple(each for name in keep for each in find_columns(data, name, "--keep"))
    return Chosen(inputs, kept, tuple(name for name in unused if name not in kept))


def score_rows(
    guard: Guard, schema: Schema, data: Table, chosen: Chosen, write: Write, heard: Callable[[int], None]
) -> tuple[int, int]:
    """How many rows were written, and how many of them are off the map; `heard` is told the first after every block."""
    rows = flagged = 0
    for block in data.blocks(chosen.inputs, chosen.kept):
        result = guard(torch.from_numpy(block.x))
        columns, copied = answered(result, schema), {name: _raw(values) for name, values in block.raw.items()}
        if columns.keys() & copied.keys():
            raise ColumnError(f"Expected --keep to name other columns than the output has already, {', '.join(columns)}.")
        write(copied | columns)
        rows, flagged = rows + len(block.x), flagged + int(result.ood.sum())
        heard(rows)
    if not rows:
        raise DataError(f"Expected rows in {data.path}, but there are none.")
    return rows, flagged


def answered(result: Result, schema: Schema) -> dict[str, NDArray[Any]]:
    """Columns of the output, (n,) each: score, ood and p_value, then mean and std, or label and a probability for each class.

    Several targets have a mean and a std each. Predictions at many positions are left out.
    """
    columns = {"score": _array(result.score), "ood": _array(result.ood), "p_value": _array(result.p_value)}
    if result.mean is not None and result.std is not None:
        for name, values in (("mean", result.mean), ("std", result.std)):
            if values.ndim == 1 or values.shape[1:] == (1,):
                columns[name] = _array(values.reshape(-1))
            elif values.ndim == 2:
                labels = schema.targets if len(schema.targets) == values.shape[1] else range(values.shape[1])
                columns |= {f"{name}_{label}": _array(each) for label, each in zip(labels, values.unbind(1), strict=True)}
    if result.probs is not None and result.label is not None and result.probs.ndim == 2:
        labels = schema.classes or range(result.probs.shape[1])
        columns["label"] = _array(result.label) if schema.classes is None else np.array(schema.classes)[_array(result.label)]
        columns |= {f"probability_{label}": _array(each) for label, each in zip(labels, result.probs.unbind(1), strict=True)}
    return columns


def _array(values: Tensor) -> NDArray[Any]:
    values = values.detach().cpu()
    return (values.float() if values.dtype in (torch.bfloat16, torch.float16) else values).numpy()


def _raw(values: list[Any]) -> NDArray[Any]:
    """A copied column: numbers of one kind, else words."""
    kinds = {type(value) for value in values}
    plain = kinds <= {bool} or kinds <= {int} or kinds <= {int, float}
    return np.array(values) if plain else np.array(["" if value is None else str(value) for value in values])
