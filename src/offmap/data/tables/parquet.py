"""Parquet by pyarrow: columns that are asked for, a batch at a time."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offmap.data.tables.block import Block, Table, finite, no_number, readable, rows_for
from offmap.extras import require

WHAT = "a table as Parquet"


@dataclass
class Parquet:
    """An open Parquet file."""

    path: Path
    names: list[str]
    file: Any

    def rows(self, done: int) -> int | None:
        """The file says it."""
        return int(self.file.metadata.num_rows)

    def blocks(self, numbers: Sequence[str], raw: Sequence[str] = ()) -> Iterator[Block]:
        """Numbers may be truth values and decimals; nulls are missing."""
        wanted = list(dict.fromkeys([*numbers, *raw]))
        done = 0
        with readable(self.path, WHAT):
            batches = self.file.iter_batches(batch_size=rows_for(len(wanted)), columns=wanted, use_threads=False)
        while (batch := self._next(batches)) is not None:
            x = np.empty((batch.num_rows, len(numbers)))
            with readable(self.path, WHAT):
                for i, name in enumerate(numbers):
                    x[:, i] = self._numbers(name, batch.column(name), done)
                kept = {name: batch.column(name).to_pylist() for name in raw}
            yield Block(finite(x, numbers, self.path, done), kept)
            done += batch.num_rows

    def _next(self, batches: Iterator[Any]) -> Any:
        with readable(self.path, WHAT):
            return next((batch for batch in batches if batch.num_rows), None)

    def _numbers(self, name: str, column: Any, done: int) -> NDArray[Any]:
        arrow = require("pyarrow", "parquet")
        kind, types = column.type, arrow.types
        if not (types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind) or types.is_decimal(kind)):
            first = next((i for i, value in enumerate(column) if value.is_valid), 0)
            raise no_number(self.path, name, done + first, column[first].as_py())
        return column.cast(arrow.float64(), safe=False).to_numpy(zero_copy_only=False)


@contextmanager
def open_parquet(path: Path, separator: str | None) -> Generator[Table]:
    """Its footer is read."""
    parquet = require("pyarrow.parquet", "parquet")
    with readable(path, WHAT):
        file = parquet.ParquetFile(path, pre_buffer=False)
    with file:
        yield Parquet(path, list(file.schema_arrow.names), file)
