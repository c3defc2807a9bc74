"""`offmap bench run` is killed, and started again: what has a record is neither lost nor run again, the rest is run."""

from __future__ import annotations

import json
import os
import random
import sys
from functools import cache
from pathlib import Path

from checks.trust import Check
from faults.damaged_record import PLAN, without_seconds, write_plan
from faults.places import shared_folder
from faults.zygote import Ended, draw_moment, zygote
from offmap import cli
from offmap_bench.runner.store import read_records


def work(folder: Path) -> None:
    """The command, with models that are trained in the same folder."""
    os.environ["OFFMAP_CACHE"] = str(folder / "cache")
    (folder / "tiny.toml").write_text(PLAN, encoding="utf-8")
    sys.argv = ["offmap", "bench", "run", "tiny.toml", "--records", "tiny.jsonl", "--json"]
    cli.main()


@cache
def run_undisturbed() -> tuple[Ended, Path]:
    folder = shared_folder()
    return zygote()(work, folder, warm=True).check(), folder


def list_finished(folder: Path) -> dict[str, object]:
    """Records, and trained models as files: a model written again is another."""
    files = (folder / "cache").rglob("*.safetensors")
    models = {str(path.relative_to(folder)): (path.stat().st_ino, path.stat().st_mtime_ns) for path in files}
    return {**models, **read_records(folder / "tiny.jsonl").records}


def trial(seed: int, folder: Path) -> str:
    """Killed once or twice, then left alone."""
    rng, (usual, whole) = random.Random(seed), run_undisturbed()
    ending, before = "finished before the kill", dict[str, object]()
    for _ in range(rng.choice((1, 1, 2))):
        ended = zygote()(work, folder, moment=draw_moment(rng, usual))
        assert before.items() <= list_finished(folder).items()
        if not ended.killed:
            ended.check()
            break
        before, done = list_finished(folder), len(read_records(folder / "tiny.jsonl").records)
        assert read_records(folder / "tiny.jsonl").damaged == {}
        place = "while a file was written" if ended.begun > ended.ended else "between files"
        ending = f"killed {place}, {'went on' if done else 'began anew'}"
    done = len(read_records(folder / "tiny.jsonl").records)
    result = json.loads(zygote()(work, folder).check().said)
    assert (result["before"], result["done"], result["failed"]) == (done, len(write_plan()) - done, 0)
    assert result["damaged"] == {}
    assert before.items() <= list_finished(folder).items()
    assert list_finished(folder).keys() == list_finished(whole).keys()
    assert without_seconds(folder / "tiny.jsonl") == without_seconds(whole / "tiny.jsonl")
    return ending


CHECK = Check("A killed `bench run` goes on with the cells that have no record, to the same numbers.", trial, quick=3)
