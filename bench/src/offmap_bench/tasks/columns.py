"""A whole table as named columns of numbers or words, and those as rows of numbers."""

from __future__ import annotations

import gzip
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offmap.data.tables.schema import Column, parse_column
from offmap.data.tables.table import open_table
from offmap.errors import DataError

Columns = dict[str, Column]
Index = NDArray[np.int64]

MAX_UNPACKED = {"text": 1 << 24, "arrays": 1 << 26}
"""Bytes that a file may have when unpacked, whatever its size."""

MAX_RATIO = 20
"""How often a larger one may outgrow its file; tables of numbers do so ten times at most."""

MAX_WORDS = 1 << 22
"""Words of one column, in a file of fewer bytes: each takes a hundred bytes in memory."""

LEVELS = 100
"""Different words of one column; with more of them they are names, which tell a net nothing."""


def read(path: str | Path, words: Sequence[str] = ()) -> Columns:
    """Read all columns of a table; those named in `words` are words even where they look like numbers."""
    path, size = Path(path), 0
    with open_table(path) as table:
        if table.typed:
            check_size(path, 8 * (table.rows(0) or 0) * len(table.names))
        values: dict[str, list[Any]] = {name: [] for name in table.names}
        for block in table.blocks((), table.names):
            for name, column in block.raw.items():
                values[name].extend(column)
                if isinstance(column[0], bool | str):
                    size += sum(len(str(value)) for value in column)
                    if table.typed and len(values[name]) > max(MAX_WORDS, path.stat().st_size):
                        raise DataError(
                            f"Expected at most {MAX_WORDS} words or truth values in {path}, or numbers, but {name!r} has more."
                        )
            check_size(path, size, "text")
        if not any(values.values()):
            raise DataError(f"Expected rows in {path}, but there are none.")
        return {
            name: parse_column(table, name, column, words=bool({name, name.partition("[")[0]} & {*words}))
            for name, column in values.items()
        }


def read_gzip(path: Path) -> bytes:
    """Read what a gzip file holds; refuse it as soon as it is more than any table would be."""
    with gzip.open(path) as file:
        content = file.read(_max_bytes(path, "text") + 1)
    check_size(path, len(content), "text")
    return content


def check_size(path: Path, size: int, kind: str = "arrays") -> None:
    """Refuse a file that would fill the memory when unpacked."""
    if size > _max_bytes(path, kind):
        raise DataError(
            f"Expected at most {_max_bytes(path, kind)} bytes in {path} when unpacked, but there are more. Pack it less tightly."
        )


def _max_bytes(path: Path, kind: str) -> int:
    return max(MAX_UNPACKED[kind], MAX_RATIO * path.stat().st_size)


@dataclass(frozen=True)
class Code:
    """Numbers become (value − mean) / standard deviation, the median where they are missing; words one 0/1 for each level.

    A word that is no level gives zeros. `numbers` holds (median, mean, standard deviation), `levels` the words, by column.
    """

    numbers: Mapping[str, tuple[float, float, float]]
    levels: Mapping[str, tuple[str, ...]]

    @staticmethod
    def of(columns: Columns, rows: Index) -> Code:
        """The code of these rows."""
        numbers: dict[str, tuple[float, float, float]] = {}
        levels: dict[str, tuple[str, ...]] = {}
        for name, column in columns.items():
            if isinstance(column, list):
                texts = sorted({str(column[i]) for i in rows.tolist()})
                if len(texts) > LEVELS:
                    raise DataError(
                        f"Expected at most {LEVELS} different words in column {name!r}, but got {len(texts)}, such as "
                        f"{texts[0]!r}. Leave it out with `drop`."
                    )
                levels[name] = tuple(texts)
                continue
            values = column[rows]
            present = values[~np.isnan(values)]
            if not len(present):
                raise DataError(
                    f"Expected numbers in column {name!r}, but all are missing in training. Leave it out with `drop`."
                )
            median = float(np.median(present))
            mean, spread = moments(np.where(np.isnan(values), median, values))
            numbers[name] = median, float(mean), float(spread)
        return Code(numbers, levels)

    def rows(self, columns: Columns, rows: Index | None = None) -> NDArray[np.float64]:
        """(n, D): all rows, or those named; columns in the order of the training table, numbers before words."""
        parts: list[NDArray[np.float64]] = []
        for name, (median, mean, spread) in self.numbers.items():
            values = np.asarray(columns[name], dtype=np.float64)
            parts.append(((np.where(np.isnan(values), median, values) - mean) / spread)[:, None])
        for name, levels in self.levels.items():
            words = np.array([str(word) for word in columns[name]])
            parts.append((words[:, None] == np.array(levels)[None]).astype(np.float64))
        matrix = np.concatenate(parts, axis=1)
        return matrix if rows is None else matrix[rows]


def moments(values: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Mean and standard deviation of each column; 1 for columns that do not vary."""
    mean, spread = values.mean(0), values.std(0)
    # the mean of equal numbers is rounded, so that their deviation may be a few last digits instead of 0
    varies = spread > 1e-12 * np.maximum(np.abs(mean), 1e-300)
    return mean, np.where(varies, spread, 1.0)
