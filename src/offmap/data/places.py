"""Where data and what is computed from them lie, and files that are either whole or absent."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def cache_folder() -> Path:
    """OFFMAP_CACHE, or `~/.cache/offmap`."""
    return Path(os.environ.get("OFFMAP_CACHE") or Path.home() / ".cache" / "offmap")


def data_folder() -> Path:
    """OFFMAP_DATA, or `data` below the cache: data sets are looked for here, and downloaded to here."""
    root = os.environ.get("OFFMAP_DATA")
    return Path(root) if root else cache_folder() / "data"


def offline() -> bool:
    """Whether OFFMAP_OFFLINE forbids downloads."""
    return os.environ.get("OFFMAP_OFFLINE", "0") not in ("", "0")


def write_whole(path: Path, content: bytes) -> None:
    """Write beside the file, then rename: a reader sees the old content or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, beside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.chmod(beside, 0o644)  # mkstemp's are the owner's alone
        os.replace(beside, path)
    except BaseException:
        Path(beside).unlink(missing_ok=True)
        raise
