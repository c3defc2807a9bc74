"""What all readers give: blocks of consecutive rows, whole and finite, or one sentence on what is wrong."""

from __future__ import annotations

import csv
import zipfile
import zlib
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from offmap.errors import DataError, OffmapError

NUMBERS = 1 << 20
"""Numbers in one block, 8 MB, unless they are more than ROWS rows."""

ROWS = 1 << 16

LARGEST = 3e38
"""Numbers beyond it are infinite in single precision."""

DAMAGED = (OSError, EOFError, ValueError, KeyError, zlib.error, csv.Error, zipfile.BadZipFile, NotImplementedError)
"""What readers raise on files that are cut or no tables; pyarrow's errors are among them."""


@dataclass(frozen=True)
class Block:
    """Consecutive rows: `x` (n, D) the columns asked for as numbers, finite; `raw` other columns, values as the file has them.

    Of an NPZ file whose one input array has more axes, `x` is that array, (n, ...).
    """

    x: NDArray[Any]
    raw: dict[str, list[Any]] = field(default_factory=dict[str, list[Any]])


class Table(Protocol):
    """An open table; `names` are its columns in the file's order."""

    path: Path
    names: list[str]

    def rows(self, done: int) -> int | None:
        """How many rows there are, or seem to be after `done` of them were read; None if that cannot be told."""
        ...

    def blocks(self, numbers: Sequence[str], raw: Sequence[str] = ()) -> Iterator[Block]:
        """All rows, in order."""
        ...


def rows_for(numbers: int) -> int:
    """Rows of a block where each row has so many numbers.

    >>> rows_for(8), rows_for(1024), rows_for(10**9)
    (65536, 1024, 1)
    """
    return min(ROWS, max(1, NUMBERS // max(1, numbers)))


def finite(x: NDArray[Any], names: Sequence[str], path: Path, done: int) -> NDArray[Any]:
    """Numbers (n, D) after `done` others, refused if one is missing or infinite; the first such row is named."""
    fine = np.abs(x) <= LARGEST
    if not fine.all():
        row, column = np.argwhere(~fine.reshape(len(x), len(names), -1).all(2))[0].tolist()
        value = x.reshape(len(x), len(names), -1)[row, column]
        lacks = "no value" if np.isnan(value).any() else "an infinite or too large one"
        raise DataError(
            f"Expected a finite number in each row of {path}, but row {done + row + 1} has {lacks} in column {names[column]!r}. "
            "Fill or drop such rows."
        )
    return x


def no_number(path: Path, name: str, row: int, value: object) -> DataError:
    """The error for a word among numbers; `row` counts from 0."""
    return DataError(
        f"Expected numbers in column {name!r} of {path}, but row {row + 1} has {str(value)[:40]!r}. Write words as numbers, "
        "decimals with a point, or leave the column out."
    )


@contextmanager
def readable(path: Path, what: str) -> Generator[None]:
    """Whatever a reader raises on a damaged file becomes one sentence."""
    try:
        yield
    except OffmapError:
        raise
    except Exception as error:  # whatever the bytes are, they are no table
        told = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        reason = (told.strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        raise DataError(f"Expected {what} at {path}, but it cannot be read: {reason}. Is the file cut or damaged?") from error
