"""What is in a folder to be scored, and what the folder of scores may hold."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from offmap.data.tables import images as pictures
from offmap.data.tables import table
from offmap.errors import ConfigError, DataError, FileError

TOGETHER = 256
"""Images whose scores go to one file."""

ROOM = ".offmap"
"""Where, in a folder of scores, is noted how each was made."""


class FolderError(ConfigError):
    """The folder of scores cannot be that."""


@dataclass(frozen=True)
class Piece:
    """A unit of work: one table, or consecutive images, and the one file of their scores. Both relative to their folders."""

    files: tuple[str, ...]
    out: str


@dataclass(frozen=True)
class Folder:
    """Pieces in the order of their names; other files are left out."""

    pieces: list[Piece]
    others: list[str]
    images: bool


def read_folder(folder: Path) -> Folder:
    """All tables, or all images, also in folders inside; names with a dot in front are passed over."""
    files = sorted(_files(folder))
    tables = [file for file in files if file.lower().endswith(tuple(table.FORMATS))]
    images = [file for file in files if file.lower().endswith(pictures.SUFFIXES)]
    others = [file for file in files if file not in {*tables, *images}]
    if tables and images:
        raise DataError(
            f"Expected tables or images in {folder}, but it has both, such as {tables[0]} and {images[0]}. Part them."
        )
    if not tables and not images:
        known = [*table.FORMATS, *pictures.SUFFIXES]
        raise DataError(f"Expected tables or images in {folder}, suffix in one of {known}, but there are none.")
    parts = [tuple(images[i : i + TOGETHER]) for i in range(0, len(images), TOGETHER)]
    pieces = [Piece(part, f"images-{i:05d}.csv") for i, part in enumerate(parts)] or [
        Piece((each,), _out(each)) for each in tables
    ]
    twice = [name for name, count in Counter(piece.out for piece in pieces).items() if count > 1]
    if twice:
        both = [piece.files[0] for piece in pieces if piece.out == twice[0]]
        raise DataError(
            f"Expected names that differ in {folder}, but the scores of {' and '.join(both)} would both be {twice[0]}."
        )
    return Folder(pieces, others, bool(images))


def prepare(data: Path, out: Path, pieces: Sequence[Piece], resume: bool) -> None:
    """Make the folder of scores. One that holds something is refused, or continued if it has nothing but scores of these data."""
    inside, outside = data.resolve(), out.resolve()
    if inside == outside or inside in outside.parents or outside in inside.parents:
        raise FolderError(f"Expected --out to be a folder apart from the data, but got {out} for {data}.")
    if out.exists() and not out.is_dir():
        raise FolderError(f"Expected --out to be a folder, as the data are, but {out} is a file.")
    held, noted = sorted(_files(out)) if out.is_dir() else [], (out / ROOM).exists()
    if not resume and (held or noted):
        raise FolderError(
            f"Expected --out to be an empty folder, but {out} holds {held[0] if held else ROOM}. Choose another, or pass "
            "--resume to keep the scores that are finished there and make the others."
        )
    foreign = sorted(set(held) - {piece.out for piece in pieces}) if noted else held
    if foreign:
        raise FolderError(
            f"Expected nothing but scores of {data} in {out}, but it holds {foreign[0]}. Choose another folder, or take it away."
        )
    try:
        for folder in {out / ROOM, *((out / piece.out).parent for piece in pieces), *(note_of(out, p).parent for p in pieces)}:
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileError(f"Cannot write to {out}: {error.strerror or error}.") from error
    sweep(out)


def sweep(out: Path) -> None:
    """Take away what workers that were killed have left half-written."""
    for path in out.rglob(".*.part"):
        with contextlib.suppress(OSError):
            path.unlink()


def note_of(out: Path, piece: Piece) -> Path:
    """Where is noted how a file was made."""
    return out / ROOM / f"{piece.out}.json"


def _files(folder: Path) -> Iterator[str]:
    for where, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from ((Path(where) / name).relative_to(folder).as_posix() for name in files if not name.startswith("."))


def _out(file: str) -> str:
    """Scores are named like the table, unpacked."""
    return file[: -len(".gz")] if file.lower().endswith(".gz") else file
