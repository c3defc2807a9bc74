"""A user's file as named columns: CSV, NPZ or Parquet. A column holds numbers or words; NaN and None are missing ones."""

from __future__ import annotations

import csv
import gzip
import io
import math
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offmap.errors import ConfigError, DataError, OffmapError
from offmap.extras import require

Numbers = NDArray[np.float64]
Column = Numbers | list[str | None]
Columns = dict[str, Column]

MISSING = frozenset({"", "na", "n/a", "nan", "null", "none", "?"})
"""Words that stand for a missing value, in any case."""

MOSTLY = 0.5
"""A column with more numbers than this share of its values, but not only numbers, is a mistake rather than a list of words."""


UNPACKED = {"text": 1 << 24, "arrays": 1 << 26}
"""Bytes that a file may have when unpacked, whatever its size."""

RATIO = 20
"""How often a larger one may outgrow its file; tables of numbers do so ten times at most."""

WORDS = 1 << 22
"""Words of one column, in a file of fewer bytes: each takes a hundred bytes in memory."""

WIDEST = 1 << 20
"""Columns of a table."""


def read(path: str | Path, words: Sequence[str] = ()) -> Columns:
    """All columns of a file, of one length; those named in `words` are words even where they look like numbers."""
    path = Path(path)
    suffix = next((end for end in READERS if path.name.lower().endswith(end)), None)
    if suffix is None:
        raise ConfigError(f"Expected a table to be one of {sorted(READERS)}, but got {path.name!r}.")
    if not path.is_file():
        raise DataError(f"Expected a table at {path}, but there is no such file.")
    columns = READERS[suffix](path, words)
    lengths = {name: len(values) for name, values in columns.items()}
    if not lengths or not all(lengths.values()):
        raise DataError(f"Expected rows in {path}, but there are none.")
    if len(set(lengths.values())) > 1:
        raise DataError(f"Expected columns of one length in {path}, but got {lengths}.")
    return columns


def read_csv(path: Path, words: Sequence[str]) -> Columns:
    """One header row; comma, semicolon or tab, whichever the header has most of."""
    try:
        text = (unzipped(path) if path.name.lower().endswith(".gz") else path.read_bytes()).decode("utf-8-sig")
        header = text.partition("\n")[0]
        delimiter = max(",;\t", key=header.count)
        rows = [row for row in csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True) if row]
    except (OSError, EOFError, zlib.error, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"Expected a table as CSV in UTF-8 at {path}, but it cannot be read: {error}.") from error
    if not rows:
        raise DataError(f"Expected a header row in {path}, but the file is empty.")
    names = [name.strip() for name in rows[0]]
    check_names(path, names, "a header row")
    for number, row in enumerate(rows[1:], 1):
        if len(row) != len(names):
            raise DataError(f"Expected {len(names)} values in each row of {path}, but row {number} has {len(row)}.")
    return {name: parsed(name, [row[i] for row in rows[1:]], path, name in words) for i, name in enumerate(names)}


def unzipped(path: Path) -> bytes:
    """What a gzip file holds, refused as soon as it is more than any table would be."""
    with gzip.open(path) as file:
        content = file.read(most(path, "text") + 1)
    check_size(path, len(content), "text")
    return content


def most(path: Path, kind: str) -> int:
    """Bytes that a file may have when unpacked."""
    return max(UNPACKED[kind], RATIO * path.stat().st_size)


def check_size(path: Path, size: int, kind: str = "arrays") -> None:
    """Refuse a file that would fill the memory."""
    if size > most(path, kind):
        raise DataError(
            f"Expected at most {most(path, kind)} bytes in {path} when unpacked, but there are more. Pack it less tightly."
        )


def check_names(path: Path, names: Sequence[str], what: str) -> None:
    """Refuse columns that cannot be told apart."""
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice or "" in names:
        raise DataError(f"Expected {what} in {path} with names that differ, but got {twice or 'an empty one'}. Is it missing?")


def parsed(name: str, values: Sequence[str], path: Path, words: bool) -> Column:
    """Words of a file as numbers if all are; a few that are not among many numbers are refused."""
    cleaned = [None if value.strip().lower() in MISSING else value.strip() for value in values]
    if words:
        return cleaned
    numbers = [number(value) for value in cleaned]
    wrong = [i for i, value in enumerate(cleaned) if value is not None and numbers[i] is None]
    if not wrong:
        return np.array([math.nan if value is None else value for value in numbers], dtype=np.float64)
    given = sum(value is not None for value in cleaned)
    if given - len(wrong) > MOSTLY * given:
        raise DataError(
            f"Expected numbers in column {name!r} of {path}, but row {wrong[0] + 1} has {cleaned[wrong[0]]!r} ({len(wrong)} such "
            "values). Mend them, or name the column in `words` if it holds names."
        )
    return cleaned


def number(value: str | None) -> float | None:
    """The number that a word stands for, if it does.

    >>> number("1e3"), number("1_000"), number("red")
    (1000.0, None, None)
    """
    try:
        return None if value is None or "_" in value else float(value)
    except ValueError:
        return None


def read_npz(path: Path, words: Sequence[str]) -> Columns:
    """Each array (n,) is a column, each array (n, D) is D columns named `name[0]`, `name[1]`, …; nothing in it is run."""
    columns: Columns = {}
    try:
        with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
            check_size(path, sum(info.file_size for info in file.zip.infolist()))
            arrays = {name: file[name] for name in file.files}
    except DataError:
        raise
    except Exception as error:  # whatever the bytes are, they are no arrays
        raise DataError(f"Expected arrays of numbers or words in {path}, but it cannot be read: {error}.") from error
    for name, array in arrays.items():
        if not isinstance(array, np.ndarray):  # numpy gives a member that is no array as bytes
            raise DataError(f"Expected arrays of numbers or words in {path}, but {name!r} is something else.")
        if array.ndim not in (1, 2):
            raise DataError(f"Expected arrays (n,) or (n, D) in {path}, but {name!r} has shape {array.shape}.")
        if array.ndim == 2 and array.shape[1] > WIDEST:
            raise DataError(f"Expected at most {WIDEST} columns in {path}, but {name!r} has {array.shape[1]}.")
        if array.dtype.kind not in "biufU":
            raise DataError(f"Expected numbers or words in {path}, but {name!r} is of type {array.dtype}.")
        several = {f"{name}[{i}]": array[:, i] for i in range(array.shape[1])} if array.ndim == 2 else {name: array}
        for key, values in several.items():
            named = name in words or key in words
            fast = values.dtype.kind in "iuf" and not named
            if not fast and values.size > max(WORDS, path.stat().st_size):
                raise DataError(f"Expected at most {WORDS} words or truth values in {path}, or numbers, but {name!r} has more.")
            columns[key] = values.astype(np.float64) if fast else plain(key, values.tolist(), path, named)
    return columns


def read_parquet(path: Path, words: Sequence[str]) -> Columns:
    """By pyarrow, in batches: a damaged file may say that a part has billions of rows, and whole parts are reserved at once."""
    try:
        with require("pyarrow.parquet", "parquet").ParquetFile(path) as file:
            check_size(path, 8 * file.metadata.num_rows * file.metadata.num_columns)
            check_names(path, file.schema_arrow.names, "a schema")
            lists: dict[str, list[Any]] = {name: [] for name in file.schema_arrow.names}
            for batch in file.iter_batches(use_threads=False):
                for name, column in zip(lists, batch.columns, strict=True):
                    lists[name].extend(column.to_pylist())
    except OffmapError:
        raise
    except Exception as error:  # pyarrow raises all kinds of errors on damaged files
        raise DataError(f"Expected a table as Parquet at {path}, but it cannot be read: {error}.") from error
    return {name: plain(name, values, path, name in words) for name, values in lists.items()}


def plain(name: str, values: Sequence[Any], path: Path, words: bool) -> Column:
    """Python values as a column: numbers, or words; truth values are words."""
    kinds = {type(value) for value in values if value is not None}
    if kinds <= {bool, str} or (words and kinds <= {bool, str, int, float}):
        texts = [None if value is None or value != value else str(value) for value in values]
        return [None if text is None or text.strip().lower() in MISSING else text for text in texts]
    try:
        return np.array([math.nan if value is None else float(value) for value in values], dtype=np.float64)
    except (TypeError, ValueError, OverflowError) as error:
        listed = ", ".join(sorted(kind.__name__ for kind in kinds))
        raise DataError(f"Expected numbers or words in column {name!r} of {path}, but got {listed}.") from error


READERS: dict[str, Callable[[Path, Sequence[str]], Columns]] = {
    ".csv": read_csv,
    ".csv.gz": read_csv,
    ".npz": read_npz,
    ".parquet": read_parquet,
}
