"""`offmap bench run` is killed, and started again: what has a record is neither lost nor run again, the rest is run."""

from __future__ import annotations

import json
import os
import random
import sys
from functools import cache
from pathlib import Path

from faults.damaged_record import PLAN, planned, told
from faults.places import shared_folder
from faults.zygote import Ended, drawn, zygote
from offmap import cli
from offmap_bench.checks.trust import Check
from offmap_bench.runner.store import read_all


def work(folder: Path) -> None:
    """The command, with models that are trained in the same folder."""
    os.environ["OFFMAP_CACHE"] = str(folder / "cache")
    (folder / "tiny.toml").write_text(PLAN, encoding="utf-8")
    sys.argv = ["offmap", "bench", "run", "tiny.toml", "--records", "records", "--json"]
    cli.main()


@cache
def undisturbed() -> tuple[Ended, Path]:
    folder = shared_folder()
    return zygote()(work, folder, warm=True).check(), folder


def kept(folder: Path) -> dict[str, tuple[int, int]]:
    """Whole files with finished work, and which ones they are: a record or a model written again is another."""
    files = [*(folder / "records").glob("*.json"), *(folder / "cache").rglob("*.safetensors")]
    return {str(path.relative_to(folder)): (path.stat().st_ino, path.stat().st_mtime_ns) for path in files}


def trial(seed: int, folder: Path) -> str:
    """Killed once or twice, then left alone."""
    rng, (usual, whole) = random.Random(seed), undisturbed()
    ending, before = "finished before the kill", dict[str, tuple[int, int]]()
    for _ in range(rng.choice((1, 1, 2))):
        ended = zygote()(work, folder, moment=drawn(rng, usual))
        assert before.items() <= kept(folder).items()
        if not ended.killed:
            ended.check()
            break
        before, done = kept(folder), len(read_all(folder / "records").records)
        assert read_all(folder / "records").damaged == {}
        place = "while a file was written" if ended.begun > ended.ended else "between files"
        ending = f"killed {place}, {'went on' if done else 'began anew'}"
    done = len(read_all(folder / "records").records)
    result = json.loads(zygote()(work, folder).check().said)
    assert (result["before"], result["done"], result["failed"]) == (done, len(planned()) - done, 0)
    assert result["damaged"] == {}
    assert before.items() <= kept(folder).items()
    assert kept(folder).keys() == kept(whole).keys()
    assert all(told(folder / name) == told(whole / name) for name in kept(whole) if name.startswith("records"))
    return ending


CHECK = Check("A killed `bench run` goes on with the cells that have no record, to the same numbers.", trial, quick=3)
