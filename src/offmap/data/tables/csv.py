"""CSV, also gzip-compressed: one header row, then rows of its length."""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
import itertools
import logging
import re
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

from offmap.data.tables.table import FORMATS, Columns, Table, Write, rows_per_block
from offmap.errors import ConfigError, DataError

logger: logging.Logger = logging.getLogger("offmap")

MAX_LINE_LETTERS = 1 << 24
MAX_BLOCK_LETTERS = 1 << 25  # fewer rows are read at a time where they are long
SEPARATORS = ",;\t|"

WORDS: dict[str, Callable[[Any], str]] = {"b": lambda value: "true" if value else "false", "f": lambda value: f"{value:.9g}"}
"""How truth values and numbers are written, by the kind of their dtype."""


class CsvTable(Table):
    """An open CSV file; the position of `file` tells how much is left. `count` letters were read."""

    kind: ClassVar[str] = "a table as CSV in UTF-8"
    typed: ClassVar[bool] = False
    writable: ClassVar[bool] = True

    def open(self, separator: str | None, stack: ExitStack) -> list[str]:
        """Read the header; the default separator is whichever of `,` `;` tab `|` it has most of outside quotes."""
        if separator is not None and len(separator) != 1:
            raise ConfigError(f"Expected the separator to be one character, but got {separator!r}.")
        compressed = self.path.name.lower().endswith(".gz")
        self.count: int = 0
        self.file: BinaryIO = stack.enter_context(self.path.open("rb"))
        unpacked: Any = gzip.GzipFile(fileobj=self.file) if compressed else self.file
        self.text: io.TextIOWrapper = io.TextIOWrapper(unpacked, encoding="utf-8-sig", newline="")
        lines = itertools.dropwhile(lambda line: not line.strip("\r\n"), self._lines())
        header, unquoted = _read_header(lines, separator or SEPARATORS)
        if not header.strip():
            raise DataError(f"Expected a header row in {self.path}, but the file is empty.")
        known, separator = separator, separator or max(SEPARATORS, key=unquoted.count)
        self.check_width(1 + unquoted.count(separator))  # before millions of names are made
        names = [name.strip() for name in next(csv.reader([header], delimiter=separator, strict=True))]
        if len(names) == 1 and known is None:
            raise DataError(
                f"Expected several columns in {self.path}, but got one, {names[0][:60]!r}. Pass the separator (any, if the table "
                "has a single column)."
            )
        self.records: Iterator[list[str]] = csv.reader(lines, delimiter=separator, strict=True)
        if not compressed:
            with self.path.open("rb") as end:
                end.seek(-1, io.SEEK_END)
                if end.read(1) not in b"\r\n":
                    logger.warning("%s does not end with a line break: if it was cut, its last row is wrong.", self.path)
        return names

    def _lines(self) -> Iterator[str]:
        while line := self.text.readline(MAX_LINE_LETTERS):
            if len(line) == MAX_LINE_LETTERS and line[-1] not in "\r\n":
                raise ValueError(f"a line has more than {MAX_LINE_LETTERS} characters")
            self.count += len(line)
            yield line

    def rows(self, done: int) -> int | None:
        """Estimate the number of rows from the share of the bytes that were read."""
        position = self.file.tell()
        return max(done, round(done * self.path.stat().st_size / position)) if done and position else None

    def chunks(self, columns: Sequence[str]) -> Iterator[dict[str, list[str]]]:
        """Yield words by column; blank lines are skipped."""
        done, rows, start = 0, list[list[str]](), self.count
        most, places = rows_per_block(len(self.names)), {name: i for i, name in enumerate(self.names)}
        indices = {name: places[name] for name in columns}
        for record in self.records:
            if record and len(record) != len(self.names):
                raise DataError(
                    f"Expected {len(self.names)} values in each row of {self.path}, but row {done + len(rows) + 1} has "
                    f"{len(record)}. Is the file cut, or the separator wrong?"
                )
            rows += [record] if record else []
            if len(rows) == most or self.count - start > MAX_BLOCK_LETTERS:
                yield {name: [row[i] for row in rows] for name, i in indices.items()}
                done, rows, start = done + len(rows), [], self.count
        yield {name: [row[i] for row in rows] for name, i in indices.items()}

    @staticmethod
    @contextmanager
    def write(file: BinaryIO, path: Path) -> Generator[Write]:
        """Write UTF-8; numbers with nine digits, as many as float32 has."""
        text = io.TextIOWrapper(file, encoding="utf-8", newline="", write_through=True)
        writer, started = csv.writer(text, lineterminator="\n"), list[bool]()

        def append(columns: Columns) -> None:
            if not started:
                writer.writerow(columns)
                started.append(True)
            words = [map(WORDS.get(values.dtype.kind, lambda value: value), values.tolist()) for values in columns.values()]
            writer.writerows(zip(*words, strict=True))

        try:
            yield append
            text.flush()
        finally:
            with contextlib.suppress(OSError, ValueError):
                text.detach()


def _read_header(lines: Iterator[str], separators: str) -> tuple[str, str]:
    """Join the lines of the header, of which a quoted name may span several; return it, and what of it is not quoted."""
    # a quote opens at the start of a field, and closes at the next one that is not doubled
    quoted = re.compile(rf'(?:^|(?<=[{re.escape(separators)}]))"[^"]*(?:""[^"]*)*("?)')
    header, unquoted, size = list[str](), list[str](), 0
    for line in lines:
        field = f'"{line}' if header else line  # a line after the first begins within quotes
        header.append(line)
        unquoted.append(quoted.sub("", field))
        size += len(line)
        if all(match[1] for match in quoted.finditer(field)):
            break
        if size > MAX_LINE_LETTERS:
            raise ValueError(f"its header has more than {MAX_LINE_LETTERS} characters")
    return "".join(header), "".join(unquoted)


class PackedCsvTable(CsvTable):
    """A gzip-compressed CSV file, which is not written."""

    writable = False


FORMATS.update({".csv": CsvTable, ".csv.gz": PackedCsvTable})
