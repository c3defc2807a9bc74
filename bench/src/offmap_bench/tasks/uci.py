"""Eight UCI regressions, cut along their first principal component: either the outside or the middle is OOD."""

from __future__ import annotations

import io
import math
import os
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from offmap.errors import ConfigError, DataError, nearest
from offmap_bench.tasks.columns import moments, read_gzip
from offmap_bench.tasks.originals import ORIGINALS, download
from offmap_bench.tasks.places import data_folder, offline
from offmap_bench.tasks.task import Pair, Task, pair, tensor

Array = NDArray[np.float64]
Index = NDArray[np.int64]

SETS = ("yacht", "energy", "concrete", "wine", "power", "naval", "protein", "kin8nm")
MODES = ("extrapolation", "interpolation")
TEST_SHARE, VALID_SHARE = 0.1, 0.05
DIGITS = 9
"""Decimals of the projection that decide the order: rows that differ by rounding alone keep that of the file."""


def uci(name: str, mode: str, seed: int = 0, folder: str | Path | None = None) -> Task:
    """The paper's protocol. Rows are sorted along the first principal component of the standardised inputs; the middle half is
    *internal*. Extrapolation trains on it and calls the rest OOD, interpolation the reverse.

    Of the in-distribution rows a tenth is for testing and, of the others, a twentieth for validation, at random by `seed`. Inputs and
    targets are standardised by mean and standard deviation of the training part: NLL, RMSE and widths are in these units.
    `folder` holds `<name>.csv.gz`, the target last; by default it is `uci` below the folder that OFFMAP_DATA names, and four of
    the sets are downloaded to there when they are missing.
    """
    for kind, word, valid in (("name", name, SETS), ("mode", mode, MODES)):
        if word not in valid:
            raise ConfigError(f"Expected the {kind} of a UCI task to be {nearest(word, valid)}, but got {word!r}.")
    values = read(name, folder)
    return cut(f"uci/{name}/{mode}", values[:, :-1], values[:, -1], mode, seed)


def cut(name: str, x: Array, y: Array, mode: str, seed: int) -> Task:
    """A regression table as a task, by the protocol of `uci`."""
    internal, external = halves(x)
    familiar, strange = (internal, external) if mode == "extrapolation" else (external, internal)
    train, valid, test = split(familiar, seed)
    shift, scale = moments(x[train])
    middle, unit = moments(y[train])

    def part(rows: Index) -> Pair:
        return pair((x[rows] - shift) / scale, (y[rows] - middle) / unit)

    return Task(
        name=name,
        train=part(train),
        valid=part(valid),
        test=part(test),
        ood={mode: tensor((x[strange] - shift) / scale)},
        likelihood="gaussian",
        outputs=2,
    )


def read(name: str, folder: str | Path | None = None) -> Array:
    """The table as it is in the file, (n, columns)."""
    path = place(name, folder)
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


def place(name: str, folder: str | Path | None) -> Path:
    """The file of a set in the given folder, else below OFFMAP_DATA; downloaded to there if it is missing and can be had."""
    path = (data_folder() / "uci" if folder is None else Path(folder)) / f"{name}.csv.gz"
    if folder is not None or path.exists():
        return path
    if name in ORIGINALS and not offline():
        download(name, path)
    elif not os.environ.get("OFFMAP_DATA"):
        raise DataError(
            "Expected OFFMAP_DATA to name the folder of downloaded data sets, but it is not set. Set it to a folder that holds "
            "`uci/<name>.csv.gz`, or pass `folder=`."
        )
    return path


def halves(x: Array) -> tuple[Index, Index]:
    """Rows of the middle half along the first principal component, and the others: (n, D) -> (n/2,), (n/2,).

    >>> halves(np.array([[5.0, 9.0], [1.0, 9.0], [3.0, 9.0], [2.0, 9.0]]))
    (array([3, 2]), array([1, 0]))
    """
    shift, scale = moments(x)
    z = (x - shift) / scale
    _, vectors = np.linalg.eigh(z.T @ z)
    first = vectors[:, -1]
    first = first * np.sign(first[np.abs(first).round(DIGITS).argmax()])  # eigenvectors come with either sign
    order = np.argsort((z @ first).round(DIGITS), kind="stable")
    low, high = len(x) // 4, 3 * len(x) // 4
    return order[low:high], np.concatenate([order[:low], order[high:]])


def split(rows: Index, seed: int, shares: tuple[float, float] = (TEST_SHARE, VALID_SHARE)) -> tuple[Index, Index, Index]:
    """Training, validation and test rows: a tenth is for testing, a twentieth of the rest for validation, rounded up.

    `shares` are others, of all rows and of the rest.

    >>> [len(part) for part in split(np.arange(154), 0)]
    [131, 7, 16]
    """
    mixed = np.random.RandomState(seed).permutation(rows)
    test = math.ceil(shares[0] * len(mixed))
    valid = math.ceil(shares[1] * (len(mixed) - test))
    return mixed[test + valid :], mixed[test : test + valid], mixed[:test]
