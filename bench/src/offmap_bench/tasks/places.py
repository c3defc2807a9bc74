"""Where data sets lie, and whether they may be downloaded."""

from __future__ import annotations

import os
from pathlib import Path

from offmap.io.atomic import cache_folder


def data_folder() -> Path:
    """OFFMAP_DATA, or `data` below the cache: data sets are looked for here, and downloaded to here."""
    root = os.environ.get("OFFMAP_DATA")
    return Path(root) if root else cache_folder() / "data"


def offline() -> bool:
    """Whether OFFMAP_OFFLINE forbids downloads."""
    return os.environ.get("OFFMAP_OFFLINE", "0") not in ("", "0")
