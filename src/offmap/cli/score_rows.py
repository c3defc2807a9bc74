"""Score the rows of one table, block by block, and write a row of scores for each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from offmap.data.tables.images import FILE, IMAGE, ImageTransform
from offmap.data.tables.schema import ColumnError, Schema, find_columns
from offmap.data.tables.table import Table, Write
from offmap.detector import Result
from offmap.errors import DataError
from offmap.guard import Guard


@dataclass(frozen=True)
class ScoreOptions:
    """What decides which scores are written, beside the guard and the data.

    Args:
        keep: Columns to copy to the output.
        drop: Columns that are no inputs, for guards that store no columns.
        separator: The CSV delimiter; None to detect it.
        transform: How images become inputs; None for tables.
    """

    keep: tuple[str, ...] = ()
    drop: tuple[str, ...] = ()
    separator: str | None = None
    transform: ImageTransform | None = None


@dataclass(frozen=True)
class Selection:
    """Columns of a table: the inputs in the order of the model, those to copy, and those that are not used."""

    inputs: tuple[str, ...]
    keep: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()


def select_columns(table: Table, schema: Schema, options: ScoreOptions) -> Selection:
    """Find the columns of fit time in a table, by name."""
    if options.transform is not None:
        return Selection((IMAGE,), (FILE,))
    inputs, unused = schema.find_inputs(table, options.drop)
    keep = tuple(column for name in options.keep for column in find_columns(table, name, "--keep"))
    return Selection(inputs, keep, tuple(name for name in unused if name not in keep))


def score_rows(
    guard: Guard, schema: Schema, table: Table, columns: Selection, write: Write, report: Callable[[int], None]
) -> tuple[int, int]:
    """Score all rows; call `report` with their number after every block. Return the number of rows, and of those off the map."""
    rows = flagged = 0
    for block in table.blocks(columns.inputs, columns.keep):
        result = guard(torch.from_numpy(block.x))
        scores, copied = result_columns(result, schema), {name: _to_array(values) for name, values in block.raw.items()}
        if scores.keys() & copied.keys():
            raise ColumnError(f"Expected --keep to name other columns than the output has already, {', '.join(scores)}.")
        write(copied | scores)
        rows, flagged = rows + len(block.x), flagged + int(result.ood.sum())
        report(rows)
    if not rows:
        raise DataError(f"Expected rows in {table.path}, but there are none.")
    return rows, flagged


def result_columns(result: Result, schema: Schema) -> dict[str, NDArray[Any]]:
    """Return the columns of the output, (n,) each: score, ood and p_value, then mean and std, or label and probabilities.

    Several targets have a mean and a std each. Predictions at several positions are left out.
    """
    columns = {"score": _to_numpy(result.score), "ood": _to_numpy(result.ood), "p_value": _to_numpy(result.p_value)}
    if result.mean is not None and result.std is not None:
        for name, values in (("mean", result.mean), ("std", result.std)):
            if values.ndim == 1 or values.shape[1:] == (1,):
                columns[name] = _to_numpy(values.reshape(-1))
            elif values.ndim == 2:
                labels = schema.targets if len(schema.targets) == values.shape[1] else range(values.shape[1])
                columns |= {f"{name}_{label}": _to_numpy(v) for label, v in zip(labels, values.unbind(1), strict=True)}
    if result.probs is not None and result.label is not None and result.probs.ndim == 2:
        labels, label = schema.classes or range(result.probs.shape[1]), _to_numpy(result.label)
        columns["label"] = label if schema.classes is None else np.array(schema.classes)[label]
        columns |= {f"probability_{label}": _to_numpy(v) for label, v in zip(labels, result.probs.unbind(1), strict=True)}
    return columns


def _to_numpy(values: Tensor) -> NDArray[Any]:
    values = values.detach().cpu()
    return (values.float() if values.dtype in (torch.bfloat16, torch.float16) else values).numpy()


def _to_array(values: list[Any]) -> NDArray[Any]:
    """Convert a copied column: numbers of one type, else words."""
    types = {type(value) for value in values}
    numeric = types <= {bool} or types <= {int} or types <= {int, float}
    return np.array(values) if numeric else np.array(["" if value is None else str(value) for value in values])
