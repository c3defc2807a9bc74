"""Folders of what all trials of a process share."""

from __future__ import annotations

import atexit
import shutil
from pathlib import Path
from tempfile import mkdtemp


def shared_folder() -> Path:
    """A new folder in one that goes when the process ends."""
    room = Path(mkdtemp(prefix="offmap-trust-"))
    atexit.register(shutil.rmtree, room, ignore_errors=True)
    folder = room / "shared"
    folder.mkdir()
    return folder
