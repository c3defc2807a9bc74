"""Rows a second: `guard.score` and the whole `offmap score` command against the products that they cannot do without."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from safetensors.torch import save_file

import offmap
from offmap.extras import require
from offmap_bench.speed import limit, subject
from offmap_bench.speed.race import Timing, race
from offmap_bench.speed.record import Claim, Measurement, Record

ROWS, FEW, TURNS = 30_000, 500, 3
NAMES = [f"x{i}" for i in range(subject.FEATURES)]

HOW = f"""The guard has {subject.DRAWS} draws, which it remembers, and score="paper", whose work is products alone: 2·P·Σ in·out
FLOP a row. A call `guard(x)`, and each row of the command, takes twice as many, for clipped draws predict and unclipped ones
score. `offmap score` runs in a process of its own on {ROWS:,} rows of eight float64 columns and writes scores to Parquet; what it
takes for {FEW} rows, the start of the interpreter and torch above all, is shown apart and left out of its rows a second. Times
are of the processor, one thread."""

MODULE = f"""
from offmap.integrations.mlp import mlp

def make_net():
    return mlp({subject.FEATURES}, {subject.OUTPUTS}, hidden={subject.HIDDEN}, seed=0)
"""


class Spent(NamedTuple):
    """Seconds of the processor for all rows, and for a few."""

    whole: float
    start: float

    @property
    def rows(self) -> float:
        """Rows a second past the start."""
        return (ROWS - FEW) / (self.whole - self.start)


def run(rounds: int = TURNS) -> Record:
    """In memory first, in turns; then a process for every file."""
    guard = subject.fitted(score="paper")
    x = subject.table()["score"][0]
    timings = race({"score": lambda: guard.score(x), "call": lambda: guard(x), "gemm": limit.product()}, rounds=rounds)
    one, both = (limit.least(timings["gemm"], limit.flops(work)) for work in (lambda: guard.score(x), lambda: guard(x)))
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder), guard)
        commands = {suffix: Spent(command(Path(folder), suffix, ROWS), command(Path(folder), suffix, FEW)) for suffix in WRITERS}
    score, call = timings["score"].best, timings["call"].best
    parquet = commands[".parquet"]
    return Record(
        "throughput", "Rows a second", HOW, rounds,
        [
            _rate("a bare GEMM of one pass of all draws", one, len(x)),
            _rate("`guard.score` in memory", timings["score"], len(x)),
            _rate("`guard(x)` in memory, two passes of all draws", timings["call"], len(x)),
            *(Measurement(f"`offmap score`, {suffix}", "rows/s", spent.rows, spent.rows) for suffix, spent in commands.items()),
            *(Measurement(f"`offmap score`, {suffix}, {ROWS:,} rows with the start", "s", spent.whole, spent.whole)
              for suffix, spent in commands.items()),
            Measurement("the start alone", "s", parquet.start, parquet.start),
        ],
        [
            Claim("times the bare GEMM, `guard.score`", score / one.best, "at most", 1.7),
            Claim("times the bare GEMM of both passes, `guard(x)`", call / both.best, "at most", 1.7),
            *(Claim(f"times `guard(x)` in memory, `offmap score` of {suffix}", len(x) / call / spent.rows, "at most", most)
              for (suffix, spent), most in zip(commands.items(), (1.3, 1.3, 1.6), strict=True)),
        ],
    )  # fmt: skip


def _rate(what: str, timing: Timing, rows: float) -> Measurement:
    return Measurement(what, "rows/s", rows / timing.best, rows / timing.median, rows / min(timing.wall))


def prepare(folder: Path, guard: offmap.Guard) -> None:
    """A module that makes the net, its weights, and a guard that remembers the names of the columns."""
    (folder / "bench_module.py").write_text(MODULE, encoding="utf-8")
    save_file(subject.net().state_dict(), folder / "w.safetensors")
    replace(guard, about={"inputs": NAMES, "targets": ["y"]}).save(folder / "guard.safetensors")


def command(folder: Path, suffix: str, rows: int) -> float:
    """Seconds of the processor that `offmap score` takes for a new file of so many rows."""
    data, scores = folder / f"data{suffix}", folder / "scores.parquet"
    WRITERS[suffix](data, np.random.RandomState(rows).randn(rows, subject.FEATURES))
    words = [sys.executable, "-m", "offmap", "score", "guard.safetensors", data.name, "-o", scores.name]
    words += ["--net", "bench_module:make_net", "--weights", "w.safetensors", "--quiet"]
    environment = os.environ | {"PYTHONPATH": str(Path(offmap.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    before = os.times()
    subprocess.run(words, cwd=folder, env=environment, stdout=subprocess.DEVNULL, check=True)
    after = os.times()
    assert require("pyarrow.parquet", "parquet").read_metadata(scores).num_rows == rows
    return after.children_user + after.children_system - before.children_user - before.children_system


def _parquet(path: Path, x: NDArray[Any]) -> None:
    arrow, parquet = require("pyarrow", "parquet"), require("pyarrow.parquet", "parquet")
    parquet.write_table(arrow.table(dict(zip(NAMES, x.T, strict=True))), path)


def _npz(path: Path, x: NDArray[Any]) -> None:
    np.savez(path, **dict(zip(NAMES, x.T, strict=True)))


def _csv(path: Path, x: NDArray[Any]) -> None:
    np.savetxt(path, x, delimiter=",", header=",".join(NAMES), comments="")


WRITERS: dict[str, Callable[[Path, NDArray[Any]], None]] = {".parquet": _parquet, ".npz": _npz, ".csv": _csv}
"""Forms of a table, and how each is written."""
