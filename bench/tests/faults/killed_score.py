"""`offmap score --resume` of a folder is killed, and started again: finished scores are kept, the others made."""

from __future__ import annotations

import json
import random
import sys
from functools import cache
from pathlib import Path

import numpy as np

from checks.trust import Check
from faults.damaged_scores import fill, read
from faults.places import shared_folder
from faults.zygote import Ended, draw_moment, zygote
from offmap import cli
from offmap.cli.folder import NOTES
from trained import quick, regression, regressor

FILES = ("a.csv", "b.npz", "c.csv", "d.npz", "e.csv", "f.npz")  # pyarrow has threads: a zygote must not know it


def work(folder: Path, data: str, guard: str) -> None:
    """The command; the net is made by a function of the tests."""
    sys.argv = ["offmap", "score", guard, data, "--model", "trained:regressor", "-o", str(folder / "out"), "--resume", "--json"]
    cli.main()


@cache
def score_undisturbed() -> tuple[Ended, Path]:
    shared = shared_folder()
    fill(shared / "data", FILES, rows=300)
    quick(regressor(), regression(60), regression(30, seed=1)).save(shared / "guard.safetensors")
    return zygote()(work, shared, *_ask(shared), warm=True).check(), shared


def _ask(shared: Path) -> tuple[str, str]:
    return str(shared / "data"), str(shared / "guard.safetensors")


def list_noted(folder: Path) -> dict[str, tuple[int, int]]:
    """Scores with a note, which are finished, and which file it is."""
    found = [folder / "out" / name for name in FILES if (folder / "out" / NOTES / f"{name}.json").exists()]
    return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in found}


def trial(seed: int, folder: Path) -> str:
    """Killed once or twice, then left alone."""
    rng, (usual, shared) = random.Random(seed), score_undisturbed()
    ending, before = "finished before the kill", dict[str, tuple[int, int]]()
    for _ in range(rng.choice((1, 1, 2))):
        ended = zygote()(work, folder, *_ask(shared), moment=draw_moment(rng, usual))
        assert before.items() <= list_noted(folder).items()
        before = list_noted(folder)
        if not ended.killed:
            ended.check()
            break
        for path in (folder / "out").glob("[a-f].*"):  # what has its name is whole, noted or not
            np.testing.assert_array_equal(read(path), read(shared / "out" / path.name))
        place = "while a file was written" if ended.begun > ended.ended else "between files"
        ending = f"killed {place}, {'went on' if before else 'began anew'}"
    result = json.loads(zygote()(work, folder, *_ask(shared)).check().said)
    assert (result["before"], result["files"], result["failed"]) == (len(before), len(FILES), {})
    assert result["rows"] == 300 * len(FILES)
    assert before.items() <= list_noted(folder).items()
    assert sorted(path.name for path in (folder / "out").rglob("*") if path.is_file() and path.suffix != ".json") == list(FILES)
    for name in FILES:
        np.testing.assert_array_equal(read(folder / "out" / name), read(shared / "out" / name))
    return ending


CHECK = Check("A killed `score --resume` keeps the finished scores, and makes the others, to the same numbers.", trial, quick=3)
