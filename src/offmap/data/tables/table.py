"""Tables as streams of rows: what a file format has to provide, the registry of formats, and the two functions that use it."""

from __future__ import annotations

import math
import sys
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

import numpy as np
from numpy.typing import NDArray

from offmap.atomic import whole_file
from offmap.errors import ConfigError, DataError, OffmapError, first_line

BLOCK_NUMBERS = 1 << 20  # 8 MB
BLOCK_ROWS = 1 << 16
MAX_COLUMNS = 1 << 20
MISSING = frozenset({"", "na", "n/a", "nan", "null", "none", "?"})  # in any case
STDOUT = "-"


Columns = Mapping[str, NDArray[Any]]
Write = Callable[[Columns], None]
"""Appends consecutive rows: columns of one length, the same ones every time."""


@dataclass(frozen=True)
class Block:
    """Consecutive rows: `x` (n, D) the requested columns as numbers, or (n, ...) the only one, if it is an array with more axes;
    `raw` other columns with the values of the file.
    """

    x: NDArray[Any]
    raw: dict[str, list[Any]]


class Table(ABC):
    """An open table. A subclass reads one file format, and may write it: `FORMATS` has it by its suffix."""

    kind: ClassVar[str]  # what such a file holds, for error messages
    typed: ClassVar[bool] = True  # the file tells numbers from words; else (CSV) a column is numeric if all its words are numbers
    writable: ClassVar[bool] = False

    def __init__(self, path: Path, separator: str | None, stack: ExitStack) -> None:
        self.path: Path = path
        self.names: list[str] = self.open(separator, stack)

    @abstractmethod
    def open(self, separator: str | None, stack: ExitStack) -> list[str]:
        """Open the file and return its columns; `separator` is that of a CSV file, `stack` closes what it is given."""

    @staticmethod
    def write(file: BinaryIO, path: Path) -> AbstractContextManager[Write]:
        """Return a function, for the duration of a block, that appends rows to an open file, if such tables are `writable`."""
        raise NotImplementedError

    @abstractmethod
    def chunks(self, columns: Sequence[str]) -> Iterator[Mapping[str, Any]]:
        """Yield the values of these columns for consecutive rows: a list, or an array (n, ...), by column."""

    def check_width(self, columns: int) -> None:
        """Refuse more columns than any model takes."""
        if columns > MAX_COLUMNS:
            raise DataError(f"Expected at most {MAX_COLUMNS} columns in {self.path}, but there are {columns}.")

    def rows(self, done: int) -> int | None:
        """Return the number of rows, or an estimate after `done` of them were read; None if there is none."""
        return None

    def blocks(self, numbers: Sequence[str], raw: Sequence[str] = (), *, allow_nan: bool = False) -> Iterator[Block]:
        """Yield all rows in order, the columns `numbers` as finite numbers, or NaN if `allow_nan`, those of `raw` as they are."""
        chunks, done = self.chunks(list(dict.fromkeys([*numbers, *raw]))), 0
        while True:
            with explain_damage(self.path, self.kind):
                chunk = next(chunks, None)
                if chunk is None:
                    return
                x = self._stack(chunk, numbers, done, allow_nan)
                lists = {name: v if isinstance(v := chunk[name], list) else v.tolist() for name in raw}
            if len(x):
                yield Block(x, lists)
                done += len(x)

    def to_numbers(self, name: str, values: Any, done: int) -> NDArray[Any]:
        """Convert values of a column, (n, ...), to numbers; NaN where one is missing. `done` rows came before them."""
        if isinstance(values, np.ndarray):
            if values.dtype.kind not in "biuf":
                raise self.not_a_number(name, done, values[0])
            return values
        try:
            return np.array(values, dtype=np.float64)
        except (ValueError, TypeError, OverflowError):  # rare: look at each value
            numbers = [math.nan if str(value).strip().lower() in MISSING else parse_number(value) for value in values]
            if None in numbers:
                row = numbers.index(None)
                raise self.not_a_number(name, done + row, values[row]) from None
            return np.array(numbers, dtype=np.float64)

    def not_a_number(self, name: str, row: int, value: object) -> DataError:
        """Return the error for a word among numbers; `row` counts from 0."""
        return DataError(
            f"Expected numbers in column {name!r} of {self.path}, but row {row + 1} has {str(value)[:40]!r}. Write words as "
            "numbers, decimals with a point, or leave the column out."
        )

    def _stack(self, chunk: Mapping[str, Any], names: Sequence[str], done: int, allow_nan: bool) -> NDArray[Any]:
        columns = [self.to_numbers(name, chunk[name], done) for name in names]
        if any(column.ndim > 1 for column in columns):
            if len(columns) > 1:
                raise DataError(
                    f"Expected one array of numbers with more than two axes as the inputs in {self.path}, but got {list(names)}. "
                    "Leave the others out."
                )
            x = columns[0].astype(np.float32, copy=False)
        else:
            x = np.empty((len(next(iter(chunk.values()))), len(names)))
            for i, column in enumerate(columns):
                x[:, i] = column
        fine = (np.abs(x) <= 3e38) | (np.isnan(x) & allow_nan)  # numbers beyond are infinite in single precision
        if not fine.all():
            row, column = np.argwhere(~fine.reshape(len(x), len(names), -1).all(2))[0].tolist()
            missing = np.isnan(x.reshape(len(x), len(names), -1)[row, column]).any()
            raise DataError(
                f"Expected a finite number in each row of {self.path}, but row {done + row + 1} has "
                f"{'no value' if missing else 'an infinite or too large one'} in column {names[column]!r}. Fill or drop it"
                f"{', or fit with --allow-nan if the model handles missing values' if missing else ''}."
            )
        return x


FORMATS: dict[str, type[Table]] = {}
"""By suffix, in lower case. A module adds its own; a package declares such modules in the entry-point group `offmap.tables`."""


@contextmanager
def open_table(path: str | Path, separator: str | None = None) -> Generator[Table]:
    """Open a table to read it; `separator` is that of a CSV file, by default detected from its header."""
    path = Path(path)
    kind = FORMATS[find_suffix(path)]
    if not path.is_file():
        problem = "it is a folder" if path.is_dir() else "there is no such file"
        raise DataError(f"Expected a table at {path}, but {problem}.")
    with ExitStack() as stack:
        with explain_damage(path, kind.kind):
            table = kind(path, separator, stack)
        table.check_width(len(table.names))
        repeated = sorted(name for name, count in Counter(table.names).items() if count > 1)
        if "" in table.names:
            raise DataError(
                f"Expected a name for each column in {path}, but column {table.names.index('') + 1} has none. If it is the index "
                "of a data frame, write the table without it (pandas: `index=False`)."
            )
        if repeated or not table.names:
            raise DataError(f"Expected distinct columns in {path}, but got {repeated[:8] or 'none'}. Is there a header?")
        yield table


@contextmanager
def write_table(path: str | Path) -> Generator[Write]:
    """Open a table to write it block by block; "-" is CSV on standard output. The file appears only once it is complete."""
    to_stdout, path = str(path) == STDOUT, Path(path)
    kind = FORMATS[".csv" if to_stdout else find_suffix(path, to_write=True)]
    with nullcontext(sys.stdout.buffer) if to_stdout else whole_file(path) as file, kind.write(file, path) as write:
        yield write


def list_suffixes(*, to_write: bool = False) -> list[str]:
    """Return the suffixes of tables that can be read, or written, those of other packages included."""
    _load_formats()
    return sorted(suffix for suffix, kind in FORMATS.items() if kind.writable or not to_write)


@cache
def _load_formats() -> None:
    for point in entry_points(group="offmap.tables"):
        point.load()


def find_suffix(path: Path, *, to_write: bool = False) -> str:
    """Return the suffix of a table that can be read, or written."""
    suffixes = list_suffixes(to_write=to_write)
    suffix = next((suffix for suffix in suffixes if path.name.lower().endswith(suffix)), None)
    if suffix is None:
        purpose = "a table to write" if to_write else "a table"
        raise ConfigError(f"Expected {purpose} to end in one of {suffixes}, but got {path.name!r}.")
    return suffix


def rows_per_block(numbers: int) -> int:
    """Return how many rows a block has where each row has so many numbers.

    >>> rows_per_block(8), rows_per_block(1024), rows_per_block(10**9)
    (65536, 1024, 1)
    """
    return min(BLOCK_ROWS, max(1, BLOCK_NUMBERS // max(1, numbers)))


def parse_number(value: Any) -> float | None:
    """Return the number that a word stands for, or None.

    >>> parse_number("1e3"), parse_number("1_000"), parse_number("red")
    (1000.0, None, None)
    """
    try:
        return None if value is None or "_" in str(value) else float(value)
    except (TypeError, ValueError, OverflowError):
        return None


@contextmanager
def explain_damage(path: Path, kind: str) -> Generator[None]:
    """Turn whatever a reader raises on a damaged file into one sentence."""
    try:
        yield
    except OffmapError:
        raise
    except Exception as error:  # readers raise errors of many kinds on arbitrary bytes
        raise DataError(
            f"Expected {kind} at {path}, but it cannot be read: {first_line(error)}. Is the file cut or damaged?"
        ) from error
