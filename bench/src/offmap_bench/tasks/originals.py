"""UCI tables from the archive's own files, for sets whose original is plain text and gives the same table."""

from __future__ import annotations

import gzip
import hashlib
import io
import logging
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from offmap.errors import DataError
from offmap.io.atomic import write_whole
from offmap_bench.tasks.download import Remote, fetch

Array = NDArray[np.float64]

logger = logging.getLogger("offmap")

ARCHIVE = "https://archive.ics.uci.edu/static/public/"

LARGEST = 100_000_000
"""Bytes of a text file; what claims more is no table of the archive."""


@dataclass(frozen=True)
class Original:
    """A zip of the archive: the text file in it, how that is read, and which of its columns make the table, the target last.

    The archive publishes no checksums. So `rows` and `order`, digests of the table that the records of offmap were made from,
    stand in for one: of its rows in any order, and as they come.
    """

    url: str
    member: str
    columns: Sequence[int]
    rows: str
    order: str
    delimiter: str | None = None
    skip: int = 0


ORIGINALS = {
    "yacht": Original(
        url=ARCHIVE + "243/yacht+hydrodynamics.zip",
        member="yacht_hydrodynamics.data",
        columns=range(7),
        rows="1bd3364bf0c3ed03",
        order="ec08588637fd9358",
    ),
    "wine": Original(
        url=ARCHIVE + "186/wine+quality.zip",
        member="winequality-red.csv",
        columns=range(12),
        rows="38163c20a38e90b6",
        order="d4f6a6d672e0ee31",
        delimiter=";",
        skip=1,
    ),
    "naval": Original(
        url=ARCHIVE + "316/condition+based+maintenance+of+naval+propulsion+plants.zip",
        member="data.txt",
        columns=[*range(16), 17],
        rows="e1d461b910286c6f",
        order="79ef6f0669e7d0c3",
    ),
    "protein": Original(
        url=ARCHIVE + "265/physicochemical+properties+of+protein+tertiary+structure.zip",
        member="CASP.csv",
        columns=[*range(1, 10), 0],
        rows="af0581c414e994d6",
        order="19667c545027b658",
        delimiter=",",
        skip=1,
    ),
}
"""The other four are spreadsheets (energy, concrete, power) or not in the archive (kin8nm)."""


def download(name: str, path: Path, original: Original | None = None, *, show: bool | None = None) -> None:
    """Write the table to `path` as gzip-compressed CSV, one header row, from the archive's file."""
    original = original or ORIGINALS[name]
    archive = fetch(Remote(original.url), path.with_name(f"{name}.zip"), show=show)
    try:
        values = table(archive, original)
    except (zipfile.BadZipFile, zlib.error, OSError, EOFError, ValueError, IndexError, NotImplementedError) as error:
        raise DataError(f"Expected {original.member} in the zip at {original.url}, but it cannot be read: {error}.") from error
    finally:
        archive.unlink()
    if digest(ordered(values)) != original.rows:
        raise DataError(
            f"Expected the table of {name!r} at {original.url}, but its numbers are not those that offmap knows. "
            f"Put a table that you trust at {path}."
        )
    if digest(values) != original.order:
        logger.warning("The rows of %s come in another order than in offmap's records, so splits by seed differ.", name)
    text = "\n".join(",".join(map(repr, row)) for row in values.tolist())
    header = ",".join([*(f"x{i}" for i in range(values.shape[1] - 1)), "y"])
    write_whole(path, gzip.compress(f"{header}\n{text}\n".encode(), mtime=0))


def table(path: Path, original: Original) -> Array:
    """The numbers of the text file in the zip, the target last: (n, columns)."""
    with zipfile.ZipFile(path) as archive:
        found = [name for name in archive.namelist() if name.rpartition("/")[2] == original.member and "MACOSX" not in name]
        if not found:
            raise ValueError(f"it holds only {archive.namelist()[:10]}")
        if archive.getinfo(found[0]).file_size > LARGEST:
            raise ValueError(f"it would be larger than {LARGEST} bytes")
        text = archive.read(found[0]).decode("utf-8")
    values = np.loadtxt(io.StringIO(text), delimiter=original.delimiter, skiprows=original.skip, ndmin=2)
    return values[:, list(original.columns)]


def ordered(values: Array) -> Array:
    """Rows in the order of their numbers, first column first."""
    return values[np.lexsort(values.T[::-1])]


def digest(values: Array) -> str:
    """Sixteen hexadecimal digits of a table.

    >>> digest(np.array([[1.0, 2.0]]))
    'dc91ce9a50ddc828'
    """
    return hashlib.sha256(np.ascontiguousarray(values + 0.0, "<f8").tobytes()).hexdigest()[:16]  # + 0.0: no negative zeros
