"""A user's own table as a task: what is OOD is another file, rows with certain values, or one end of the data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offmap import checks
from offmap.data.tables.schema import Column
from offmap.errors import ConfigError, DataError, nearest
from offmap_bench.tasks.columns import Code, Columns, Index, read
from offmap_bench.tasks.task import Task, pair, tensor
from offmap_bench.tasks.uci import MODES, halves, moments, split

CLASSES = 20
"""A target of whole numbers with at most so many values is a class; with more it is a quantity."""

LEAST = 20
"""In-distribution rows."""

LARGEST = 1e30
"""Numbers beyond it do not survive being squared in single precision."""

GAP = "(missing)"
"""The word for a word that is missing."""

KINDS = ("regression", "classification")
RULES = ("refuse", "impute")
PREFIX = "file:"


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
        checks.one_of("kind", KINDS[0] if self.kind is None else self.kind, KINDS)
        checks.one_of("missing", self.missing, RULES)
        for name, names in (("target", [self.target]), ("drop", self.drop), ("words", self.words)):
            if not isinstance(names, list | tuple) or not all(isinstance(each, str) for each in names):
                raise ConfigError(f"Expected `{name}` to name columns, but got {names if name != 'target' else self.target!r}.")
        if not _are_shares(self.shares):
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
        if self.ood is None or self.ood in MODES:
            return {}
        if isinstance(self.ood, Mapping):
            return {name: Path(path) for name, path in self.ood.items()}
        return {Path(self.ood).name: Path(self.ood)}

    def task(self, seed: int = 0) -> Task:
        """The task; `seed` splits the in-distribution rows."""
        columns, target = self.read()
        inputs = {name: column for name, column in columns.items() if name not in (self.held or {})}
        if not inputs:
            raise DataError(f"Expected inputs in {self.path}, but no column is left.")
        rest, ood_rows = self.apart(columns, len(target)) if len(target) else (np.arange(0), {})
        if len(rest) < LEAST:
            raise DataError(f"Expected {LEAST} in-distribution rows or more in {self.path}, but got {len(rest)}.")
        parts = split(rest, seed, self.shares)
        code = Code.of(inputs, parts[0])
        y, likelihood, outputs = self.answers(target, rest, parts[0])
        x = code.rows(inputs)
        ood = {name: x[rows] for name, rows in ood_rows.items()}
        ood |= {name: code.rows(self.alike(path, inputs)) for name, path in self.others().items()}
        train, valid, test = (pair(x[part], y[part]) for part in parts)
        name = f"file/{Path(self.path).name}"
        return Task(name, train, valid, test, {key: tensor(rows) for key, rows in ood.items()}, likelihood, outputs)

    def read(self) -> tuple[Columns, Column]:
        """Inputs and target of the file, whole, as far as `missing` allows."""
        columns = read(self.path, self.words)
        arrays = {name.partition("[")[0] for name in columns}
        for option, names in (("target", [self.target]), ("held", self.held or ()), ("drop", self.drop), ("words", self.words)):
            for name in names:
                if name not in columns and not (option in ("drop", "words") and name in arrays):
                    valid = nearest(name, columns)
                    raise ConfigError(f"Expected `{option}` to name a column of {self.path}, {valid}, but got {name!r}.")
        target = columns[self.target]
        known = np.array([word is not None for word in target] if isinstance(target, list) else ~np.isnan(target))
        if not known.all() and self.missing == "refuse":
            raise DataError(f"Expected a target in each row of {self.path}, but {int((~known).sum())} have none. {REMEDY}")
        dropped = {self.target, *self.drop}
        inputs = {name: column for name, column in columns.items() if not {name, name.partition("[")[0]} & dropped}
        return self.fill_gaps({name: select_rows(column, known) for name, column in inputs.items()}, self.path), select_rows(
            target, known
        )

    def fill_gaps(self, columns: Columns, path: str | Path) -> Columns:
        """Inputs without what is missing or infinite: refused, or for words a word of its own; numbers wait for the median."""
        for name, column in columns.items():
            if not isinstance(column, list) and (np.abs(column) > LARGEST).any():
                raise DataError(f"Expected numbers in column {name!r} of {path}, but some are infinite or beyond {LARGEST:g}.")
        gaps = {name: count_gaps(column) for name, column in columns.items() if count_gaps(column)}
        if gaps and self.missing == "refuse":
            counts = ", ".join(f"{name!r} ({count})" for name, count in gaps.items())
            raise DataError(f"Expected a value in each row of {path}, but some are missing in {counts}. {REMEDY}")
        return {n: [word or GAP for word in c] if isinstance(c, list) else c for n, c in columns.items()}

    def apart(self, columns: Columns, count: int) -> tuple[Index, dict[str, Index]]:
        """In-distribution rows of the file, and OOD ones by the name of their set."""
        all_params = np.arange(count)
        if self.others():
            return all_params, {}
        if self.held is None:
            mode = str(self.ood or MODES[0])
            internal, external = halves(Code.of(columns, all_params).rows(columns))
            return (internal, {mode: external}) if mode == MODES[0] else (external, {mode: internal})
        ood_rows = {
            f"{name} {', '.join(map(str, values))}": self.rows_with(columns[name], name, values)
            for name, values in self.held.items()
        }
        return np.setdiff1d(all_params, np.concatenate(list(ood_rows.values()))), ood_rows

    def rows_with(self, column: Column, name: str, values: Sequence[object]) -> Index:
        """The rows that have one of these values; each must be found."""
        try:
            wanted = [str(value) if isinstance(column, list) else float(str(value)) for value in values]
        except ValueError as error:
            raise ConfigError(f"Expected numbers in `held` for column {name!r}, but got {list(values)!r}.") from error
        present = set(column) if isinstance(column, list) else set(column.tolist())
        lost = [value for value in wanted if value not in present]
        if lost or not wanted:
            some = sorted(map(str, present))[:10]
            raise ConfigError(f"Expected `held` to have values of column {name!r}, such as {some}, but got {list(values)!r}.")
        return np.flatnonzero(np.isin(np.array(column), np.array(wanted)))

    def answers(self, target: Column, rest: Index, train: Index) -> tuple[NDArray[Any], str, int]:
        """Targets, the name of their likelihood, and how many numbers a net for it gives."""
        if isinstance(target, list):
            if self.kind == "regression":
                raise DataError(f"Expected numbers in the target {self.target!r} of {self.path} for a regression, but got words.")
            values = np.array(target)
        else:
            if (np.abs(target) > LARGEST).any():
                raise DataError(f"Expected numbers in the target {self.target!r}, but some are infinite or beyond {LARGEST:g}.")
            integral = bool((target == target.round()).all())
            few = len(np.unique(target[rest])) <= CLASSES
            if self.kind == "regression" or (self.kind is None and not (integral and few)):
                middle, unit = moments(target[train])
                return (target - middle) / unit, "gaussian", 2
            if not integral:
                raise DataError(f"Expected words or whole numbers in the target {self.target!r} for a classification.")
            values = target
        levels = np.unique(values[rest])
        if len(levels) < 2 or len(levels) > len(rest) / 2:
            raise DataError(
                f"Expected two classes or more, with two in-distribution rows each on average, in the target {self.target!r} of "
                f"{self.path}, but got {len(levels)} in {len(rest)} rows."
            )
        return np.searchsorted(levels, values), "categorical", len(levels)

    def alike(self, path: Path, inputs: Columns) -> Columns:
        """The inputs of another file, which must have the same columns of the same kind."""
        columns = read(path, [*self.words, *(name for name, column in inputs.items() if isinstance(column, list))])
        lost = [name for name in inputs if name not in columns]
        if lost:
            raise DataError(f"Expected the columns of {self.path} in {path}, but {lost} are missing.")
        for name, column in inputs.items():
            if isinstance(columns[name], list) != isinstance(column, list):
                raise DataError(f"Expected numbers in column {name!r} of {path}, as in {self.path}, but got words.")
        return self.fill_gaps({name: columns[name] for name in inputs}, path)


def _are_shares(values: Any) -> bool:
    return isinstance(values, list | tuple) and len(values) == 2 and all(isinstance(v, int | float) and 0 < v < 1 for v in values)


REMEDY = 'Mend them, or pass missing="impute".'


def task(path: str | Path, target: str, *, seed: int = 0, **options: Any) -> Task:
    """A table of your own as a task; `Own` says what the options are."""
    return Own(path, target, **options).task(seed)


def parse_name(name: str) -> Own:
    """A table by a name such as "file:cars.csv#target=price&held=region:north,west&missing=impute", for plans."""
    path, mark, text = name.removeprefix(PREFIX).rpartition("#")
    options: dict[str, str] = {}
    for part in text.split("&") if mark else []:
        key, _, value = part.partition("=")
        options[key] = value
    for key in options:
        if key not in WORDS:
            raise ConfigError(f"Expected an option of {name!r} to be {nearest(key, WORDS)}, but got {key!r}.")
    if "target" not in options:
        raise ConfigError(f"Expected a table to be named like 'file:cars.csv#target=price', but got {name!r}.")
    try:
        return Own(path, **{key: WORDS[key](value) for key, value in options.items()})
    except ValueError as error:
        raise ConfigError(f"Expected options like 'held=region:north,west' and 'shares=0.2,0.2' in {name!r}: {error}.") from error
    except DataError as error:  # a missing file is a mistake of the plan
        raise ConfigError(str(error)) from error


def listed(text: str) -> list[str]:
    """Words between commas."""
    return text.split(",")


def held_of(text: str) -> dict[str, Sequence[object]]:
    """A column and its values: "region:north,west"."""
    column, mark, values = text.partition(":")
    if not mark:
        raise ValueError(f"there is no colon in {text!r}")
    return {column: listed(values)}


WORDS: dict[str, Callable[[str], Any]] = {
    "target": str,
    "ood": str,
    "held": held_of,
    "kind": str,
    "missing": str,
    "drop": listed,
    "words": listed,
    "shares": lambda text: tuple(float(share) for share in listed(text)),
}


def select_rows(column: Column, rows: NDArray[np.bool_]) -> Column:
    """Some rows of a column."""
    return [word for word, keep in zip(column, rows, strict=True) if keep] if isinstance(column, list) else column[rows]


def count_gaps(column: Column) -> int:
    """How many values are missing."""
    return sum(word is None for word in column) if isinstance(column, list) else int(np.isnan(column).sum())
