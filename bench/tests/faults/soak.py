"""A million scored rows, and a hundred fits, in one process: neither memory nor open files grow."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path

import offmap
from checks.trust import Check
from trained import inputs, quick, regression, regressor

ROWS, BLOCK, FITS = 1_000_000, 10_000, 100
GROWTH = 4.0
"""Megabytes that the second half may add."""


def trial(seed: int, folder: Path) -> str:
    """Seed 0 scores rows, seed 1 fits guards, saves and loads them; the first half warms up.

    Memory comes and goes in blocks: the least after each turn counts, in the first and in the last fifth of the second half.
    """
    work, times, what = [(_scoring(), ROWS // BLOCK, "rows"), (_fitting(folder), FITS, "fits")][seed]
    for turn in range(times // 2):
        work(turn)
    files, sizes = _files(), list[float]()
    for turn in range(times // 2, times):
        work(turn)
        sizes.append(_resident())
    part = len(sizes) // 5
    grown, files = min(sizes[-part:]) - min(sizes[:part]), _files() - files
    assert grown < GROWTH, f"{grown:.1f} MB more after the second half"
    assert files <= 0, f"{files} files more are open"
    return f"{ROWS if what == 'rows' else FITS:,} {what}: {grown:+.1f} MB, {files:+d} open files in the second half"


def _scoring() -> Callable[[int], None]:
    guard = quick([regressor(0), regressor(1)], regression(500), regression(100, seed=1), draws=50)

    def work(turn: int) -> None:
        assert bool(guard.score(inputs(BLOCK, turn)).isfinite().all())

    return work


def _fitting(folder: Path) -> Callable[[int], None]:
    def work(turn: int) -> None:
        net = regressor(turn)
        path = folder / f"{turn % 3}.safetensors"
        offmap.fit(net, regression(200, turn), regression(50, turn + 1), steps=30, draws=10, progress=False, seed=turn).save(path)
        assert bool(offmap.load(path, net).score(inputs(50, turn)).isfinite().all())

    return work


def _resident() -> float:
    """Megabytes of this process that are in memory."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def _files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


CHECK = Check("A million rows and a hundred fits in one process leave memory and open files as they are.", trial, 2, 3_600.0, 0)
