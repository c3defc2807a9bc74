"""Parquet by pyarrow, a batch at a time."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

from numpy.typing import NDArray

from offmap.checks import require
from offmap.data.tables.table import FORMATS, Columns, Table, Write, rows_per_block
from offmap.errors import DataError


class ParquetTable(Table):
    """An open Parquet file; nulls are missing values."""

    kind: ClassVar[str] = "a table as Parquet"
    writable: ClassVar[bool] = True

    def open(self, separator: str | None, stack: ExitStack) -> list[str]:
        """Read the footer."""
        parquet = require("pyarrow.parquet", "parquet")
        self.file: Any = stack.enter_context(parquet.ParquetFile(self.path, pre_buffer=False))
        return list(self.file.schema_arrow.names)

    def rows(self, done: int) -> int | None:
        """Return the number of rows, as the footer has it."""
        return int(self.file.metadata.num_rows)

    def chunks(self, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
        """Yield pyarrow arrays by column. Batches, as a damaged file may claim row groups of billions of rows."""
        size = rows_per_block(len(columns))
        for batch in self.file.iter_batches(batch_size=size, columns=list(columns), use_threads=False):
            yield {name: batch.column(name) for name in columns}

    def to_numbers(self, name: str, values: Any, done: int) -> NDArray[Any]:
        """Convert integers, floats, truth values and decimals."""
        arrow = require("pyarrow", "parquet")
        numeric = (arrow.types.is_integer, arrow.types.is_floating, arrow.types.is_boolean, arrow.types.is_decimal)
        if not any(is_kind(values.type) for is_kind in numeric):
            first = next((i for i, value in enumerate(values) if value.is_valid), 0)
            raise self.not_a_number(name, done + first, values[first].as_py())
        return values.cast(arrow.float64(), safe=False).to_numpy(zero_copy_only=False)

    @staticmethod
    @contextmanager
    def write(file: BinaryIO, path: Path) -> Generator[Write]:
        """Write one row group for each block; columns keep the type of their first block."""
        arrow, parquet = require("pyarrow", "parquet"), require("pyarrow.parquet", "parquet")
        with ExitStack() as stack:
            writers: list[Any] = []

            def append(columns: Columns) -> None:
                table = arrow.table({name: arrow.array(values) for name, values in columns.items()})
                if not writers:
                    writers.append(stack.enter_context(parquet.ParquetWriter(file, table.schema)))
                try:
                    writers[0].write_table(table.cast(writers[0].schema))
                except arrow.ArrowInvalid as error:
                    raise DataError(f"Expected columns of one kind from the first row to the last, but {error}.") from error

            yield append


FORMATS[".parquet"] = ParquetTable
