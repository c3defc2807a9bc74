"""A benchmark's record that was cut or changed is set aside by its name, and its cell is run again; the others are kept."""

from __future__ import annotations

import os
import random
from dataclasses import replace
from functools import cache
from pathlib import Path

from checks.trust import Check
from faults.damage import damage
from faults.places import shared_folder
from offmap_bench.runner.plan import Cell, cells, parse
from offmap_bench.runner.run import run
from offmap_bench.runner.store import Record, read_records

PLAN = """
name = "tiny"
seeds = [0]
tasks = ["regression"]

[defaults]
draws = 3
steps = 4
check_every = 2
risk_draws = 3

[defaults.deep_ensemble]
hidden = [6]
steps = 6
check_every = 3

[[method]]
name = "deep_ensemble"
label = "plain"
members = 1
config = {score = "paper"}

[[method]]
name = "deep_ensemble"
label = "ensemble"
members = 5
config = {score = "paper"}

[[method]]
name = "maxwent"
label = "wide"
members = 5
config = {score = "epistemic"}

[[method]]
name = "nearest"

[[method]]
name = "mahalanobis"
"""


def write_plan() -> list[Cell]:
    return cells(parse(PLAN, "tiny.toml"))


def without_seconds(path: Path) -> dict[str, Record]:
    """The records of a file but for what differs from run to run."""
    return {name: replace(record, seconds={}) for name, record in read_records(path).records.items()}


@cache
def _finish() -> Path:
    """A folder with a file of records, and the trained models beside it."""
    room = shared_folder()
    os.environ["OFFMAP_CACHE"] = str(room / "cache")
    assert run(write_plan(), room / "tiny.jsonl").done == len(write_plan())
    return room


def trial(seed: int, folder: Path) -> str:
    rng, path, room = random.Random(seed), folder / "tiny.jsonl", _finish()
    os.environ["OFFMAP_CACHE"] = str(room / "cache")
    lines = (room / "tiny.jsonl").read_bytes().splitlines()
    number = rng.randrange(len(lines))
    what, content = damage(lines[number], seed, rng)
    path.write_bytes(b"\n".join([*lines[:number], content, *lines[number + 1 :]]) + b"\n")
    outcome = run(write_plan(), path)
    after = without_seconds(path)
    assert after == without_seconds(room / "tiny.jsonl")
    if outcome.done == 0:  # such as 1e-05 that became 1E-05
        return f"{what}, nothing that counts"
    assert outcome.damaged or not content.strip()
    assert (outcome.done, outcome.before, outcome.failed) == (1, len(lines) - 1, 0)
    aside = path.with_name("tiny.jsonl.damaged")
    assert not outcome.damaged or aside.read_bytes() == b"".join(p + b"\n" for p in content.split(b"\n") if p.strip())
    assert {*lines[:number], *lines[number + 1 :]} <= {*path.read_bytes().splitlines()}
    return f"{what}, set aside and run again"


CHECK = Check(
    "A record that was cut or changed is set aside by its name, and only its cell is run again.", trial, limit=60.0, quick=8
)
