"""Score a folder of tables or images: one file of scores for each shard, resumable, on this machine or on Ray."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from offmap._version import __version__
from offmap.cli.score_rows import ScoreOptions, score_rows, select_columns
from offmap.data.tables.images import SUFFIXES, ImageTable
from offmap.data.tables.schema import Schema
from offmap.data.tables.table import Table, list_suffixes, open_table, write_table
from offmap.distributed.jobs import Pool
from offmap.errors import ConfigError, DataError, FileError, OffmapError
from offmap.guard import Guard
from offmap.io.atomic import write_whole

logger = logging.getLogger("offmap")

SHARD_IMAGES = 256
"""Images whose scores go to one file."""

NOTES = ".offmap"
"""The folder, inside that of the scores, with a note for each file on what it was made from."""


class FolderError(ConfigError):
    """The output folder cannot be used."""


@dataclass(frozen=True)
class Shard:
    """One table, or consecutive images, and the file of their scores; paths are relative to the data and the output folder."""

    files: tuple[str, ...]
    out: str


@dataclass(frozen=True)
class Folder:
    """The shards of a folder, in the order of their names; `ignored` are other files."""

    shards: list[Shard]
    ignored: list[str]
    images: bool


@dataclass(frozen=True)
class JobSpec:
    """What all shards share beside the guard.

    Args:
        data: The folder of inputs.
        out: The folder of scores.
        guard: A digest of the guard file.
        schema: The columns of the guard.
        options: The options of the command.
    """

    data: Path
    out: Path
    guard: str
    schema: Schema
    options: ScoreOptions

    @property
    def digest(self) -> str:
        """A digest of everything that decides what is written, but for the inputs."""
        parts = [__version__, self.guard, asdict(self.schema), asdict(self.options)]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def open(self, shard: Shard) -> AbstractContextManager[Table]:
        """Open a table, or images as a table."""
        if self.options.transform is None:
            return open_table(self.data / shard.files[0], self.options.separator)
        return nullcontext(ImageTable(self.data, shard.files, self.options.transform))

    def note(self, shard: Shard) -> Path:
        """Return the path of the note on a shard."""
        return self.out / NOTES / f"{shard.out}.json"


@dataclass(frozen=True)
class JobResult:
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


def list_shards(folder: Path) -> Folder:
    """List all tables, or all images, also in sub-folders; names that begin with a dot are skipped."""
    files = sorted(_list_files(folder))
    tables = [file for file in files if file.lower().endswith(tuple(list_suffixes()))]
    images = [file for file in files if file.lower().endswith(SUFFIXES)]
    if tables and images:
        raise DataError(
            f"Expected tables or images in {folder}, but it has both, such as {tables[0]} and {images[0]}. Put them in separate "
            "folders."
        )
    if not tables and not images:
        raise DataError(
            f"Expected tables or images in {folder}, suffix in one of {[*list_suffixes(), *SUFFIXES]}, but there are none."
        )
    parts = [tuple(images[i : i + SHARD_IMAGES]) for i in range(0, len(images), SHARD_IMAGES)]
    shards = [Shard(part, f"images-{i:05d}.csv") for i, part in enumerate(parts)]
    shards += [Shard((file,), file[:-3] if file.lower().endswith(".gz") else file) for file in tables]
    repeated = [name for name, count in Counter(shard.out for shard in shards).items() if count > 1]
    if repeated:
        both = [shard.files[0] for shard in shards if shard.out == repeated[0]]
        raise DataError(
            f"Expected names that differ in {folder}, but the scores of {' and '.join(both)} would both be {repeated[0]}."
        )
    return Folder(shards, [file for file in files if file not in {*tables, *images}], bool(images))


def score_folder(
    guard: Guard, spec: JobSpec, shards: Sequence[Shard], *, pool: Pool, resume: bool, report: Callable[[int, Progress], None]
) -> list[JobResult]:
    """Score all shards. Blocks of rows depend on the files alone, so every pool writes the same scores to the bit.

    Args:
        guard: The guard.
        spec: What all shards share.
        shards: The shards.
        pool: Where to run.
        resume: Whether `spec.out` may hold scores already; those that are finished are kept.
        report: Called with the number of a shard and its progress.
    """
    _prepare_output(spec, shards, resume)
    try:
        jobs = [(score_shard, (shard, spec.note(shard).exists())) for shard in shards]
        return pool.run_jobs(jobs, report=report, shared=(guard, spec))
    finally:
        _remove_parts(spec.out)


def score_shard(guard: Guard, spec: JobSpec, shard: Shard, noted: bool, *, report: Callable[[Progress], None]) -> JobResult:
    """Score one shard with one thread, or find its scores finished: `noted` before this run, or by a worker that died.

    Files that cannot be read are listed in the result; an output that cannot be written is an error.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # with another number sums may be rounded otherwise
    try:
        result = _score_or_reuse(guard, spec, shard, noted, report)
    except FileError:
        raise
    except OffmapError as error:
        result = JobResult(failed={" to ".join(dict.fromkeys((shard.files[0], shard.files[-1]))): str(error)})
    finally:
        torch.set_num_threads(threads)
    report(Progress(result.rows, os.getpid(), finished=True))
    return result


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file, or "" if it cannot be read: the reader of its content reports why."""
    try:
        with open(path if path.is_file() else os.devnull, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return ""


def _prepare_output(spec: JobSpec, shards: Sequence[Shard], resume: bool) -> None:
    """Make the output folder. Refuse one that holds anything, or with `resume` anything but scores of these data."""
    data, out = spec.data, spec.out
    inside, outside = data.resolve(), out.resolve()
    if inside == outside or inside in outside.parents or outside in inside.parents:
        raise FolderError(f"Expected --out to be a folder apart from the data, but got {out} for {data}.")
    if out.exists() and not out.is_dir():
        raise FolderError(f"Expected --out to be a folder, as the data are, but {out} is a file.")
    files, has_notes = sorted(_list_files(out)) if out.is_dir() else [], (out / NOTES).exists()
    if not resume and (files or has_notes):
        raise FolderError(
            f"Expected --out to be an empty folder, but {out} holds {files[0] if files else NOTES}. Choose another, or pass "
            "--resume to keep the scores that are finished there and make the others."
        )
    foreign = sorted(set(files) - {shard.out for shard in shards}) if has_notes else files
    if foreign:
        raise FolderError(
            f"Expected nothing but scores of {data} in {out}, but it holds {foreign[0]}. Choose another folder, or remove it."
        )
    try:
        for shard in shards:
            for path in (out / shard.out, spec.note(shard)):
                path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileError(f"Cannot write to {out}: {error.strerror or error}.") from error
    _remove_parts(out)


def _remove_parts(out: Path) -> None:
    """Remove half-written files of workers that were killed."""
    for path in out.rglob(".*.part"):
        with contextlib.suppress(OSError):
            path.unlink()


def _list_files(folder: Path) -> Iterator[str]:
    for parent, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from ((Path(parent) / name).relative_to(folder).as_posix() for name in files if not name.startswith("."))


def _score_or_reuse(guard: Guard, spec: JobSpec, shard: Shard, noted: bool, report: Callable[[Progress], None]) -> JobResult:
    source = {"recipe": spec.digest, "inputs": {file: file_digest(spec.data / file) for file in shard.files}}
    finished = _read_note(spec, shard, source)
    if finished is not None:
        return replace(finished, reused=noted)
    for path in (spec.note(shard), spec.out / shard.out):  # scores of other inputs must not stay if these cannot be read
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise FileError(f"Cannot replace {path}: {error.strerror or error}.") from error
    result = _score(guard, spec, shard, report)
    if not result.failed:
        note = source | {"rows": result.rows, "off_map": result.off_map, "scores": file_digest(spec.out / shard.out)}
        write_whole(spec.note(shard), json.dumps(note | {"checksum": _checksum(note)}, indent=1).encode())
    return result


def _score(guard: Guard, spec: JobSpec, shard: Shard, report: Callable[[Progress], None]) -> JobResult:
    process = os.getpid()
    with spec.open(shard) as table:
        columns = select_columns(table, spec.schema, spec.options)
        failed = table.failed if isinstance(table, ImageTable) else {}
        try:
            with write_table(spec.out / shard.out) as write:
                counts = score_rows(guard, spec.schema, table, columns, write, lambda rows: report(Progress(rows, process)))
        except DataError:
            if len(failed) < len(shard.files):
                raise
            counts = (0, 0)  # no image could be read
        return JobResult(*counts, dict(failed), columns.unused)


def _read_note(spec: JobSpec, shard: Shard, source: dict[str, Any]) -> JobResult | None:
    """Return what a note says, if it is about the same inputs, guard and options, and the scores are as they were written."""
    path, out = spec.note(shard), spec.out / shard.out
    try:
        note = json.loads(path.read_text(encoding="utf-8"))
        if note.pop("checksum") != _checksum(note):
            raise ValueError("its checksum does not fit")
        same, scores, result = note.items() >= source.items(), note["scores"], JobResult(note["rows"], note["off_map"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        logger.warning("%s is damaged (%s), and %s is made again.", path, error, out)
        return None
    if same and scores != file_digest(out):
        logger.warning("%s is gone, or not as it was written, and is made again.", out)
        return None
    return result if same else None


def _checksum(note: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(note, sort_keys=True).encode()).hexdigest()
