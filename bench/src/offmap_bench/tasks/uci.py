"""Eight UCI regressions, cut along their first principal component: either the outside or the middle is OOD."""

from __future__ import annotations

import gzip
import hashlib
import io
import logging
import tomllib
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from offmap.atomic import write_whole
from offmap.errors import DataError
from offmap_bench.tasks.download import data_folder, fetch, offline
from offmap_bench.tasks.tabular import MODES, halves, read_gzip
from offmap_bench.tasks.task import Array, Task, check_name, data_root, split, table_task

logger = logging.getLogger("offmap")

SETS = ("yacht", "energy", "concrete", "wine", "power", "naval", "protein", "kin8nm")


def uci(name: str, mode: str, seed: int = 0, folder: str | Path | None = None) -> Task:
    """The paper's protocol. Rows are sorted along the first principal component of the standardised inputs; the middle half is
    *internal*. Extrapolation trains on it and calls the rest OOD, interpolation the reverse.

    Of the in-distribution rows a tenth is for testing and, of the others, a twentieth for validation, at random by `seed`.
    Inputs and targets are standardised by mean and standard deviation of the training part: NLL, RMSE and widths are in these
    units. `folder` holds `<name>.csv.gz`, the target last; by default it is `uci` below the folder that OFFMAP_DATA names, and
    four of the sets are downloaded there when they are missing.
    """
    check_name("the name of a UCI task to be", name, SETS)
    check_name("the mode of a UCI task to be", mode, MODES)
    values = read(name, folder)
    return cut(f"uci/{name}/{mode}", values[:, :-1], values[:, -1], mode, seed)


def cut(name: str, x: Array, y: Array, mode: str, seed: int) -> Task:
    """A regression table as a task, by the protocol of `uci`."""
    internal, external = halves(x)
    id_rows, ood_rows = (internal, external) if mode == "extrapolation" else (external, internal)
    return table_task(name, x, y, split(id_rows, seed), {mode: ood_rows})


def read(name: str, folder: str | Path | None = None) -> Array:
    """The table as it is in the file, (n, columns); downloaded if it is missing below OFFMAP_DATA and can be had."""
    path = (data_folder() / "uci" if folder is None else Path(folder)) / f"{name}.csv.gz"
    if folder is None and not path.exists():
        if name in ORIGINALS and not offline():
            download(name, path)
        else:
            data_root("uci/<name>.csv.gz")
    try:
        values = np.loadtxt(io.StringIO(read_gzip(path).decode("utf-8")), delimiter=",", skiprows=1, ndmin=2)
    except FileNotFoundError as error:
        raise DataError(
            f"Expected the data set at {path}, but there is no such file. Put it there (gzip-compressed CSV, one header row, "
            "the target last), or set OFFMAP_DATA to the folder that has it in its folder `uci`."
        ) from error
    except (OSError, EOFError, zlib.error, ValueError) as error:
        raise DataError(f"Expected gzip-compressed CSV with one header row at {path}, but it cannot be read: {error}.") from error
    if values.shape[1] < 2 or not np.isfinite(values).all():
        raise DataError(f"Expected finite numbers in two columns or more at {path}, but some are missing or not finite.")
    return values


# ------------------------------------------------------------------------------------------------ the archive

MAX_TEXT = 100_000_000
"""Bytes of a text file; what claims more is no table of the archive."""


ORIGINALS: dict[str, dict[str, Any]] = tomllib.loads(Path(__file__).with_name("uci.toml").read_text(encoding="utf-8"))
"""Zips of the archive; the file says what its fields are."""


def download(name: str, path: Path, original: dict[str, Any] | None = None, *, show: bool | None = None) -> None:
    """Write the table to `path` as gzip-compressed CSV, one header row, from the archive's file."""
    original = original or ORIGINALS[name]
    url, member = original["url"], original["member"]
    archive = fetch(url, path.with_name(f"{name}.zip"), show=show)
    try:
        values = table(archive, original)
    except (zipfile.BadZipFile, zlib.error, OSError, EOFError, ValueError, IndexError, NotImplementedError) as error:
        raise DataError(f"Expected {member} in the zip at {url}, but it cannot be read: {error}.") from error
    finally:
        archive.unlink()
    if digest(values[np.lexsort(values.T[::-1])]) != original["rows"]:
        raise DataError(
            f"Expected the table of {name!r} at {url}, but it differs from the known one. Put one that you trust at {path}."
        )
    if digest(values) != original["order"]:
        logger.warning("The rows of %s come in another order than in offmap's records, so splits by seed differ.", name)
    text = "\n".join(",".join(map(repr, row)) for row in values.tolist())
    header = ",".join([*(f"x{i}" for i in range(values.shape[1] - 1)), "y"])
    write_whole(path, gzip.compress(f"{header}\n{text}\n".encode(), mtime=0))


def table(path: Path, original: dict[str, Any]) -> Array:
    """The numbers of the text file in the zip, the target last: (n, columns)."""
    with zipfile.ZipFile(path) as archive:
        members = [name for name in archive.namelist() if name.rpartition("/")[2] == original["member"] and "MACOSX" not in name]
        if not members:
            raise ValueError(f"it holds only {archive.namelist()[:10]}")
        if archive.getinfo(members[0]).file_size > MAX_TEXT:
            raise ValueError(f"it would be larger than {MAX_TEXT} bytes")
        text = archive.read(members[0]).decode("utf-8")
    values = np.loadtxt(io.StringIO(text), delimiter=original.get("delimiter"), skiprows=original.get("skip", 0), ndmin=2)
    return values[:, original["columns"]]


def digest(values: Array) -> str:
    """The SHA-256 of the numbers of a table, in hexadecimal digits.

    >>> digest(np.array([[1.0, 2.0]]))[:16]
    'dc91ce9a50ddc828'
    """
    return hashlib.sha256(np.ascontiguousarray(values + 0.0, "<f8").tobytes()).hexdigest()  # + 0.0: no negative zeros
