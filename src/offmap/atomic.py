"""Files that are either whole or absent, however many processes write them and whenever one is killed; and where they lie."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from offmap.errors import FileError

HEADER = 1 << 23
"""Bytes that a header of JSON in a file of ours may have; those of large ensembles have some hundred thousand."""


def cache_folder() -> Path:
    """OFFMAP_CACHE, or `~/.cache/offmap`."""
    return Path(os.environ.get("OFFMAP_CACHE") or Path.home() / ".cache" / "offmap")


def write_whole(path: Path, content: bytes, *, folders: bool = True) -> None:
    """Write beside the file, then rename: a reader sees the old content or the new one, never a part.

    Missing folders are made, unless `folders` is False: then they are a mistake.
    """
    with whole_file(path, folders=folders) as file:
        file.write(content)


@contextmanager
def whole_file(path: Path, *, folders: bool = False) -> Generator[BinaryIO]:
    """A file to write part by part. It takes its name when the block ends well; otherwise nothing of it is left."""
    if not path.name:
        raise FileError(f"Cannot write {str(path)!r}: it names no file.")
    beside = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.part")
    try:
        if folders:
            path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        with beside.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except OSError as error:
        raise FileError(
            f"Cannot write {path}: {error.strerror or error}. Check that the folder exists and is writable; what was there is as "
            "before."
        ) from error
    finally:
        with contextlib.suppress(OSError):  # gone after the rename
            beside.unlink()
