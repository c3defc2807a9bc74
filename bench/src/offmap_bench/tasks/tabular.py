"""A user's own table as a task: what is OOD is another file, rows with certain values, or one end of the data."""

from __future__ import annotations

import gzip
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offmap import checks
from offmap.data.tables.schema import Column, parse_column
from offmap.data.tables.table import open_table
from offmap.errors import ConfigError, DataError
from offmap_bench.tasks.task import Array, Index, Task, check_name, moments, pair, split, tensor

MODES = ("extrapolation", "interpolation")
PREFIX = "file:"
Columns = dict[str, Column]

LARGEST = 1e30
"""Numbers beyond it do not survive being squared in single precision."""

REMEDY = 'Mend them, or pass missing="impute".'


@dataclass(frozen=True)
class Own:
    """The rows of a CSV, NPZ or Parquet file; every column but `target` and those in `drop` is an input.

    OOD rows, one of three: `held={"region": ["north"]}`, those with these values, whose column is then no input; `ood` as
    the path of a file with the same columns, or {name: path} of several; or `ood` as "extrapolation" or "interpolation", the
    cut of the UCI tables along the first principal component. The first of these words is the default.

    Numbers are standardised by the training part; words become one 0/1 input for each word of the training part. `words` names
    columns of numbers that stand for words. A target of words, truth values, or whole numbers with at most 20 different values
    makes a classification (classes in sorted order), any other a regression, standardised; `kind` overrules that. Missing
    values are refused; with `missing="impute"`, numbers get the median of the training part, words are a word of their own, and
    rows without a target are left out. `shares` are for testing and, of the rest, for validation, at random by the seed.
    """

    path: str | Path
    target: str
    ood: str | Path | Mapping[str, str | Path] | None = None
    held: Mapping[str, Sequence[object]] | None = None
    kind: str | None = None
    missing: str = "refuse"
    drop: Sequence[str] = ()
    words: Sequence[str] = ()
    shares: tuple[float, float] = (0.2, 0.2)

    def __post_init__(self) -> None:
        checks.one_of("kind", "regression" if self.kind is None else self.kind, ("regression", "classification"))
        checks.one_of("missing", self.missing, ("refuse", "impute"))
        for name, names in (("target", [self.target]), ("drop", self.drop), ("words", self.words)):
            if not isinstance(names, list | tuple) or not all(isinstance(each, str) for each in names):
                raise ConfigError(f"Expected `{name}` to name columns, but got {names if name != 'target' else self.target!r}.")
        shares = self.shares if isinstance(self.shares, list | tuple) else ()
        if len(shares) != 2 or not all(isinstance(v, int | float) and 0 < v < 1 for v in shares):
            raise ConfigError(f"Expected `shares` to be two numbers between 0 and 1, but got {self.shares!r}.")
        if not isinstance(self.ood, str | Path | Mapping | None) or not isinstance(self.held, Mapping | None):
            raise ConfigError(
                f"Expected `ood` to be a path, {' or '.join(map(repr, MODES))}, or paths by name, and `held` values by column, "
                f"but got {self.ood!r} and {self.held!r}."
            )
        if self.ood is not None and self.held is not None:
            raise ConfigError("Expected `ood` or `held` to say what is OOD, but both do. Leave one of them out.")
        for name in ("train", "valid", "test"):
            if isinstance(self.ood, Mapping) and name in self.ood:
                raise ConfigError(f"Expected a name of OOD rows in `ood`, but {name!r} is that of in-distribution ones.")
        for path in (self.path, *self.others().values()):
            if not Path(path).is_file():
                also = f" Or did you mean {' or '.join(MODES)}?" if path is not self.path else ""
                raise DataError(f"Expected a table at {path}, but there is no such file.{also}")

    def others(self) -> dict[str, Path]:
        """Files of OOD rows, by name."""
        if isinstance(self.ood, Mapping):
            return {name: Path(path) for name, path in self.ood.items()}
        return {} if self.ood is None or self.ood in MODES else {Path(self.ood).name: Path(self.ood)}

    def task(self, seed: int = 0) -> Task:
        """The task; `seed` splits the in-distribution rows."""
        columns, target = self.read()
        inputs = {name: column for name, column in columns.items() if name not in (self.held or {})}
        if not inputs:
            raise DataError(f"Expected inputs in {self.path}, but no column is left.")
        rest, ood_rows = self.find_ood(columns, len(target)) if len(target) else (np.arange(0), {})
        if len(rest) < 20:
            raise DataError(f"Expected 20 in-distribution rows or more in {self.path}, but got {len(rest)}.")
        parts = split(rest, seed, self.shares)
        code = Code.of(inputs, parts[0])
        y, likelihood, outputs, unit = self.encode_target(target, rest, parts[0])
        x = code.rows(inputs)
        ood = {name: x[rows] for name, rows in ood_rows.items()}
        ood |= {name: code.rows(self.read_other(path, inputs)) for name, path in self.others().items()}
        train, valid, test = (pair(x[part], y[part]) for part in parts)
        name = f"file/{Path(self.path).name}"
        return Task(name, train, valid, test, {key: tensor(rows) for key, rows in ood.items()}, likelihood, outputs, unit)

    def read(self) -> tuple[Columns, Column]:
        """Inputs and target of the file, whole, as far as `missing` allows."""
        columns = read(self.path, self.words)
        arrays = {name.partition("[")[0] for name in columns}
        for option, names in (("target", [self.target]), ("held", self.held or ()), ("drop", self.drop), ("words", self.words)):
            for name in names:
                if name not in columns and not (option in ("drop", "words") and name in arrays):
                    check_name(f"`{option}` to name a column of {self.path},", name, columns)
        target = columns[self.target]
        present = ~gaps(target)
        if not present.all() and self.missing == "refuse":
            raise DataError(f"Expected a target in each row of {self.path}, but {int((~present).sum())} have none. {REMEDY}")
        dropped = {self.target, *self.drop}
        inputs = {n: select(c, present) for n, c in columns.items() if not {n, n.partition("[")[0]} & dropped}
        return self.fill_gaps(inputs, self.path), select(target, present)

    def fill_gaps(self, columns: Columns, path: str | Path) -> Columns:
        """Inputs without what is missing or infinite: refused, or for words a word of its own; numbers wait for the median."""
        for name, column in columns.items():
            if not isinstance(column, list) and (np.abs(column) > LARGEST).any():
                raise DataError(f"Expected numbers in column {name!r} of {path}, but some are infinite or beyond {LARGEST:g}.")
        counts = ", ".join(f"{name!r} ({n})" for name, column in columns.items() if (n := int(gaps(column).sum())))
        if counts and self.missing == "refuse":
            raise DataError(f"Expected a value in each row of {path}, but some are missing in {counts}. {REMEDY}")
        return {n: [word or "(missing)" for word in c] if isinstance(c, list) else c for n, c in columns.items()}

    def find_ood(self, columns: Columns, count: int) -> tuple[Index, dict[str, Index]]:
        """In-distribution rows of the file, and OOD ones by the name of their set."""
        all_rows = np.arange(count)
        if self.others():
            return all_rows, {}
        if self.held is None:
            mode = str(self.ood or MODES[0])
            internal, external = halves(Code.of(columns, all_rows).rows(columns))
            return (internal, {mode: external}) if mode == MODES[0] else (external, {mode: internal})
        ood_rows = {
            f"{name} {', '.join(map(str, values))}": rows_with(columns[name], name, values) for name, values in self.held.items()
        }
        return np.setdiff1d(all_rows, np.concatenate(list(ood_rows.values()))), ood_rows

    def encode_target(self, target: Column, rest: Index, train: Index) -> tuple[NDArray[Any], str, int, float]:
        """Targets, the name of their likelihood, how many numbers a net for it gives, and what targets were divided by."""
        if isinstance(target, list):
            if self.kind == "regression":
                raise DataError(f"Expected numbers in the target {self.target!r} of {self.path} for a regression, but got words.")
            values = np.array(target)
        else:
            if (np.abs(target) > LARGEST).any():
                raise DataError(f"Expected numbers in the target {self.target!r}, but some are infinite or beyond {LARGEST:g}.")
            integral = bool((target == target.round()).all())
            if self.kind == "regression" or (self.kind is None and not (integral and len(np.unique(target[rest])) <= 20)):
                middle, unit = moments(target[train])
                return (target - middle) / unit, "gaussian", 2, float(unit)
            if not integral:
                raise DataError(f"Expected words or whole numbers in the target {self.target!r} for a classification.")
            values = target
        levels = np.unique(values[rest])
        if len(levels) < 2 or len(levels) > len(rest) / 2:
            raise DataError(
                f"Expected two classes or more in {self.target!r} of {self.path}, but got {len(levels)} in {len(rest)} rows."
            )
        return np.searchsorted(levels, values), "categorical", len(levels), 1.0

    def read_other(self, path: Path, inputs: Columns) -> Columns:
        """The inputs of another file, which must have the same columns of the same kind."""
        columns = read(path, [*self.words, *(name for name, column in inputs.items() if isinstance(column, list))])
        lost = [name for name in inputs if name not in columns]
        if lost:
            raise DataError(f"Expected the columns of {self.path} in {path}, but {lost} are missing.")
        for name, column in inputs.items():
            if isinstance(columns[name], list) != isinstance(column, list):
                raise DataError(f"Expected numbers in column {name!r} of {path}, as in {self.path}, but got words.")
        return self.fill_gaps({name: columns[name] for name in inputs}, path)


def task(path: str | Path, target: str, *, seed: int = 0, **options: Any) -> Task:
    """A table of your own as a task; `Own` says what the options are."""
    return Own(path, target, **options).task(seed)


def held_of(text: str) -> dict[str, Sequence[object]]:
    """A column and its values: "region:north,west"."""
    column, mark, values = text.partition(":")
    if not mark:
        raise ValueError(f"there is no colon in {text!r}")
    return {column: values.split(",")}


WORDS: dict[str, Callable[[str], Any]] = {
    **dict.fromkeys(("target", "ood", "kind", "missing"), str),
    **dict.fromkeys(("drop", "words"), lambda text: text.split(",")),
    "held": held_of,
    "shares": lambda text: tuple(float(share) for share in text.split(",")),
}
"""How options are read in the name of a table."""


def parse_name(name: str) -> Own:
    """A table by a name such as "file:cars.csv#target=price&held=region:north,west&missing=impute", for plans."""
    path, mark, text = name.removeprefix(PREFIX).rpartition("#")
    options = {key: value for key, _, value in (part.partition("=") for part in (text.split("&") if mark else []))}
    for key in options:
        check_name(f"an option of {name!r} to be", key, WORDS)
    if "target" not in options:
        raise ConfigError(f"Expected a table to be named like 'file:cars.csv#target=price', but got {name!r}.")
    try:
        return Own(path, **{key: WORDS[key](value) for key, value in options.items()})
    except ValueError as error:
        raise ConfigError(f"Expected options like 'held=region:north,west' and 'shares=0.2,0.2' in {name!r}: {error}.") from error
    except DataError as error:  # a missing file is a mistake of the plan
        raise ConfigError(str(error)) from error


# ------------------------------------------------------------------------------------------------ columns


def select(column: Column, rows: NDArray[np.bool_]) -> Column:
    """Some rows of a column."""
    return [word for word, keep in zip(column, rows, strict=True) if keep] if isinstance(column, list) else column[rows]


def gaps(column: Column) -> NDArray[np.bool_]:
    """Which values are missing."""
    return np.array([word is None for word in column], bool) if isinstance(column, list) else np.isnan(column)


def rows_with(column: Column, name: str, values: Sequence[object]) -> Index:
    """The rows that have one of these values; each must be found."""
    try:
        wanted = [str(value) if isinstance(column, list) else float(str(value)) for value in values]
    except ValueError as error:
        raise ConfigError(f"Expected numbers in `held` for column {name!r}, but got {list(values)!r}.") from error
    present = set(column) if isinstance(column, list) else set(column.tolist())
    if not wanted or any(value not in present for value in wanted):
        some = sorted(map(str, present))[:10]
        raise ConfigError(f"Expected `held` to have values of column {name!r}, such as {some}, but got {list(values)!r}.")
    return np.flatnonzero(np.isin(np.array(column), np.array(wanted)))


def halves(x: Array) -> tuple[Index, Index]:
    """Rows of the middle half along the first principal component, and the others: (n, D) -> (n/2,), (n/2,).

    >>> halves(np.array([[5.0, 9.0], [1.0, 9.0], [3.0, 9.0], [2.0, 9.0]]))
    (array([3, 2]), array([1, 0]))
    """
    shift, scale = moments(x)
    z = (x - shift) / scale
    first = np.linalg.eigh(z.T @ z)[1][:, -1]
    first = first * np.sign(first[np.abs(first).round(9).argmax()])  # eigenvectors come with either sign
    order = np.argsort((z @ first).round(9), kind="stable")  # rows that differ by rounding alone keep the order of the file
    low, high = len(x) // 4, 3 * len(x) // 4
    return order[low:high], np.concatenate([order[:low], order[high:]])


@dataclass(frozen=True)
class Code:
    """Numbers become (value − mean) / standard deviation, the median where they are missing; words one 0/1 for each level.

    A word that is no level gives zeros. `numbers` holds (median, mean, standard deviation), `levels` the words, by column.
    """

    numbers: Mapping[str, tuple[float, float, float]]
    levels: Mapping[str, list[str]]

    @staticmethod
    def of(columns: Columns, rows: Index) -> Code:
        """The code of these rows."""
        numbers: dict[str, tuple[float, float, float]] = {}
        levels: dict[str, list[str]] = {}
        for name, column in columns.items():
            if isinstance(column, list):
                levels[name] = texts = sorted({str(column[i]) for i in rows.tolist()})
                if len(texts) > 100:  # these are names, which tell a net nothing
                    raise DataError(
                        f"Expected at most 100 different words in column {name!r}, but got {len(texts)}. Name it in `drop`."
                    )
                continue
            values = column[rows]
            if np.isnan(values).all():
                raise DataError(f"Expected numbers in column {name!r}, but all are missing in training. Name it in `drop`.")
            median = float(np.nanmedian(values))
            mean, spread = moments(np.where(np.isnan(values), median, values))
            numbers[name] = median, float(mean), float(spread)
        return Code(numbers, levels)

    def rows(self, columns: Columns) -> Array:
        """(n, D): columns in the order of the training table, numbers before words."""
        parts: list[Array] = []
        for name, (median, mean, spread) in self.numbers.items():
            values = np.asarray(columns[name], dtype=np.float64)
            parts.append(((np.where(np.isnan(values), median, values) - mean) / spread)[:, None])
        for name, levels in self.levels.items():
            words = np.array([str(word) for word in columns[name]])
            parts.append((words[:, None] == np.array(levels)[None]).astype(np.float64))
        return np.concatenate(parts, axis=1)


# ------------------------------------------------------------------------------------------------ files

MAX_UNPACKED = {"text": 1 << 24, "arrays": 1 << 26}
"""Bytes that a file may have when unpacked, whatever its size; larger ones may have 20 times it, as numbers grow ten times."""

MAX_WORDS = 1 << 22
"""Words of one column, in a file of fewer bytes: each takes a hundred bytes in memory."""


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
                        raise DataError(f"Expected at most {MAX_WORDS} words or truth values in {path}, but {name!r} has more.")
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
        content = file.read(max(MAX_UNPACKED["text"], 20 * path.stat().st_size) + 1)
    check_size(path, len(content), "text")
    return content


def check_size(path: Path, size: int, kind: str = "arrays") -> None:
    """Refuse a file that would fill the memory when unpacked."""
    if size > (most := max(MAX_UNPACKED[kind], 20 * path.stat().st_size)):
        raise DataError(f"Expected at most {most} bytes in {path} when unpacked, but there are more. Pack it less tightly.")
