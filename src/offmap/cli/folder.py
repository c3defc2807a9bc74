"""Score a folder of tables or images: one file of scores for each shard, resumable, on this machine or on Ray."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch

from offmap._version import __version__
from offmap.atomic import write_whole
from offmap.cli.options import UsageError
from offmap.data.tables.images import SUFFIXES, ImageTable, ImageTransform
from offmap.data.tables.schema import Schema
from offmap.data.tables.table import Table, list_suffixes, open_table
from offmap.distributed.jobs import Pool
from offmap.errors import DataError, FileError, OffmapError
from offmap.guard import Guard

logger: logging.Logger = logging.getLogger("offmap")

NOTES = ".offmap"
"""The folder, inside that of the scores, with a note for each file on what it was made from."""


@dataclass(frozen=True)
class ScoreSpec:
    """What is scored: tables, or folders; a digest of the guard file; its columns, those to copy and to drop; the CSV delimiter;
    how images become inputs.
    """

    data: Path
    out: Path
    guard: str
    schema: Schema
    keep: tuple[str, ...] = ()
    drop: tuple[str, ...] = ()
    separator: str | None = None
    transform: ImageTransform | None = None

    def note(self, shard: Shard) -> Path:
        """Return the path of the note on a shard."""
        return self.out / NOTES / f"{shard.out}.json"


@dataclass(frozen=True)
class Shard:
    """One table, or consecutive images, and the file of their scores; paths are relative to the data and the output folder."""

    files: tuple[str, ...]
    out: str


@dataclass(frozen=True)
class ScoreResult:
    """Rows written, those off the map, files that failed and why, unused columns; `reused` if a former run wrote them."""

    rows: int = 0
    off_map: int = 0
    failed: dict[str, str] = field(default_factory=dict[str, str])
    unused: tuple[str, ...] = ()
    reused: bool = False


@dataclass(frozen=True)
class Progress:
    """Rows of a shard so far, the id of the process that works on it, and whether the shard is finished."""

    rows: int
    process: int
    finished: bool = False


def list_shards(folder: Path) -> tuple[list[Shard], list[str]]:
    """List the shards of all tables, or all images, also in sub-folders, and other files; skip names with a leading dot."""
    files = sorted(_list_files(folder))
    tables = [file for file in files if file.lower().endswith(tuple(list_suffixes()))]
    images = [file for file in files if file.lower().endswith(SUFFIXES)]
    if tables and images:
        both = f"{tables[0]} and {images[0]}"
        raise DataError(f"Expected tables or images in {folder}, but it has both, such as {both}. Put them in separate folders.")
    if not tables and not images:
        suffixes = [*list_suffixes(), *SUFFIXES]
        raise DataError(f"Expected tables or images in {folder}, suffix in one of {suffixes}, but there are none.")
    shards = [Shard(tuple(images[i : i + 256]), f"images-{i // 256:05d}.csv") for i in range(0, len(images), 256)]
    shards += [Shard((file,), file[:-3] if file.lower().endswith(".gz") else file) for file in tables]
    out, count = Counter(shard.out for shard in shards).most_common(1)[0]
    if count > 1:
        both = " and ".join(shard.files[0] for shard in shards if shard.out == out)
        raise DataError(f"Expected distinct names in {folder}, but the scores of {both} would both be {out}.")
    return shards, [file for file in files if file not in {*tables, *images}]


def _list_files(folder: Path) -> Iterator[str]:
    for parent, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from ((Path(parent) / name).relative_to(folder).as_posix() for name in files if not name.startswith("."))


ScoreTable: TypeAlias = Callable[[Guard, ScoreSpec, Table, Path, Callable[[int], None]], ScoreResult]
"""Scores one open table into a file; the last argument is called with the rows so far."""


def score_folder(
    guard: Guard, spec: ScoreSpec, shards: Sequence[Shard], score_table: ScoreTable, *, pool: Pool, resume: bool,
    report: Callable[[int, Progress], None],
) -> list[ScoreResult]:  # fmt: skip
    """Score all shards; `report` gets the number of a shard and its progress. With `resume`, finished scores are kept.

    Blocks of rows depend on the files alone, so every pool writes the same scores to the bit.
    """
    _prepare_output(spec, shards, resume)
    try:
        jobs = [(score_shard, (shard, spec.note(shard).exists())) for shard in shards]
        return pool.run_jobs(jobs, report=report, shared=(guard, spec, score_table))
    finally:
        _remove_parts(spec.out)


def _prepare_output(spec: ScoreSpec, shards: Sequence[Shard], resume: bool) -> None:
    """Make the output folder. Refuse one that holds anything, or with `resume` anything but scores of these data."""
    data, out = spec.data, spec.out
    inside, outside = data.resolve(), out.resolve()
    if inside == outside or inside in outside.parents or outside in inside.parents:
        raise UsageError(f"Expected --out to be a folder apart from the data, but got {out} for {data}.")
    if out.exists() and not out.is_dir():
        raise UsageError(f"Expected --out to be a folder, as the data are, but {out} is a file.")
    files, has_notes = sorted(_list_files(out)), (out / NOTES).exists()
    if not resume and (files or has_notes):
        raise UsageError(
            f"Expected --out to be an empty folder, but {out} holds {files[0] if files else NOTES}. Choose another, or --resume."
        )
    foreign = sorted(set(files) - {shard.out for shard in shards}) if has_notes else files
    if foreign:
        remedy = "Choose another folder, or remove it."
        raise UsageError(f"Expected nothing but scores of {data} in {out}, but it holds {foreign[0]}. {remedy}")
    try:
        for path in (path for shard in shards for path in (out / shard.out, spec.note(shard))):
            path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileError(f"Cannot write to {out}: {error.strerror or error}.") from error
    _remove_parts(out)


def _remove_parts(out: Path) -> None:
    """Remove half-written files of workers that were killed."""
    for path in out.rglob(".*.part"):
        with contextlib.suppress(OSError):
            path.unlink()


def score_shard(
    guard: Guard, spec: ScoreSpec, score_table: ScoreTable, shard: Shard, noted: bool, *, report: Callable[[Progress], None]
) -> ScoreResult:
    """Score one shard with one thread, or find its scores finished: `noted` before this run, or by a worker that died.

    Files that cannot be read are listed in the result; an output that cannot be written is an error.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # with another number sums may be rounded otherwise
    try:
        recipe = [__version__, asdict(replace(spec, data=Path(), out=Path()))]  # all that decides what is written
        source = {"recipe": _digest(recipe), "inputs": {file: file_digest(spec.data / file) for file in shard.files}}
        finished, run = _read_note(spec, shard, source), partial(score_table, guard, spec)
        result = _score_files(run, spec, shard, source, report) if finished is None else replace(finished, reused=noted)
    except FileError:
        raise
    except OffmapError as error:
        result = ScoreResult(failed={" to ".join(dict.fromkeys((shard.files[0], shard.files[-1]))): str(error)})
    finally:
        torch.set_num_threads(threads)
    report(Progress(result.rows, os.getpid(), finished=True))
    return result


def _score_files(
    run: Callable[..., ScoreResult], spec: ScoreSpec, shard: Shard, source: dict[str, Any], report: Callable[[Progress], None]
) -> ScoreResult:
    out, note = spec.out / shard.out, spec.note(shard)
    for path in (note, out):  # scores of other inputs must not stay if these cannot be read
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise FileError(f"Cannot replace {path}: {error.strerror or error}.") from error
    images = ImageTable(spec.data, shard.files, spec.transform) if spec.transform else None
    opened = open_table(spec.data / shard.files[0], spec.separator) if images is None else contextlib.nullcontext(images)
    with opened as table:
        try:
            result = run(table, out, lambda rows: report(Progress(rows, os.getpid())))
        except DataError:
            if images is None or len(images.failed) < len(shard.files):
                raise
            result = ScoreResult()
    if images is not None and images.failed:
        return replace(result, failed=images.failed)
    content = source | {"rows": result.rows, "off_map": result.off_map}
    write_whole(note, json.dumps(content | {"checksum": _digest([content, file_digest(out)])}, indent=1).encode())
    return result


def _read_note(spec: ScoreSpec, shard: Shard, source: dict[str, Any]) -> ScoreResult | None:
    """Return what a note says, if it is about the same inputs, guard and options, and the scores are as they were written."""
    path, out = spec.note(shard), spec.out / shard.out
    try:
        note = json.loads(path.read_text(encoding="utf-8"))
        if note.pop("checksum") == _digest([note, file_digest(out)]):
            return ScoreResult(note["rows"], note["off_map"]) if note.items() >= source.items() else None
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass
    logger.warning("%s or its note %s is missing, damaged or changed: it is scored again.", out, path)
    return None


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file, or "" if it cannot be read: the reader of its content reports why."""
    try:
        with open(path if path.is_file() else os.devnull, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return ""
