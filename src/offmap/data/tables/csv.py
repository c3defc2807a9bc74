"""CSV, also gzip-compressed: one header row, then rows of its length."""

from __future__ import annotations

import csv
import gzip
import io
import logging
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from offmap.data.tables.block import Block, Table, finite, no_number, readable, rows_for
from offmap.data.tables.columns import MISSING, number
from offmap.errors import ConfigError, DataError

logger = logging.getLogger("offmap")

SEPARATORS = ",;\t|"
LONGEST = 1 << 24
"""Bytes of one line."""

LETTERS = 1 << 25
"""Bytes of one block: fewer rows are read at a time where they are long."""

WHAT = "a table as CSV in UTF-8"


class Bounded(io.BufferedIOBase):
    """The bytes of a text none of whose lines is longer than LONGEST; `taken` counts them."""

    def __init__(self, file: Any) -> None:
        super().__init__()
        self.file, self.taken, self._line = file, 0, 0

    def readable(self) -> bool:
        """Yes: a text can be made of it."""
        return True

    def read1(self, size: int = -1, /) -> bytes:
        """The next bytes, as many as there are at once."""
        chunk = self.file.read1(size)
        end = max(chunk.rfind(b"\n"), chunk.rfind(b"\r"))
        self._line = len(chunk) - end - 1 if end >= 0 else self._line + len(chunk)
        if self._line > LONGEST:
            raise ValueError(f"a line has more than {LONGEST} bytes")
        self.taken += len(chunk)
        return chunk


@dataclass
class Text:
    """An open CSV file; `file` is what lies on the disk, so that its position tells how much is left."""

    path: Path
    names: list[str]
    lines: Iterator[list[str]]
    file: IO[bytes]
    source: Bounded

    def rows(self, done: int) -> int | None:
        """By the share of the bytes that were read."""
        read = self.file.tell()
        return max(done, round(done * self.path.stat().st_size / read)) if done and read else None

    def blocks(self, numbers: Sequence[str], raw: Sequence[str] = ()) -> Iterator[Block]:
        """Blank lines are left out."""
        places = [self.names.index(name) for name in numbers]
        others = {name: self.names.index(name) for name in raw}
        done = 0
        while rows := self._next():
            for place, row in enumerate(rows):
                if len(row) != len(self.names):
                    raise DataError(
                        f"Expected {len(self.names)} values in each row of {self.path}, but row {done + place + 1} has "
                        f"{len(row)}. Is the file cut, or its separator another?"
                    )
            x = self._numbers([[row[i] for i in places] for row in rows], numbers, done)
            yield Block(x, {name: [row[i] for row in rows] for name, i in others.items()})
            done += len(rows)

    def _next(self) -> list[list[str]]:
        """The next rows that are not blank."""
        rows: list[list[str]] = []
        with readable(self.path, WHAT):
            while not rows and (lines := list(self._some())):
                rows = [line for line in lines if line]
        return rows

    def _some(self) -> Iterator[list[str]]:
        """As many lines as make a block."""
        start = self.source.taken
        for line in islice(self.lines, rows_for(len(self.names))):
            yield line
            if self.source.taken - start > LETTERS:
                return

    def _numbers(self, words: list[list[str]], names: Sequence[str], done: int) -> NDArray[Any]:
        try:
            x = np.array(words, dtype=np.float64)
        except ValueError:  # seldom: look at each
            x = np.array([[_value(word) for word in row] for row in words])
            for row, column in np.argwhere(np.isinf(x)).tolist():
                if number(words[row][column]) is None:
                    raise no_number(self.path, names[column], done + row, words[row][column]) from None
        return finite(x, names, self.path, done)


def _value(word: str) -> float:
    """The number, NaN for a missing one, infinity for what is none."""
    found = number(word)
    return found if found is not None else np.nan if word.strip().lower() in MISSING else np.inf


@contextmanager
def open_text(path: Path, separator: str | None) -> Generator[Table]:
    """A separator that is not given is whichever of `,` `;` tab `|` the header has most of."""
    if separator is not None and len(separator) != 1:
        raise ConfigError(f"Expected the separator to be one character, but got {separator!r}.")
    with readable(path, WHAT):
        file = path.open("rb")
    with file:
        packed = path.name.lower().endswith(".gz")
        source = Bounded(gzip.GzipFile(fileobj=file) if packed else file)
        text = io.TextIOWrapper(source, encoding="utf-8-sig", newline="")  # pyright: ignore[reportArgumentType]
        with readable(path, WHAT):
            header = text.readline()
            chosen = separator or max(SEPARATORS, key=header.count)
            names = next(csv.reader([header], delimiter=chosen, strict=True), [])
        if not header.strip():
            raise DataError(f"Expected a header row in {path}, but the file is empty.")
        if len(names) == 1:
            raise DataError(
                f"Expected several columns in {path}, but its header has one, {names[0].strip()[:60]!r}. If the separator is "
                "none of comma, semicolon, tab and |, pass it."
            )
        if not packed and not _ended(path):
            logger.warning("%s does not end with a line break: if it was cut, its last row is wrong.", path)
        yield Text(path, [name.strip() for name in names], csv.reader(text, delimiter=chosen, strict=True), file, source)


def _ended(path: Path) -> bool:
    """Whether the last byte is a line break."""
    with path.open("rb") as file:
        file.seek(-1, io.SEEK_END)
        return file.read(1) in b"\r\n"
