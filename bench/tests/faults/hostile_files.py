"""A file that means harm runs nothing, writes nothing elsewhere, and takes no more memory than the bound."""

from __future__ import annotations

import os
import random
import sys
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from checks.trust import Check
from faults.bombs import BOMBS
from faults.readers import attempt

BOUND = 1_500
"""Megabytes that reading may take beyond what the process had, for any file of a few megabytes."""

RUNS = ("os.system", "os.exec", "os.posix_spawn", "os.fork", "subprocess.Popen", "pickle.find_class", "socket.connect")
WRITES = {"open": 0, "os.remove": 0, "os.rename": 1, "os.mkdir": 0, "os.symlink": 1, "os.link": 1, "os.truncate": 0}
"""Events of Python's auditing: what runs something, and the argument that names what is written."""

_watched: list[Path] = []
_seen: list[str] = []


def _hear(event: str, args: tuple[Any, ...]) -> None:
    if not _watched:
        return
    if event in RUNS:
        _seen.append(f"{event} {args!r:.200}")
    elif event in WRITES and isinstance(args[WRITES[event]], str | os.PathLike):
        writes = event != "open" or (isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR))
        place = Path(os.path.abspath(args[WRITES[event]]))
        if writes and _watched[0] not in place.parents and not str(place).startswith(("/dev/", "/proc/")):
            _seen.append(f"{event} {place}")


sys.addaudithook(_hear)  # stays for good, and listens only while something is watched


@contextmanager
def watch_folder(folder: Path) -> Generator[list[str]]:
    """What is run, or written outside of the folder, by Python meanwhile."""
    _seen.clear()
    _watched.append(folder.resolve())
    try:
        yield _seen
    finally:
        _watched.clear()


def peak() -> float:
    """The most memory of this process since it was forgotten, in megabytes."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


def forget_peak() -> None:
    """The peak is what there is now."""
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")


def trial(seed: int, folder: Path) -> str:
    """Make a file, read it, look at what happened."""
    rng = random.Random(seed)
    name, make = BOMBS[seed % len(BOMBS)]
    data = make(rng)
    attempt(name, data[:0], folder)  # what is needed once is there
    forget_peak()
    before = peak()
    with watch_folder(folder) as seen, warnings.catch_warnings(action="ignore"):  # of pickles that torch finds OOD
        ending = attempt(name, data, folder)
    grown = peak() - before
    assert not seen, f"{make.__name__}: {seen[:3]}"
    assert not (Path.cwd() / "harm").exists()
    assert not (folder / "harm").exists()
    assert grown <= BOUND, f"{make.__name__} of {len(data)} bytes takes {grown:.0f} MB"
    size = "under 50" if grown < 50 else "50 to 500" if grown < 500 else "500 to 1,500"
    return f"{ending}, {size} MB"


CHECK = Check(
    f"A file that means harm, of a few megabytes, runs nothing, writes nothing elsewhere and takes at most {BOUND:,} MB.",
    trial, trials=480, limit=240.0, quick=12,
)  # fmt: skip
