"""NPZ, read from the start of every member at once: no array is held whole, compressed or not. Nothing in it is run."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from offmap.data.tables.block import Block, Table, finite, no_number, readable, rows_for
from offmap.data.tables.columns import WIDEST
from offmap.errors import DataError

WHAT = "arrays of numbers or words"

BYTES = 1 << 26
"""Of one block, and of one row."""

HEADERS: dict[tuple[int, int], Callable[[Any], tuple[tuple[int, ...], bool, np.dtype[Any]]]] = {
    (1, 0): npy.read_array_header_1_0,
    (2, 0): npy.read_array_header_2_0,
}


@dataclass(frozen=True)
class Member:
    """An array (n, ...) of the archive, whose values begin at byte `start`; (n, D) is D columns, any other is one."""

    name: str
    shape: tuple[int, ...]
    by_columns: bool  # Fortran order
    dtype: np.dtype[Any]
    start: int

    @property
    def columns(self) -> list[str]:
        """Their names: `x[0]`, `x[1]`, … or `x`."""
        return [f"{self.name}[{i}]" for i in range(self.shape[1])] if len(self.shape) == 2 else [self.name]


class Strip:
    """Rows of a member one after another, `width` values each: all columns, or one of an array that is kept by columns."""

    def __init__(self, archive: zipfile.ZipFile, member: Member, column: int | None) -> None:
        self.file = archive.open(f"{member.name}.npy")
        self.dtype = member.dtype
        self.width = prod(member.shape[1:]) if column is None else 1
        left = member.start + (column or 0) * member.shape[0] * member.dtype.itemsize
        while left and (skipped := len(self.file.read(min(left, 1 << 20)))):
            left -= skipped

    def read(self, rows: int) -> NDArray[Any]:
        """(rows, width)."""
        size = rows * self.width * self.dtype.itemsize
        content = self.file.read(size)
        if len(content) < size:
            raise EOFError("an array has fewer values than it says")
        return np.frombuffer(content, self.dtype).reshape(rows, self.width)


@dataclass
class Archive:
    """An open NPZ file; all arrays have `count` rows."""

    path: Path
    names: list[str]
    archive: zipfile.ZipFile
    members: dict[str, Member]  # by column
    count: int

    def rows(self, done: int) -> int | None:
        """The arrays say it."""
        return self.count

    def blocks(self, numbers: Sequence[str], raw: Sequence[str] = ()) -> Iterator[Block]:
        """Numbers become float64; one array with more axes stays as it is."""
        deep = self._deep(numbers)
        places = {name: self.members[name].columns.index(name) for name in [*numbers, *raw]}
        with readable(self.path, WHAT):
            strips = {self._key(name): self._strip(name, places[name]) for name in places}
        step = min(
            rows_for(sum(strip.width for strip in strips.values())),
            max(1, BYTES // max(1, sum(strip.width * strip.dtype.itemsize for strip in strips.values()))),
        )
        for done in range(0, self.count, step):
            rows = min(step, self.count - done)
            with readable(self.path, WHAT):
                read = {key: strip.read(rows) for key, strip in strips.items()}

            def values(name: str, read: dict[Any, NDArray[Any]] = read) -> NDArray[Any]:
                found = read[self._key(name)]
                return found[:, places[name] if found.shape[1] > 1 else 0]

            kept = {name: values(name).tolist() for name in raw}
            if deep is not None:
                x = read[self._key(deep.name)].reshape(rows, *deep.shape[1:]).astype(np.float32)
            else:
                x = np.empty((rows, len(numbers)))
                for i, name in enumerate(numbers):
                    x[:, i] = self._checked(name, values(name), done)
            yield Block(finite(x, numbers, self.path, done), kept)

    def _deep(self, names: Sequence[str]) -> Member | None:
        """The one array with more than two axes, if there is one."""
        found = [self.members[name] for name in names if len(self.members[name].shape) > 2]
        if found and (len(names) > 1 or found[0].by_columns or found[0].dtype.kind not in "biuf"):
            raise DataError(
                f"Expected one array of numbers with more than two axes as the inputs in {self.path}, in C order, but got "
                f"{list(names)}. Leave the others out."
            )
        return found[0] if found else None

    def _key(self, name: str) -> tuple[str, str]:
        """Columns of one array are read together, unless they are kept apart."""
        member = self.members[name]
        return member.name, name if member.by_columns else ""

    def _strip(self, name: str, column: int) -> Strip:
        member = self.members[name]
        return Strip(self.archive, member, column if member.by_columns else None)

    def _checked(self, name: str, values: NDArray[Any], done: int) -> NDArray[Any]:
        if values.dtype.kind not in "biuf":
            raise no_number(self.path, name, done, values[0])
        return values


@contextmanager
def open_archive(path: Path, separator: str | None) -> Generator[Table]:
    """The headers of all arrays are read and compared."""
    with ExitStack() as stack:
        with readable(path, WHAT):
            archive = stack.enter_context(zipfile.ZipFile(path))
            found = [_member(archive, info.filename, path) for info in archive.infolist()]
        lengths = {member.name: member.shape[0] for member in found}
        if not lengths:
            raise DataError(f"Expected {WHAT} in {path}, but there are none.")
        if len(set(lengths.values())) > 1:
            raise DataError(f"Expected arrays of one length in {path}, but got {lengths}.")
        members = {column: member for member in found for column in member.columns}
        yield Archive(path, [column for member in found for column in member.columns], archive, members, max(lengths.values()))


def _member(archive: zipfile.ZipFile, file: str, path: Path) -> Member:
    name = file.removesuffix(".npy")
    with archive.open(file) as content:
        version = npy.read_magic(content)
        if version not in HEADERS:
            raise DataError(f"Expected {WHAT} in {path}, but {name!r} is of another version of the format, {version}.")
        shape, by_columns, dtype = HEADERS[version](content)
        start = content.tell()
    if not shape or dtype.kind not in "biufU" or any(size < 0 for size in shape):
        raise DataError(f"Expected {WHAT}, (n, ...), in {path}, but {name!r} has shape {shape} and type {dtype}.")
    if prod(shape) * dtype.itemsize != archive.getinfo(file).file_size - start:
        raise DataError(f"Expected {WHAT} in {path}, but {name!r} has more or fewer values than it says. Is the file damaged?")
    if (len(shape) == 2 and shape[1] > WIDEST) or prod(shape[1:]) * dtype.itemsize > BYTES:
        raise DataError(f"Expected at most {WIDEST} columns and {BYTES} bytes in a row of {path}, but {name!r} has more.")
    return Member(name, shape, by_columns and len(shape) > 1, dtype, start)
