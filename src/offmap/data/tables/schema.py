"""Which columns of a table are inputs and targets, as a guard file stores them; and their values as inputs and targets."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offmap.data.tables.table import MISSING, Table, open_table, parse_number
from offmap.errors import ConfigError, DataError, FileError, nearest

MAX_UNPACKED = 1 << 28  # bytes of a table that is read as a whole, or 20 × the file if that is more

Array = NDArray[Any]
Column = NDArray[np.float64] | list[str | None]
"""Numbers, NaN where one is missing, or words, None where one is missing."""


class ColumnError(ConfigError):
    """An option names a column that is not there."""


@dataclass(frozen=True)
class Schema:
    """Names of columns: inputs, in the order of the model, or None for all but the targets; classes are words of the target.

    `allow_nan`: inputs may be missing. A guard file has that elsewhere.
    """

    inputs: tuple[str, ...] | None
    targets: tuple[str, ...] = ()
    classes: tuple[str, ...] | None = None
    allow_nan: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for a guard file."""
        return {"inputs": list(self.inputs or ()), "targets": list(self.targets), "classes": self.classes and list(self.classes)}

    @staticmethod
    def from_dict(about: Mapping[str, Any], path: Path) -> Schema:
        """Read the entries of the guard file at `path`; a guard that was fitted in Python has none."""
        fields: list[tuple[str, ...] | None] = []
        for name in ("inputs", "targets", "classes"):
            value = about.get(name)
            if value is not None and not (isinstance(value, list) and all(isinstance(word, str) for word in value)):
                raise FileError(f"Expected names as {name!r} in the guard file {path}, but got {str(value)[:60]!r}.")
            fields.append(None if value is None else tuple(value))
        return Schema(fields[0] or None, fields[1] or (), fields[2])

    @staticmethod
    def choose(table: Table, targets: Sequence[str], drop: Sequence[str]) -> Schema:
        """Take all columns but the targets, by default the last one, and those to drop, as the inputs."""
        chosen = [column for name in targets for column in find_columns(table, name, "--target")] or table.names[-1:]
        excluded = {column for name in drop for column in find_columns(table, name, "--drop")} | set(chosen)
        inputs = tuple(name for name in table.names if name not in excluded)
        if not inputs:
            raise DataError(f"Expected inputs in {table.path}, but no column is left beside {', '.join(map(repr, excluded))}.")
        return Schema(inputs, tuple(chosen))

    def find_inputs(self, table: Table, drop: Sequence[str] = ()) -> tuple[tuple[str, ...], list[str]]:
        """Return the inputs in a table, in the order of the model, and the names of unused columns."""
        if self.inputs is None:
            excluded = {column for name in drop for column in find_columns(table, name, "--drop")} | set(self.targets)
            return tuple(name for name in table.names if name not in excluded), []
        self._check_columns(table, self.inputs)
        known = {*self.inputs, *self.targets}
        return self.inputs, [name for name in table.names if name not in known]

    def read(
        self, path: Path, separator: str | None, *, targets: bool = True, drop: Sequence[str] = ()
    ) -> tuple[Array, dict[str, Column]]:
        """Read a whole file: inputs (n, ...) in single precision, and targets by name."""
        with open_table(path, separator) as table:
            inputs, _ = self.find_inputs(table, drop)
            names = self.targets if targets else ()
            self._check_columns(table, names)
            x, values, size = list[Array](), {name: list[Any]() for name in names}, 0
            most = max(MAX_UNPACKED, 20 * path.stat().st_size)
            for block in table.blocks(inputs, names, allow_nan=self.allow_nan):
                size += block.x.nbytes + 64 * len(block.x) * len(names)
                if size > most:
                    raise DataError(f"{path} unpacks to more than {most} bytes. Save it uncompressed, or pass fewer rows.")
                x.append(block.x.astype(np.float32))
                for name in names:
                    values[name] += block.raw[name]
            if not x:
                raise DataError(f"Expected rows in {path}, but there are none.")
            columns = {name: parse_column(table, name, values[name]) for name in names}
        for name, column in columns.items():
            missing = [i for i, value in enumerate(column) if value is None or value != value]
            if missing:
                raise DataError(f"Each row of {path} needs a target, but row {missing[0] + 1} has no value in column {name!r}.")
            if not isinstance(column, list) and not np.isfinite(column).all():
                raise DataError(f"Expected finite targets in column {name!r} of {path}, but some are infinite.")
        return np.concatenate(x), columns

    def encode_targets(self, columns: Mapping[str, Column], path: Path, *, numeric: bool) -> Array:
        """Encode targets for a likelihood: float (n,) or (n, K) if numeric, else integers (n,)."""
        if numeric:
            numbers = [values for values in columns.values() if not isinstance(values, list)]
            if len(numbers) < len(columns):
                raise DataError(f"Expected numbers in the target {', '.join(map(repr, columns))} of {path}, but got text.")
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

    def _check_columns(self, table: Table, names: Sequence[str]) -> None:
        there = set(table.names)
        missing = [name for name in names if name not in there]
        if missing:
            more = f" and {len(missing) - 1} more are" if len(missing) > 1 else " is"
            raise DataError(
                f"Expected the columns of fit time in {table.path}, but {missing[0]!r}{more} missing: it has "
                f"{', '.join(map(repr, table.names[:8]))}{', …' if len(table.names) > 8 else ''}."
            )


def find_columns(table: Table, name: str, option: str) -> list[str]:
    """Return the column of that name, or all columns of an NPZ array; `option` is for the error."""
    columns = [column for column in table.names if column == name or column.startswith(f"{name}[")]
    if not columns:
        raise ColumnError(f"Expected {option} to name a column of {table.path}, {nearest(name, table.names)}, but got {name!r}.")
    return columns


def parse_column(table: Table, name: str, values: Sequence[Any], *, words: bool = False) -> Column:
    """Parse the values of a column as numbers or words; truth values are words, and with `words` so are numbers.

    In a format without types, words that are all numbers become numbers; a few that are not, among many numbers, are refused.
    """
    types = {type(value) for value in values if value is not None}
    if table.typed and not (types <= {bool, str} or (words and types <= {bool, str, int, float})):
        try:
            return np.array([math.nan if value is None else float(value) for value in values], dtype=np.float64)
        except (TypeError, ValueError, OverflowError) as error:
            listed = ", ".join(sorted(kind.__name__ for kind in types))
            raise DataError(f"Expected numbers or words in column {name!r} of {table.path}, but got {listed}.") from error
    texts = ["" if value is None or value != value else str(value) for value in values]
    cleaned = [None if text.strip().lower() in MISSING else text if table.typed else text.strip() for text in texts]
    if table.typed or words:
        return cleaned
    numbers = [parse_number(text) for text in cleaned]
    wrong = [i for i, text in enumerate(cleaned) if text is not None and numbers[i] is None]
    if not wrong:
        return np.array([math.nan if number is None else number for number in numbers], dtype=np.float64)
    count = sum(text is not None for text in cleaned)
    if count - len(wrong) > count / 2:  # a mistake rather than a list of words
        raise DataError(
            f"Expected numbers in column {name!r} of {table.path}, but row {wrong[0] + 1} has {cleaned[wrong[0]]!r} "
            f"({len(wrong)} such values). Correct them, or name the column in `words` if it holds names."
        )
    return cleaned
