"""Which columns of a file are what: inputs and targets by name, as a guard file remembers them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offmap.data.tables.block import Table
from offmap.data.tables.columns import Column, parsed, plain
from offmap.data.tables.formats import opened
from offmap.errors import ConfigError, DataError, FileError, nearest

Array = NDArray[Any]


class ColumnError(ConfigError):
    """An option names a column that cannot be."""


@dataclass(frozen=True)
class Schema:
    """`inputs` in the order of the net, None if nobody said; `classes` are words of the target in the order of the net."""

    inputs: tuple[str, ...] | None
    targets: tuple[str, ...] = ()
    classes: tuple[str, ...] | None = None

    def record(self) -> dict[str, Any]:
        """As plain values, for a guard file."""
        return {"inputs": list(self.inputs or ()), "targets": list(self.targets), "classes": self.classes and list(self.classes)}

    @staticmethod
    def of(about: Mapping[str, Any], path: Path) -> Schema:
        """What a guard file says; one that was made in Python may say nothing."""
        values = {name: about.get(name) for name in ("inputs", "targets", "classes")}
        for name, value in values.items():
            if value is not None and not (isinstance(value, list) and all(isinstance(each, str) for each in value)):
                raise FileError(f"Expected names as {name!r} in the guard file {path}, but got {str(value)[:60]!r}.")
        found = {name: None if value is None else tuple(value) for name, value in values.items()}
        return Schema(found["inputs"] or None, found["targets"] or (), found["classes"])

    @staticmethod
    def choose(table: Table, targets: Sequence[str], drop: Sequence[str]) -> Schema:
        """All columns but the targets, by default the last one, and those to drop."""
        chosen = [each for name in targets for each in columns_of(table, name, "--target")] or table.names[-1:]
        out = {each for name in drop for each in columns_of(table, name, "--drop")} | set(chosen)
        inputs = tuple(name for name in table.names if name not in out)
        if not inputs:
            raise DataError(f"Expected inputs in {table.path}, but no column is left beside {', '.join(map(repr, out))}.")
        return Schema(inputs, tuple(chosen))

    def found(self, table: Table, drop: Sequence[str] = ()) -> tuple[tuple[str, ...], list[str]]:
        """The inputs of another file, in the order of the net, and the columns that are of no use.

        Where nobody said which columns are inputs, all are but the target and those to drop, in the order of the file.
        """
        if self.inputs is None:
            out = {each for name in drop for each in columns_of(table, name, "--drop")} | set(self.targets)
            return tuple(name for name in table.names if name not in out), []
        self._refuse(table, self.inputs)
        return self.inputs, [name for name in table.names if name not in self.inputs and name not in self.targets]

    def read(
        self, path: Path, separator: str | None, *, targets: bool = True, drop: Sequence[str] = ()
    ) -> tuple[Array, dict[str, Column]]:
        """Inputs (n, ...) of a whole file, in single precision, and its targets by name."""
        with opened(path, separator) as table:
            inputs, _ = self.found(table, drop)
            wanted = self.targets if targets else ()
            self._refuse(table, wanted)
            blocks = list(table.blocks(inputs, wanted))
        if not blocks:
            raise DataError(f"Expected rows in {path}, but there are none.")
        raw = {name: [value for block in blocks for value in block.raw[name]] for name in wanted}
        return np.concatenate([block.x.astype(np.float32) for block in blocks]), {n: column(n, v, path) for n, v in raw.items()}

    def answers(self, columns: Mapping[str, Column], path: Path, *, quantity: bool) -> Array:
        """Targets as the likelihood has them: float (n,) or (n, K), or whole (n,)."""
        if quantity:
            numbers = [values for values in columns.values() if not isinstance(values, list)]
            if len(numbers) < len(columns):
                raise DataError(f"Expected numbers in the target {', '.join(map(repr, columns))} of {path}, but got words.")
            y = np.stack(numbers, 1).astype(np.float32)
            return y[:, 0] if len(numbers) == 1 else y
        (values,) = columns.values()
        if self.classes is None:
            if isinstance(values, list) or (values != values.round()).any() or (values < 0).any():
                raise DataError(f"Expected whole numbers from 0 on in the target {self.targets[0]!r} of {path}.")
            return values.astype(np.int64)
        words = values if isinstance(values, list) else [f"{value:g}" for value in values.tolist()]
        unknown = sorted({str(word) for word in words} - set(self.classes))
        if unknown:
            raise DataError(f"Expected {list(self.classes)} in the target {self.targets[0]!r} of {path}, but got {unknown[0]!r}.")
        return np.array([self.classes.index(str(word)) for word in words])

    def _refuse(self, table: Table, names: Sequence[str]) -> None:
        lost = [name for name in names if name not in table.names]
        if lost:
            more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
            raise DataError(
                f"Expected the columns of fit time in {table.path}, but {lost[0]!r}{more} is missing: it has "
                f"{', '.join(map(repr, table.names[:8]))}{', …' if len(table.names) > 8 else ''}."
            )


def columns_of(table: Table, name: str, option: str) -> list[str]:
    """The column of that name, or all of an NPZ array."""
    found = [each for each in table.names if each == name or each.startswith(f"{name}[")]
    if not found:
        raise ColumnError(f"Expected {option} to name a column of {table.path}, {nearest(name, table.names)}, but got {name!r}.")
    return found


def column(name: str, values: Sequence[Any], path: Path) -> Column:
    """A target as numbers or words; none may be missing."""
    text = all(isinstance(value, str) for value in values)
    result = parsed(name, values, path, False) if text and path.suffix in (".csv", ".gz") else plain(name, values, path, False)
    gaps = [i for i, value in enumerate(result) if value is None or value != value]
    if gaps:
        raise DataError(f"Expected a target in each row of {path}, but row {gaps[0] + 1} has no value in column {name!r}.")
    if not isinstance(result, list) and not np.isfinite(result).all():
        raise DataError(f"Expected finite targets in column {name!r} of {path}, but some are infinite.")
    return result
