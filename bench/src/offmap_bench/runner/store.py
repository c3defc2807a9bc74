"""Records: one small JSON file per cell, named by the cell's hash, either whole or absent."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from offmap.errors import FileError
from offmap.io.atomic import write_whole
from offmap_bench.runner.methods import METHODS
from offmap_bench.runner.plan import Cell, digest

SCHEMA = 1
STATUSES = ("ok", "failed")
Stamp = tuple[int, int] | None
DIGITS = 6
"""Significant digits of a number in a record."""


@dataclass(frozen=True)
class Record:
    """What became of one cell.

    `metrics` are {set: {name: value}}; null is a number that does not exist, such as the width of an infinite interval.
    `settings` are the config with its defaults filled in: when a default changes, the record no longer answers for the cell.
    """

    cell: dict[str, Any]
    status: str
    settings: dict[str, Any]
    metrics: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    chosen: dict[str, Any] = field(default_factory=dict[str, Any])
    seconds: dict[str, float] = field(default_factory=dict[str, float])
    steps: int = 0
    versions: dict[str, str] = field(default_factory=dict[str, str])
    threads: int = 1
    warnings: list[str] = field(default_factory=list[str])
    traceback: str | None = None
    schema: int = SCHEMA

    @property
    def reason(self) -> str:
        """The last line of the traceback."""
        return (self.traceback or "").strip().rpartition("\n")[2]


@dataclass(frozen=True)
class Found:
    """What a folder holds: records by hash, and what is wrong with the files that cannot be read, by file name."""

    records: dict[str, Record]
    damaged: dict[str, str]

    def state(self, cell: Cell) -> str:
        """`ok`, `failed`, `stale` (made with other defaults), `damaged` or `missing`."""
        record = self.records.get(cell.hash)
        if record is None:
            return "damaged" if f"{cell.hash}.json" in self.damaged else "missing"
        if record.settings != settings_of(cell):
            return "stale"
        return record.status


def settings_of(cell: Cell) -> dict[str, Any]:
    """A cell's config, and that of its models, with defaults filled in, as a record keeps them."""
    filled = {"config": METHODS[cell.method].settings(cell.config)}
    if cell.source is not None:
        filled["from"] = METHODS[cell.source["method"]].settings(cell.source["config"])
    return short(filled)


def write(folder: Path, record: Record) -> Path:
    """One file; what was there is replaced."""
    path = folder / f"{digest(record.cell)}.json"
    told = short({"schema": record.schema, **asdict(record)})
    text = json.dumps({**told, "checksum": digest(told)}, indent=1, ensure_ascii=False, allow_nan=False)
    write_whole(path, f"{text}\n".encode())
    return path


def read_all(folder: Path) -> Found:
    """Every record of a folder; an absent folder holds none."""
    records: dict[str, Record] = {}
    damaged: dict[str, str] = {}
    for path in sorted(folder.glob("*.json")):
        try:
            records[path.stem] = read(path)
        except FileError as error:
            damaged[path.name] = str(error)
    return Found(records, damaged)


def read(path: Path) -> Record:
    """One record, refused unless it is whole and belongs to the cell that its name says. Older ones have no checksum."""
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
        expected = told.pop("checksum", None)
        record = Record(**told)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise FileError(f"Expected a record at {path}, but it cannot be read: {error}.") from error
    if record.schema != SCHEMA:
        raise FileError(f"Expected a record of schema {SCHEMA} at {path}, but it has {record.schema!r}.")
    if record.status not in STATUSES or not isinstance(record.cell, dict) or not isinstance(record.metrics, dict):
        raise FileError(f"Expected a record with a cell, metrics and a status of {list(STATUSES)} at {path}, but it has others.")
    if digest(record.cell) != path.stem:
        raise FileError(f"Expected the record of cell {path.stem} at {path}, but it is of {digest(record.cell)}.")
    if expected not in (None, digest(told)):
        raise FileError(f"Expected a record at {path} as it was written, but it is damaged: its checksum does not fit.")
    return record


def stamp(folder: Path, cell: Cell) -> Stamp:
    """What tells the record of a cell from one written later: file and time, or None where there is none."""
    try:
        status = (folder / f"{cell.hash}.json").stat()
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_mtime_ns


def written_since(folder: Path, cell: Cell, before: Stamp) -> Record | None:
    """The record of a cell if it is not the one that there was before."""
    return None if stamp(folder, cell) == before else read(folder / f"{cell.hash}.json")


def set_aside(path: Path) -> Path:
    """Give a file that cannot be read a name under which nobody looks for a record, and that no other file has."""
    number, aside = 1, path.with_name(f"{path.name}.damaged")
    while aside.exists():
        number, aside = number + 1, path.with_name(f"{path.name}.damaged-{number + 1}")
    path.rename(aside)
    return aside


def short(value: Any) -> Any:
    """Floats with 6 significant digits, None for those that are not finite; what JSON does not know as text.

    >>> short({"auroc": 0.123456789, "width": math.inf, "steps": (1, 2)})
    {'auroc': 0.123457, 'width': None, 'steps': [1, 2]}
    """
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): short(inside) for key, inside in value.items()}
    if isinstance(value, str | int | None):
        return value
    return [short(inside) for inside in value] if isinstance(value, Iterable) else repr(value)
