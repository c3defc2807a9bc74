"""A folder of tables or images through a guard: one file of scores for each, resumable, on this machine or on Ray."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

import offmap._version
from offmap.cli.score_folder import Folder, Piece, note_of, prepare, sweep
from offmap.cli.score_rows import Chosen, choose, score_rows
from offmap.data.tables import table
from offmap.data.tables.images import FILE, IMAGE, ImageTable, ImageTransform
from offmap.data.tables.schema import Schema
from offmap.data.tables.table import Table, write_table
from offmap.distributed.pool import Pool
from offmap.errors import DataError, FileError, OffmapError
from offmap.guard import Guard
from offmap.io.atomic import write_whole

logger = logging.getLogger("offmap")


@dataclass(frozen=True)
class Order:
    """What all pieces of a folder share beside the guard; `guard` is the digest of its file, `form` that of images."""

    data: Path
    out: Path
    guard: str
    schema: Schema
    keep: tuple[str, ...] = ()
    drop: tuple[str, ...] = ()
    separator: str | None = None
    form: ImageTransform | None = None

    @property
    def recipe(self) -> str:
        """A digest of all that decides what is written, but for the inputs."""
        told = [offmap._version.__version__, self.guard, asdict(self.schema), self.keep, self.drop, self.separator]
        told.append(None if self.form is None else asdict(self.form))
        return hashlib.sha256(json.dumps(told).encode()).hexdigest()

    def opened(self, piece: Piece) -> AbstractContextManager[Table]:
        """The table, or the images as one."""
        if self.form is None:
            return table.open_table(self.data / piece.files[0], self.separator)
        return nullcontext(ImageTable(self.data, piece.files, self.form))


@dataclass(frozen=True)
class Done:
    """What became of a piece: rows written, those off the map, why files of it failed, and whether it was there before."""

    rows: int = 0
    off_map: int = 0
    failed: dict[str, str] = field(default_factory=dict[str, str])
    spare: tuple[str, ...] = ()
    before: bool = False


@dataclass(frozen=True)
class Progress:
    """Rows of a piece so far, the process that works on it, and whether it has come to its end."""

    rows: int
    process: int
    ended: bool = False


def score_folder(
    guard: Guard, order: Order, folder: Folder, *, pool: Pool, resume: bool = False, report: Callable[[int, Progress], None]
) -> list[Done]:
    """What became of each piece. Blocks of rows are fixed by the files alone, so every pool writes the same scores to the bit."""
    prepare(order.data, order.out, folder.pieces, resume)
    try:
        jobs = [(score_piece, (piece, note_of(order.out, piece).exists())) for piece in folder.pieces]
        return pool.run_jobs(jobs, report=report, shared=(guard, order))
    finally:
        sweep(order.out)


def score_piece(guard: Guard, order: Order, piece: Piece, noted: bool, *, report: Callable[[Progress], None]) -> Done:
    """Score one piece with one thread, or find it done: `noted` before the run, or by a worker that died right after.

    Files that cannot be read fail, and are told; a disk that cannot be written to is an error.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # another number may round otherwise
    try:
        done = _done(guard, order, piece, noted, report)
    except FileError:
        raise
    except OffmapError as error:
        done = Done(failed={" to ".join(dict.fromkeys((piece.files[0], piece.files[-1]))): str(error)})
    finally:
        torch.set_num_threads(threads)
    report(Progress(done.rows, os.getpid(), ended=True))
    return done


def _done(guard: Guard, order: Order, piece: Piece, noted: bool, report: Callable[[Progress], None]) -> Done:
    made = {"recipe": order.recipe, "inputs": {file: digest(order.data / file) for file in piece.files}}
    found = _finished(order, piece, made)
    if found is not None:
        return replace(found, before=noted)
    _forget(order, piece)
    done = _score(guard, order, piece, report)
    if not done.failed:
        note = made | {"rows": done.rows, "off_map": done.off_map, "scores": digest(order.out / piece.out)}
        write_whole(note_of(order.out, piece), json.dumps(note | {"checksum": _checksum(note)}, indent=1).encode())
    return done


def _score(guard: Guard, order: Order, piece: Piece, report: Callable[[Progress], None]) -> Done:
    process = os.getpid()
    with order.opened(piece) as data:
        images = isinstance(data, ImageTable)
        chosen = Chosen((IMAGE,), (FILE,)) if images else choose(data, order.schema, order.keep, order.drop)
        try:
            with write_table(order.out / piece.out) as write:
                told = score_rows(guard, order.schema, data, chosen, write, lambda rows: report(Progress(rows, process)))
        except DataError:
            if not images or len(data.failed) < len(piece.files):
                raise
            told = (0, 0)  # none could be read
        return Done(*told, dict(data.failed) if images else {}, chosen.spare)


def _finished(order: Order, piece: Piece, made: dict[str, Any]) -> Done | None:
    """What a note says, if it is of the same inputs, guard and settings, and the scores are as they were written."""
    path, out = note_of(order.out, piece), order.out / piece.out
    try:
        note = json.loads(path.read_text(encoding="utf-8"))
        if note.pop("checksum") != _checksum(note):
            raise ValueError("its checksum does not fit")
        same, scores, found = {name: note[name] for name in made} == made, note["scores"], Done(note["rows"], note["off_map"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        logger.warning("%s is damaged (%s), and %s is made again.", path, error, out)
        return None
    if same and scores != digest(out):
        logger.warning("%s is gone, or not as it was written, and is made again.", out)
        return None
    return found if same else None


def _checksum(note: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(note, sort_keys=True).encode()).hexdigest()


def _forget(order: Order, piece: Piece) -> None:
    """Scores of other inputs must not stay if these cannot be read."""
    for path in (note_of(order.out, piece), order.out / piece.out):
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise FileError(f"Cannot replace {path}: {error.strerror or error}.") from error


def digest(path: Path) -> str:
    """SHA-256 of a file, and nothing of what cannot be read: whoever reads it will say why."""
    try:
        with open(path if path.is_file() else os.devnull, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return ""
