"""Tables written block by block. A file takes its name when it is whole: whatever goes wrong before, nothing of it is left."""

from __future__ import annotations

import contextlib
import csv
import io
import sys
import tempfile
import zipfile
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any, BinaryIO

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from offmap.errors import ConfigError, DataError
from offmap.extras import require
from offmap.io.atomic import whole_file

Columns = Mapping[str, NDArray[Any]]
Write = Callable[[Columns], None]
"""Takes consecutive rows: columns of one length, the same ones every time."""

STDOUT = "-"


@contextmanager
def sink(path: str | Path) -> Generator[Write]:
    """Where to write a CSV, NPZ or Parquet file; "-" is CSV on standard output."""
    if str(path) == STDOUT:
        with csv_rows(sys.stdout) as write:
            yield write
        return
    path = Path(path)
    with whole_file(path) as file, SINKS[suffix_of(path)](file, path) as write:
        yield write


def suffix_of(path: Path) -> str:
    """The suffix of a table that can be written."""
    suffix = next((end for end in SINKS if path.name.lower().endswith(end)), None)
    if suffix is None:
        raise ConfigError(f"Expected a table to write to end in one of {sorted(SINKS)}, but got {path.name!r}.")
    return suffix


@contextmanager
def csv_rows(text: IO[str]) -> Generator[Write]:
    """Numbers with nine digits, as many as float32 has."""
    writer = csv.writer(text, lineterminator="\n")
    started = False

    def write(columns: Columns) -> None:
        nonlocal started
        if not started:
            writer.writerow(columns)
            started = True
        writer.writerows(zip(*map(texts, columns.values()), strict=True))

    yield write
    text.flush()


def texts(values: NDArray[Any]) -> list[Any]:
    """One column as CSV has it.

    >>> texts(np.array([0.1, np.inf], dtype=np.float32)), texts(np.array([True])), texts(np.array(["a"]))
    (['0.100000001', 'inf'], ['true'], ['a'])
    """
    if values.dtype.kind == "b":
        return ["true" if value else "false" for value in values.tolist()]
    return [f"{value:.9g}" for value in values.tolist()] if values.dtype.kind == "f" else values.tolist()


@contextmanager
def csv_sink(file: BinaryIO, path: Path) -> Generator[Write]:
    """In UTF-8."""
    text = io.TextIOWrapper(file, encoding="utf-8", newline="", write_through=True)
    try:
        with csv_rows(text) as write:
            yield write
    finally:
        with contextlib.suppress(OSError, ValueError):
            text.detach()


@contextmanager
def parquet_sink(file: BinaryIO, path: Path) -> Generator[Write]:
    """One row group for each block; columns keep the kind of their first block."""
    arrow, parquet = require("pyarrow", "parquet"), require("pyarrow.parquet", "parquet")
    writer: Any = None

    def write(columns: Columns) -> None:
        nonlocal writer
        table = arrow.table({name: arrow.array(values) for name, values in columns.items()})
        if writer is None:
            writer = parquet.ParquetWriter(file, table.schema)
        try:
            table = table.cast(writer.schema)
        except arrow.ArrowInvalid as error:
            raise DataError(f"Expected columns of one kind from the first row to the last, but {error}.") from error
        writer.write_table(table)

    try:
        yield write
    except BaseException:
        with contextlib.suppress(Exception):  # it would write a footer where nothing can be written
            writer.close()
        raise
    if writer is not None:
        writer.close()


@contextmanager
def npz_sink(file: BinaryIO, path: Path) -> Generator[Write]:
    """An array (n,) for each column, kept in nameless files until all are there: length and type come first in an array."""
    parts: dict[str, tuple[IO[bytes], list[tuple[int, np.dtype[Any]]]]] = {}
    with ExitStack() as stack:

        def write(columns: Columns) -> None:
            for name, values in columns.items():
                if name not in parts:
                    parts[name] = (stack.enter_context(tempfile.TemporaryFile(dir=path.absolute().parent)), [])
                parts[name][0].write(values.tobytes())
                parts[name][1].append((len(values), values.dtype))

        yield write
        with zipfile.ZipFile(file, "w") as archive:
            for name, (part, blocks) in parts.items():
                part.seek(0)
                with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                    _array(member, part, blocks)


def _array(member: IO[bytes], part: IO[bytes], blocks: list[tuple[int, np.dtype[Any]]]) -> None:
    """One array out of blocks whose types may differ, as those of words of different lengths do."""
    dtype = np.result_type(*{dtype for _, dtype in blocks})
    shape = (sum(rows for rows, _ in blocks),)
    npy.write_array_header_2_0(member, {"descr": npy.dtype_to_descr(dtype), "fortran_order": False, "shape": shape})
    for rows, own in blocks:
        member.write(np.frombuffer(part.read(rows * own.itemsize), own).astype(dtype).tobytes())


SINKS: dict[str, Callable[[BinaryIO, Path], AbstractContextManager[Write]]] = {
    ".csv": csv_sink,
    ".npz": npz_sink,
    ".parquet": parquet_sink,
}
