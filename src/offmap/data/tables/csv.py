"""CSV, also gzip-compressed: one header row, then rows of its length."""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
import logging
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import IO, Any, BinaryIO

from numpy.typing import NDArray

from offmap.data.tables.table import FORMATS, Columns, Format, Table, Write, readable, rows_per_block
from offmap.errors import ConfigError, DataError

logger = logging.getLogger("offmap")

SEPARATORS = ",;\t|"
MAX_LINE_LETTERS = 1 << 24
MAX_BLOCK_LETTERS = 1 << 25
"""Fewer rows are read at a time where they are long."""


class CsvTable(Table):
    """An open CSV file; `file` is the file on disk, whose position tells how much is left, `text` its unpacked text."""

    kind, typed = "a table as CSV in UTF-8", False

    def __init__(self, path: Path, names: list[str], separator: str, file: IO[bytes], text: IO[str]) -> None:
        super().__init__(path, names)
        self.file, self.text, self.count = file, text, 0
        self.records = csv.reader(self._lines(), delimiter=separator, strict=True)

    def rows(self, done: int) -> int | None:
        """Estimate the number of rows from the share of the bytes that were read."""
        position = self.file.tell()
        return max(done, round(done * self.path.stat().st_size / position)) if done and position else None

    def chunks(self, columns: Sequence[str]) -> Iterator[dict[str, list[str]]]:
        """Yield words by column; blank lines are skipped."""
        positions = {name: self.names.index(name) for name in columns}
        done = 0
        while records := list(self._next_records()):
            rows = [record for record in records if record]
            for number, row in enumerate(rows, done + 1):
                if len(row) != len(self.names):
                    raise DataError(
                        f"Expected {len(self.names)} values in each row of {self.path}, but row {number} has {len(row)}. Is the "
                        "file cut, or its separator another?"
                    )
            yield {name: [row[i] for row in rows] for name, i in positions.items()}
            done += len(rows)

    def _next_records(self) -> Iterator[list[str]]:
        start = self.count
        for record in islice(self.records, rows_per_block(len(self.names))):
            yield record
            if self.count - start > MAX_BLOCK_LETTERS:
                return

    def _lines(self) -> Iterator[str]:
        while line := read_line(self.text):
            self.count += len(line)
            yield line


def read_line(text: IO[str]) -> str:
    """Read a line, or raise where there is no end in sight."""
    line = text.readline(MAX_LINE_LETTERS)
    if len(line) == MAX_LINE_LETTERS and line[-1] not in "\r\n":
        raise ValueError(f"a line has more than {MAX_LINE_LETTERS} letters")
    return line


@contextmanager
def open_csv(path: Path, separator: str | None) -> Generator[Table]:
    """Open a CSV file; the default separator is whichever of `,` `;` tab `|` the header has most of."""
    if separator is not None and len(separator) != 1:
        raise ConfigError(f"Expected the separator to be one character, but got {separator!r}.")
    with readable(path, CsvTable.kind):
        file = path.open("rb")
    with file:
        compressed = path.name.lower().endswith(".gz")
        text = io.TextIOWrapper(gzip.GzipFile(fileobj=file) if compressed else file, encoding="utf-8-sig", newline="")
        with readable(path, CsvTable.kind):
            header = read_line(text)
            separator = separator or max(SEPARATORS, key=header.count)
            names = [name.strip() for name in next(csv.reader([header], delimiter=separator, strict=True), [])]
        if not header.strip():
            raise DataError(f"Expected a header row in {path}, but the file is empty.")
        if len(names) == 1:
            raise DataError(
                f"Expected several columns in {path}, but its header has one, {names[0][:60]!r}. If the separator is none of "
                "comma, semicolon, tab and |, pass it."
            )
        if not compressed and not _ends_with_line_break(path):
            logger.warning("%s does not end with a line break: if it was cut, its last row is wrong.", path)
        yield CsvTable(path, names, separator, file, text)


def _ends_with_line_break(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, io.SEEK_END)
        return file.read(1) in b"\r\n"


@contextmanager
def write_csv(file: BinaryIO, path: Path) -> Generator[Write]:
    """Write UTF-8; numbers with nine digits, as many as float32 has."""
    text = io.TextIOWrapper(file, encoding="utf-8", newline="", write_through=True)
    writer = csv.writer(text, lineterminator="\n")
    started = False

    def write(columns: Columns) -> None:
        nonlocal started
        if not started:
            writer.writerow(columns)
            started = True
        writer.writerows(zip(*map(_format_column, columns.values()), strict=True))

    try:
        yield write
        text.flush()
    finally:
        with contextlib.suppress(OSError, ValueError):
            text.detach()


def _format_column(values: NDArray[Any]) -> list[Any]:
    """Format the values of a column for CSV.

    >>> import numpy as np
    >>> _format_column(np.array([0.1, np.inf], dtype=np.float32)), _format_column(np.array([True]))
    (['0.100000001', 'inf'], ['true'])
    """
    if values.dtype.kind == "b":
        return ["true" if value else "false" for value in values.tolist()]
    return [f"{value:.9g}" for value in values.tolist()] if values.dtype.kind == "f" else values.tolist()


FORMATS[".csv"] = Format(open_csv, write_csv)
FORMATS[".csv.gz"] = Format(open_csv)
