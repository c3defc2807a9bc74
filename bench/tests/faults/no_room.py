"""Writing fails: the error names the file, every file that has a name is whole, and with room again the work is finished."""

from __future__ import annotations

import os
import random
import shutil
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from checks.trust import Check
from faults import damaged_record, damaged_scores, killed_fit
from faults.disks import WAYS, mount_small
from faults.places import shared_folder
from faults.zygote import zygote
from offmap.atomic import unseal
from offmap.cli.folder import NOTES
from offmap.errors import OffmapError
from offmap.export.onnx import verify_checksum
from offmap_bench.runner.run import run
from offmap_bench.runner.store import read_records
from trained import inputs, quick, regression, regressor


def _save(disk: Path) -> None:
    quick(regressor(), regression(60), regression(30, seed=1)).save(disk / "guard.safetensors")


def _fit(disk: Path) -> None:
    killed_fit.work(disk, os.devnull)


def _bench(disk: Path) -> None:
    os.environ["OFFMAP_CACHE"] = str(disk / "cache")
    outcome = run(damaged_record.write_plan(), disk / "tiny.jsonl")
    if outcome.failed:
        raise OSError(*outcome.failures)


def _fill(disk: Path) -> None:
    damaged_scores.fill(disk.with_name(f"{disk.name}-data"))


def _score(disk: Path) -> None:
    damaged_scores.run_score(disk.with_name(f"{disk.name}-data"), disk / "out")


def _export(disk: Path) -> None:
    quick(regressor(), regression(60), regression(30, seed=1)).export(disk / "guard.onnx", inputs(4))


def _whole(path: Path) -> Any:
    """What a file says, but for what differs from run to run; raises unless it is whole."""
    if path.name == killed_fit.STATE:
        return bool(unseal(path.read_bytes()))
    if path.suffix == ".onnx":
        return verify_checksum(path.read_bytes(), path)
    if path.suffix == ".jsonl":
        assert read_records(path).damaged == {}
        return damaged_record.without_seconds(path)
    if NOTES in path.parts:
        return path.name
    if path.parent.name == "out":
        return damaged_scores.read(path).tolist()
    return {name: tensor.tolist() for name, tensor in load_file(path).items()}


@dataclass(frozen=True)
class Job:
    """Work on a disk, and the files that are there before, as patterns of finished ones; whether they are kept or replaced."""

    do: Callable[[Path], None]
    before: tuple[str, ...] = ()
    kept: bool = False
    prepare: Callable[[Path], None] = lambda disk: None


JOBS = {
    "guard": Job(_save, ("guard.safetensors",)),
    "fit": Job(_fit),
    "bench": Job(_bench),
    "scores": Job(_score, ("out/a.csv", f"out/{NOTES}/a.csv.json"), kept=True, prepare=_fill),
    "export": Job(_export, ("guard.onnx",)),
}


FEW = 200
"""Trials of the quick jobs; the others are exports, which take long."""


def files(disk: Path) -> dict[str, Path]:
    return {str(path.relative_to(disk)): path for path in sorted(disk.rglob("*")) if path.is_file() and path.suffix != ".lock"}


def finish(folder: Path, name: str) -> None:
    """The work without a fault, and what it takes."""
    JOBS[name].prepare(folder)
    JOBS[name].do(folder)
    sizes = [path.stat().st_size for path in files(folder).values()]
    print(sum(-(-size // 4096) * 4096 for size in sizes), max(sizes))


@cache
def measure_folder(name: str) -> tuple[Path, int, int]:
    """A folder with all files; their bytes in pages, and the largest one's."""
    folder = shared_folder()
    total, largest = zygote()(finish, folder, name).check().said.split()[-2:]
    return folder, int(total), int(largest)


def work(folder: Path, name: str, way: str, room: int, finished: str) -> None:
    """All of a trial, in a process that has a disk of its own."""
    disk, job, expected = folder / "disk", JOBS[name], Path(finished)
    disk.mkdir()
    job.prepare(disk)
    way = mount(disk, way)
    for path in (path for pattern in job.before for path in expected.glob(pattern)):
        (disk / path.relative_to(expected)).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, disk / path.relative_to(expected))
    before = {each: (path.read_bytes(), path.stat().st_mtime_ns) for each, path in files(disk).items()}
    said = failing(job, disk, WAYS[way](disk, room))
    assert said is None or str(disk) in said, f"It names no file: {said}"
    left = files(disk)
    assert before.keys() <= left.keys()
    assert not [each for each in left if each.endswith(".part")]
    for each, path in left.items():
        assert _whole(path) or path.suffix == ".onnx"
        assert said is None or each not in before or path.read_bytes() == before[each][0]
    job.do(disk)
    assert files(disk).keys() == files(expected).keys()
    assert all(_whole(path) == _whole(expected / each) for each, path in files(disk).items())
    assert not job.kept or all((disk / each).stat().st_mtime_ns == when for each, (_, when) in before.items())
    print(f"\n{way}, {name}: {'there was room' if said is None else 'refused by name, finished later'}")


def mount(disk: Path, way: str) -> str:
    """The way to make writing fail: as wanted, or, where no disk can be mounted, by a limit of size."""
    try:
        mount_small(disk)
        return way
    except OSError:
        return "RLIMIT_FSIZE"


def failing(job: Job, disk: Path, fault: AbstractContextManager[None]) -> str | None:
    """What the error says; None if there is none."""
    try:
        with fault:
            job.do(disk)
    except (OffmapError, OSError) as error:
        return str(error)
    return None


def trial(seed: int, folder: Path) -> str:
    if sys.platform != "linux":
        pytest.skip("small disks are made of Linux's namespaces")
    rng = random.Random(seed)
    name = rng.choice(("guard", "fit", "bench", "scores")) if seed < FEW else "export"
    way = rng.choice(sorted(WAYS))
    expected, total, largest = measure_folder(name)
    room = rng.randrange(largest if way == "RLIMIT_FSIZE" else total)
    return zygote()(work, folder, name, way, room, str(expected)).check().said.splitlines()[-1]


CHECK = Check(
    "On a full disk, or where writing fails, the error names the file, old files stay whole, and with room the work is finished.",
    trial, trials=FEW + 4, limit=400.0, quick=4,
)  # fmt: skip
