"""Files that are either whole or absent, however many processes write them and whenever one is killed; and where they lie."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

from offmap.errors import FileError


def cache_folder() -> Path:
    """OFFMAP_CACHE, or `~/.cache/offmap`."""
    return Path(os.environ.get("OFFMAP_CACHE") or Path.home() / ".cache" / "offmap")


def write_whole(path: Path, content: bytes, *, folders: bool = True) -> None:
    """Write beside the file, then rename: a reader sees the old content or the new one, never a part.

    Missing folders are made, unless `folders` is False: then they are a mistake.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.part")
    try:
        if folders:
            path.parent.mkdir(parents=True, exist_ok=True)
        with beside.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except OSError as error:
        raise FileError(
            f"Cannot write {path}: {error.strerror}. Check that the folder exists and is writable; what was there is as before."
        ) from error
    finally:
        with contextlib.suppress(OSError):  # gone after the rename
            beside.unlink()
