"""Small disks: a tmpfs that only this process and its children see, in a mount namespace of their own. Linux only."""

from __future__ import annotations

import ctypes
import os
import resource
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

NEW_MOUNTS, NEW_USERS = 0x00020000, 0x10000000
READ_ONLY, REMOUNT, RECURSIVE, PRIVATE = 1, 32, 0x4000, 0x40000
SIZE = 16 << 20


def mount_small(folder: Path) -> None:
    """Mount 16 MB at a folder. Others than root become root in a namespace of users first."""
    libc = ctypes.CDLL(None, use_errno=True)
    user, group = os.getuid(), os.getgid()
    _done(libc.unshare(NEW_MOUNTS | (NEW_USERS if user else 0)))
    if user:
        for name, line in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
            Path(f"/proc/self/{name}").write_text(line)
    _done(libc.mount(b"none", b"/", None, ctypes.c_ulong(RECURSIVE | PRIVATE), None))
    _done(libc.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", ctypes.c_ulong(0), f"size={SIZE}".encode()))


def _done(code: int) -> None:
    if code:
        error = ctypes.get_errno()
        raise OSError(error, f"No small disk can be mounted here: {os.strerror(error)}")


def free(disk: Path) -> int:
    """Bytes, in whole pages."""
    space = os.statvfs(disk)
    return space.f_bavail * space.f_frsize


@contextmanager
def full(disk: Path, room: int) -> Generator[None]:
    """So many bytes are left, rounded down to pages; the rest is taken by a file that goes afterwards."""
    ballast = disk / "ballast"
    with ballast.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, free(disk) - room // 4096 * 4096)
    try:
        yield
    finally:
        ballast.unlink()


@contextmanager
def limit_files(disk: Path, room: int) -> Generator[None]:
    """No file may grow beyond so many bytes (RLIMIT_FSIZE)."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextmanager
def read_only(disk: Path, room: int) -> Generator[None]:
    """Nothing at all can be written."""
    libc = ctypes.CDLL(None, use_errno=True)
    _done(libc.mount(None, os.fsencode(disk), None, ctypes.c_ulong(REMOUNT | READ_ONLY), None))
    try:
        yield
    finally:
        _done(libc.mount(None, os.fsencode(disk), None, ctypes.c_ulong(REMOUNT), f"size={SIZE}".encode()))


WAYS: dict[str, Callable[[Path, int], AbstractContextManager[None]]] = {
    "full tmpfs": full,
    "RLIMIT_FSIZE": limit_files,
    "read-only tmpfs": read_only,
}
"""How writing is made to fail, by name: (disk, room) -> a context."""
