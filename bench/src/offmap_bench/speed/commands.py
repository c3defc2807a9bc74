"""Themes of the command line: rows a second and peak memory of `offmap score`."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import nn

import offmap
from offmap.extras import require
from offmap.integrations.nets import mlp
from offmap_bench.speed.measure import Claim, Measurement, Record, Timing, compare, once, peak_memory
from offmap_bench.speed.subjects import FEATURES, HIDDEN, NAMES, OUTPUTS, descend, fit_guard, table, trained_net

MODULE = """
from offmap.integrations.nets import mlp

def make_net():
    return mlp({features}, {outputs}, hidden={hidden}, seed=0)
"""


class Spent(NamedTuple):
    """One process: megabytes at its peak, seconds of the processor and on the wall, megabytes of the file."""

    peak: float
    seconds: float
    wall: float
    size: float


def prepare(folder: Path, net: nn.Module, hidden: tuple[int, ...], **guards: offmap.Guard) -> None:
    """Write a module that builds the net, its weights, and guards that know the names of the columns."""
    text = MODULE.format(features=FEATURES, outputs=OUTPUTS, hidden=hidden)
    (folder / "bench_module.py").write_text(text, encoding="utf-8")
    save_file(net.state_dict(), folder / "w.safetensors")
    for name, guard in guards.items():
        replace(guard, about={"inputs": NAMES, "targets": ["y"]}).save(folder / f"{name}.safetensors")


def score_file(folder: Path, guard: str, data: Path, rows: int) -> Spent:
    """Run `offmap score` in a process of its own, watch it, and check that every row was scored."""
    scores = folder / "scores.parquet"
    words = [sys.executable, "-m", "offmap", "score", f"{guard}.safetensors", data.name, "-o", scores.name]
    words += ["--net", "bench_module:make_net", "--weights", "w.safetensors", "--quiet"]
    environment = os.environ | {"PYTHONPATH": str(Path(offmap.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    before, start, peak = os.times(), time.perf_counter(), 0.0
    with subprocess.Popen(words, cwd=folder, env=environment, stdout=subprocess.DEVNULL) as process:
        while process.poll() is None:
            peak = max(peak, peak_memory(process.pid))
            time.sleep(0.05)
    if process.returncode:
        raise SystemExit(f"`offmap score` ended with {process.returncode}")
    wall, after = time.perf_counter() - start, os.times()
    seconds = after.children_user + after.children_system - before.children_user - before.children_system
    assert require("pyarrow.parquet", "parquet").read_metadata(scores).num_rows == rows
    return Spent(peak, seconds, wall, data.stat().st_size / 1e6)


# -------------------------------------------------------------------------------------------------------------- throughput

ROWS, FEW = 30_000, 500


def _write_parquet(path: Path, x: NDArray[Any]) -> None:
    arrow, parquet = require("pyarrow", "parquet"), require("pyarrow.parquet", "parquet")
    parquet.write_table(arrow.table(dict(zip(NAMES, x.T, strict=True))), path)


WRITERS: dict[str, Callable[[Path, NDArray[Any]], None]] = {
    ".parquet": _write_parquet,
    ".npz": lambda path, x: np.savez(path, **dict(zip(NAMES, x.T, strict=True))),
    ".csv": lambda path, x: np.savetxt(path, x, delimiter=",", header=",".join(NAMES), comments=""),
}


def throughput(rounds: int = 3) -> Record:
    """Rows a second in memory, in turns; then a process for every file."""
    guard, x = fit_guard(score="paper"), table()["score"][0]
    one, both = "a bare GEMM of one pass of all draws", "both passes"
    score, call = "`guard.score` in memory", "`guard(x)` in memory, two passes of all draws"
    works = {score: lambda: guard.score(x), call: lambda: guard(x)}
    timings = race(works, rounds=rounds, gemm={one: works[score], both: works[call]})
    commands: dict[str, tuple[float, float]] = {}  # {suffix: seconds of all rows, and of a few}
    with tempfile.TemporaryDirectory() as name:
        prepare(folder := Path(name), trained_net(), HIDDEN, guard=guard)
        for suffix, write in WRITERS.items():
            spent: list[float] = []
            for rows in (ROWS, FEW):
                write(data := folder / f"data{suffix}", np.random.RandomState(rows).randn(rows, FEATURES))
                spent.append(score_file(folder, "guard", data, rows).seconds)
            commands[suffix] = spent[0], spent[1]
    rates = {suffix: (ROWS - FEW) / (every - few) for suffix, (every, few) in commands.items()}
    measured = [_rate(name, timings[name], len(x)) for name in (one, score, call)]
    measured += [once(f"`offmap score`, {suffix}", "rows/s", rate) for suffix, rate in rates.items()]
    measured += [once(f"`offmap score`, {s}, {ROWS:,} rows with the start", "s", every) for s, (every, _) in commands.items()]
    measured.append(once("the start alone", "s", commands[".parquet"][1]))
    claims = [
        ratio("times the bare GEMM, `guard.score`", timings[score], timings[one], "at most", 1.7),
        ratio("times the bare GEMM of both passes, `guard(x)`", timings[call], timings[both], "at most", 1.7),
    ]
    for (suffix, rate), most in zip(rates.items(), (1.3, 1.3, 1.6), strict=True):
        what = f"times `guard(x)` in memory, `offmap score` of {suffix}"
        claims.append(Claim(what, len(x) / timings[call].best / rate, "at most", most))
    return Record("throughput", rounds, measured, claims)


def _rate(what: str, timing: Timing, rows: float) -> Measurement:
    return Measurement(what, "rows/s", rows / timing.best, rows / timing.median, rows / min(timing.wall))


# ----------------------------------------------------------------------------------------------------------- large files

SMALL, DRAWS = (32, 32), 20
CASES = (("paper", 500_000), ("paper", 5_000_000), ("default", 500_000))
"""Scores, and rows of the file."""

GROUP = 100_000
"""Rows of a row group."""

LIMIT, GROWTH = 1000.0, 64.0
"""Megabytes that the process may take in all, and that ten times as many rows may add."""


def command(rounds: int = 1) -> Record:
    """Peak memory and time of Parquet files larger than the memory that scoring may take."""
    with tempfile.TemporaryDirectory() as folder:
        prepare_small(Path(folder))
        runs = {case: score_large(Path(folder), *case) for case in CASES}
    measured: list[Measurement] = []
    for (kind, rows), spent in runs.items():
        measured.append(once(f'{rows:,} rows ({spent.size:.0f} MB), score="{kind}", peak', "MB", spent.peak))
        measured.append(once(f'{rows:,} rows, score="{kind}", time', "s", spent.seconds, spent.wall))
    few, many = runs[CASES[0]], runs[CASES[1]]
    claims = [
        Claim(f"MB at the peak of `offmap score`, {CASES[1][1]:,} rows", many.peak, "at most", LIMIT),
        Claim(f"MB more for {CASES[1][1]:,} rows than for {CASES[0][1]:,}", many.peak - few.peak, "at most", GROWTH),
        Claim('rows a second of the processor, score="paper"', CASES[1][1] / many.seconds, "at least", 50_000),
    ]
    return Record("command", rounds, measured, claims)


def prepare_small(folder: Path) -> None:
    """Train a small net, and fit a guard for every score."""
    net = mlp(FEATURES, OUTPUTS, hidden=SMALL, seed=0)
    descend(net, 200, torch.Generator().manual_seed(0))
    (x, y), valid = table()["train"], table()["valid"]
    data = (x[:2_000], y[:2_000]), valid
    guards = {
        kind: offmap.fit(net, *data, solver="closed-form", score=kind, draws=DRAWS, progress=False)
        for kind in ("paper", "default")
    }
    prepare(folder, net, SMALL, **guards)


def score_large(folder: Path, kind: str, rows: int) -> Spent:
    """Write a Parquet file group by group, and score it."""
    arrow, parquet = require("pyarrow", "parquet"), require("pyarrow.parquet", "parquet")
    schema = arrow.schema([(name, arrow.float64()) for name in (*NAMES, "y")])
    with parquet.ParquetWriter(folder / "data.parquet", schema) as writer:
        for part in range(rows // GROUP):
            x = np.random.RandomState(part + 1).randn(GROUP, FEATURES + 1)
            writer.write_table(arrow.table(dict(zip((*NAMES, "y"), x.T, strict=True)), schema=schema))
    return score_file(folder, kind, folder / "data.parquet", rows)
