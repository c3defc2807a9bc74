"""NPZ, all arrays read from the start in step: none is held as a whole, compressed or not, and nothing in them is executed."""

from __future__ import annotations

import tempfile
import zipfile
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from math import prod
from pathlib import Path
from typing import IO, Any, BinaryIO, ClassVar, NamedTuple

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from offmap.data.tables.table import FORMATS, MAX_COLUMNS, Columns, Table, Write, rows_per_block
from offmap.errors import DataError

MAX_BYTES = 1 << 26  # of one block, and of one row


class Member(NamedTuple):
    """An array (n, ...) of the archive, whose values begin at byte `start`; (n, D) is D columns, any other is one."""

    name: str
    shape: tuple[int, ...]
    fortran: bool
    dtype: np.dtype[Any]
    start: int


class NpzTable(Table):
    """An open NPZ file. The columns of an array are read together, unless it is in Fortran order."""

    kind: ClassVar[str] = "arrays of numbers or words"
    writable: ClassVar[bool] = True

    def open(self, separator: str | None, stack: ExitStack) -> list[str]:
        """Read and compare the headers of all arrays."""
        path = self.path
        self.archive: zipfile.ZipFile = stack.enter_context(zipfile.ZipFile(path))
        members = [self._read_header(info) for info in self.archive.infolist()]
        lengths = {member.name: member.shape[0] for member in members}
        if not lengths:
            raise DataError(f"Expected {self.kind} in {path}, but there are none.")
        if len(set(lengths.values())) > 1:
            raise DataError(f"Expected arrays of one length in {path}, but got {lengths}.")
        self.count: int = members[0].shape[0]
        self.columns: dict[str, tuple[Member, int]] = {
            f"{member.name}[{i}]" if len(member.shape) == 2 else member.name: (member, i)
            for member in members
            for i in range(member.shape[1] if len(member.shape) == 2 else 1)
        }
        return list(self.columns)

    def _read_header(self, info: zipfile.ZipInfo) -> Member:
        """Read the header of an array; believe it only if it fits the bytes that follow."""
        name, path = info.filename.removesuffix(".npy"), self.path
        with self.archive.open(info) as content:
            read = npy.read_array_header_1_0 if npy.read_magic(content) == (1, 0) else npy.read_array_header_2_0
            shape, fortran, dtype = read(content)
            start = content.tell()
        if not shape or dtype.kind not in "biufU" or any(size < 0 for size in shape):
            raise DataError(f"Expected {self.kind}, (n, ...), in {path}, but {name!r} has shape {shape} and type {dtype}.")
        if prod(shape) * dtype.itemsize != info.file_size - start:
            raise DataError(f"Expected {self.kind} in {path}, but {name!r} does not have the values it declares. Is it damaged?")
        if (len(shape) == 2 and shape[1] > MAX_COLUMNS) or prod(shape[1:]) * dtype.itemsize > MAX_BYTES:
            raise DataError(f"Expected rows of at most {MAX_COLUMNS} columns and {MAX_BYTES} bytes in {path}, not {name!r}.")
        return Member(name, shape, fortran and len(shape) > 1, dtype, start)

    def rows(self, done: int) -> int | None:
        """Return the number of rows, as the headers have it."""
        return self.count

    def chunks(self, columns: Sequence[str]) -> Iterator[dict[str, NDArray[Any]]]:
        """Yield arrays by column, from one stream for each array, or for each column in Fortran order."""
        streams: dict[tuple[str, int], tuple[IO[bytes], tuple[int, ...], np.dtype[Any]]] = {}
        keys = {name: (member.name, i if member.fortran else 0) for name in columns for member, i in [self.columns[name]]}
        for name, key in keys.items():
            member, i = self.columns[name]
            if member.fortran and len(member.shape) > 2:
                raise DataError(f"Expected arrays with more than two axes in C order in {self.path}, but {name!r} is not.")
            if key not in streams:
                file = self.archive.open(f"{member.name}.npy")
                skip = member.start + (i * self.count * member.dtype.itemsize if member.fortran else 0)
                while skip and (skipped := len(file.read(min(skip, 1 << 20)))):
                    skip -= skipped
                streams[key] = file, () if member.fortran else member.shape[1:], member.dtype
        size = sum(prod(shape) * dtype.itemsize for _, shape, dtype in streams.values())
        step = min(rows_per_block(sum(prod(shape) for _, shape, _ in streams.values())), max(1, MAX_BYTES // max(1, size)))
        for done in range(0, self.count, step):
            arrays = {key: _read_rows(min(step, self.count - done), *stream) for key, stream in streams.items()}
            yield {name: a[:, self.columns[name][1]] if (a := arrays[keys[name]]).ndim == 2 else a for name in columns}

    @staticmethod
    @contextmanager
    def write(file: BinaryIO, path: Path) -> Generator[Write]:
        """Write an array (n,) for each column, kept in nameless files until all rows are there, as a header has their number."""
        parts: dict[str, tuple[IO[bytes], list[tuple[int, np.dtype[Any]]]]] = {}
        with ExitStack() as stack:

            def append(columns: Columns) -> None:
                for name, values in columns.items():
                    if name not in parts:
                        parts[name] = (stack.enter_context(tempfile.TemporaryFile(dir=path.absolute().parent)), [])
                    parts[name][0].write(values.tobytes())
                    parts[name][1].append((len(values), values.dtype))

            yield append
            with zipfile.ZipFile(file, "w") as archive:
                for name, (part, blocks) in parts.items():
                    part.seek(0)
                    dtype = np.result_type(*{kind for _, kind in blocks})  # words of different lengths have different types
                    header = {"descr": npy.dtype_to_descr(dtype), "fortran_order": False, "shape": (sum(n for n, _ in blocks),)}
                    with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                        npy.write_array_header_2_0(member, header)
                        for rows, kind in blocks:
                            member.write(np.frombuffer(part.read(rows * kind.itemsize), kind).astype(dtype).tobytes())


def _read_rows(rows: int, file: IO[bytes], shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    content = file.read(rows * prod(shape) * dtype.itemsize)
    if len(content) < rows * prod(shape) * dtype.itemsize:
        raise EOFError("an array has fewer values than it says")
    return np.frombuffer(content, dtype).reshape(rows, *shape)


FORMATS[".npz"] = NpzTable
