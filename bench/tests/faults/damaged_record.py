"""A benchmark's record that was cut or changed is set aside by its name, and its cell is run again; the others are kept."""

from __future__ import annotations

import json
import os
import random
import shutil
from functools import cache
from pathlib import Path
from typing import Any

from faults.damage import damaged
from faults.places import shared_folder
from offmap_bench.checks.trust import Check
from offmap_bench.runner.plan import Cell, cells
from offmap_bench.runner.reading import parse
from offmap_bench.runner.run import run

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


def planned() -> list[Cell]:
    return cells(parse(PLAN, "tiny.toml"))


def told(path: Path) -> dict[str, Any]:
    """A record but for what differs from run to run."""
    record = json.loads(path.read_text(encoding="utf-8"))
    return {name: value for name, value in record.items() if name not in ("seconds", "checksum")}


@cache
def _finished() -> Path:
    """A folder of records, and of the trained models beside it."""
    room = shared_folder()
    os.environ["OFFMAP_CACHE"] = str(room / "cache")
    assert run(planned(), room / "records").done == len(planned())
    return room


def trial(seed: int, folder: Path) -> str:
    rng, records, room = random.Random(seed), folder / "records", _finished()
    os.environ["OFFMAP_CACHE"] = str(room / "cache")
    shutil.copytree(room / "records", records)
    before = {path.name: path.stat().st_mtime_ns for path in records.iterdir()}
    path = rng.choice(sorted(records.iterdir()))
    what, content = damaged(path.read_bytes(), seed, rng)
    path.write_bytes(content)
    outcome = run(planned(), records)
    if not outcome.damaged:  # such as 1e-05 that became 1E-05
        assert json.loads(content) == json.loads((room / "records" / path.name).read_bytes())
        return f"{what}, nothing that counts"
    assert list(outcome.damaged) == [path.name]
    assert (outcome.done, outcome.before, outcome.failed) == (1, len(before) - 1, 0)
    assert (records / f"{path.name}.damaged").read_bytes() == content
    assert all(told(records / name) == told(room / "records" / name) for name in before)
    assert {n for n in before if (records / n).stat().st_mtime_ns != before[n]} == {path.name}
    return f"{what}, set aside and run again"


CHECK = Check(
    "A record that was cut or changed is set aside by its name, and only its cell is run again.", trial, limit=60.0, quick=8
)
