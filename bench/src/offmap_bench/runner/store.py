"""Records: one JSON line per cell in the file of a plan. Every write replaces the whole file under a lock and never tears it."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from filelock import FileLock

import offmap
from offmap.atomic import write_whole
from offmap.errors import FileError
from offmap_bench.runner.plan import METHODS, Cell, digest

SCHEMA, STATUSES = 2, ("ok", "failed")


@dataclass(frozen=True)
class Record:
    """The result of one cell.

    `metrics` are {set: {name: value}}; null is a number that does not exist, such as the width of an infinite interval.
    `settings` are the config with its defaults filled in: when a default changes, the record is stale.
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
class Records:
    """The content of a file: records by hash, and the error of every damaged line, by the hash of its cell or its number."""

    records: dict[str, Record]
    damaged: dict[str, str] = field(default_factory=dict[str, str])

    def state(self, cell: Cell) -> str:
        """Return `ok`, `failed`, `stale` (made with other defaults), `damaged` or `missing`."""
        record = self.records.get(cell.hash)
        if record is None:
            return "damaged" if cell.hash in self.damaged else "missing"
        return record.status if record.settings == settings_of(cell) else "stale"

    def code(self, cell: Cell) -> str:
        """Return the digest of the code that made a cell's record; empty for records that do not tell."""
        record = self.records.get(cell.hash)
        return record.versions.get("code", "") if record else ""


@cache
def code_digest() -> str:
    """Return 16 hexadecimal digits of all Python files of offmap and offmap-bench."""
    total = hashlib.sha256()
    for root in (Path(offmap.__file__).parent, Path(__file__).parents[1]):
        for path in sorted(root.rglob("*.py")):
            total.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return total.hexdigest()[:16]


def settings_of(cell: Cell) -> dict[str, Any]:
    """Return a cell's config, and that of its base models, with defaults filled in."""
    settings = {"config": METHODS[cell.method].settings(cell.config)}
    if cell.source is not None:
        settings["from"] = METHODS[cell.source["method"]].settings(cell.source["config"])
    return significant(settings)


def read_records(path: Path) -> Records:
    """Read every record of a file; an absent file holds none. Of two lines for one cell, the later counts."""
    entries = _parse(_lines(path), path)
    records = {name: entry for name, _, entry in entries if isinstance(entry, Record)}
    return Records(records, {name: str(entry) for name, _, entry in entries if isinstance(entry, FileError)})


def _parse(lines: Sequence[bytes], path: Path) -> list[tuple[str, bytes, Record | FileError]]:
    """Return every line with its name, the hash of its cell or else its number, and its record or what is wrong with it."""
    entries: list[tuple[str, bytes, Record | FileError]] = []
    for number, line in enumerate(lines, 1):
        try:
            entry = parse_record(line, f"{path}, line {number}")
        except FileError as error:
            entry = error
        entries.append((_hash(line) or f"line {number}", line, entry))
    return entries


def parse_record(line: bytes, place: str) -> Record:
    """Read one line; refuse it unless it is complete, belongs to the cell of its hash, and has its checksum."""
    try:
        content = json.loads(line.decode())
        name, checksum = content.pop("hash"), content.pop("checksum")
        record = Record(**content)
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise FileError(f"Expected a record at {place}, but it cannot be read: {error}.") from error
    if record.schema != SCHEMA:
        raise FileError(f"Expected a record of schema {SCHEMA} at {place}, but it has {record.schema!r}.")
    if record.status not in STATUSES or not isinstance(record.cell, dict) or not isinstance(record.metrics, dict):
        raise FileError(f"Expected a record with a cell, metrics and a status of {list(STATUSES)} at {place}, but it has others.")
    if digest(record.cell) != name:
        raise FileError(f"Expected the record of cell {name} at {place}, but it is of {digest(record.cell)}.")
    if digest(content) != checksum:
        raise FileError(f"Expected a record at {place} as it was written, but it is damaged: its checksum does not match.")
    return record


def write_records(path: Path, *records: Record) -> None:
    """Put records into a file, each in the place of an older one of its cell, or else at the end."""
    new = {digest(record.cell): to_line(record) for record in records}
    _change(path, lambda lines: [*(new.pop(_hash(line), line) for line in lines), *new.values()])


def to_line(record: Record) -> bytes:
    content = significant({"schema": record.schema, **asdict(record)})
    line = {"hash": digest(content["cell"]), **content, "checksum": digest(content)}
    return json.dumps(line, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def set_damaged_aside(path: Path) -> dict[str, str]:
    """Move damaged lines to the end of PATH.damaged; {name: what is wrong, and where the line is now}."""
    aside, damaged = path.with_name(f"{path.name}.damaged"), dict[str, str]()

    def change(lines: Sequence[bytes]) -> list[bytes]:
        entries = _parse(lines, path)
        gone = [(name, line, entry) for name, line, entry in entries if isinstance(entry, FileError)]
        damaged.update({name: f"{error} The line is now in {aside.name}." for name, _, error in gone})
        _write(aside, [*_lines(aside), *(line for _, line, _ in gone)])
        return [line for _, line, entry in entries if isinstance(entry, Record)]

    if read_records(path).damaged:
        _change(path, change)
    return damaged


def significant(value: Any, digits: int = 6) -> Any:
    """Round floats to significant digits, replace those that are not finite by None and what JSON does not know by its repr.

    >>> significant({"auroc": 0.123456789, "width": math.inf, "steps": (1, 2)})
    {'auroc': 0.123457, 'width': None, 'steps': [1, 2]}
    """
    if isinstance(value, float):
        return float(f"{value:.{digits}g}") if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): significant(inside, digits) for key, inside in value.items()}
    if isinstance(value, str | int | None):
        return value
    return [significant(inside, digits) for inside in value] if isinstance(value, Iterable) else repr(value)


def _hash(line: bytes) -> str:
    match = re.match(rb'\{"hash":"([0-9a-f]{16})"', line)
    return match[1].decode() if match else ""


def _lines(path: Path) -> list[bytes]:
    return [line for line in path.read_bytes().split(b"\n") if line.strip()] if path.exists() else []


def _write(path: Path, lines: Iterable[bytes]) -> None:
    write_whole(path, b"".join(line + b"\n" for line in lines))


def _change(path: Path, change: Callable[[Sequence[bytes]], list[bytes]]) -> None:
    """Change the lines of a file, one process at a time."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path.with_name(f".{path.name}.lock")):
            _write(path, change(_lines(path)))
    except OSError as error:
        raise FileError(f"Cannot lock {path}: {error.strerror or error}. Check that the folder is writable.") from error
