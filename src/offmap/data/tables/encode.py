"""Columns of numbers and words as rows of numbers, by what the training rows have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from offmap.data.tables.columns import Columns, Numbers
from offmap.errors import DataError

Index = NDArray[np.int64]

LEVELS = 100
"""Different words of one column; with more of them they are names, which tell a net nothing."""


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
                found = sorted({str(column[i]) for i in rows.tolist()})
                if len(found) > LEVELS:
                    raise DataError(
                        f"Expected at most {LEVELS} different words in column {name!r}, but got {len(found)}, such as "
                        f"{found[0]!r}. Leave it out with `drop`."
                    )
                levels[name] = tuple(found)
                continue
            values = column[rows]
            given = values[~np.isnan(values)]
            if not len(given):
                raise DataError(
                    f"Expected numbers in column {name!r}, but all are missing in training. Leave it out with `drop`."
                )
            median = float(np.median(given))
            mean, spread = moments(np.where(np.isnan(values), median, values))
            numbers[name] = median, float(mean), float(spread)
        return Code(numbers, levels)

    def rows(self, columns: Columns, rows: Index | None = None) -> Numbers:
        """(n, D): all rows, or those named; columns in the order of the training table, numbers before words."""
        parts: list[Numbers] = []
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
