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
from offmap_bench.speed import subjects as on
from offmap_bench.speed.measure import Claim, Measurement, Record, measurements, once, peak_memory, race

MODULE = """
from offmap.integrations.nets import mlp

def make_model():
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
    text = MODULE.format(features=on.FEATURES, outputs=on.OUTPUTS, hidden=hidden)
    (folder / "bench_module.py").write_text(text, encoding="utf-8")
    save_file(net.state_dict(), folder / "w.safetensors")
    for name, guard in guards.items():
        replace(guard, about={"inputs": on.NAMES, "targets": ["y"]}).save(folder / f"{name}.safetensors")


def score_file(folder: Path, guard: str, data: Path, rows: int) -> Spent:
    """Run `offmap score` in a process of its own, watch it, and check that every row was scored."""
    scores = folder / "scores.parquet"
    words = [sys.executable, "-m", "offmap", "score", f"{guard}.safetensors", data.name, "-o", scores.name]
    words += ["--model", "bench_module:make_model", "--weights", "w.safetensors", "--quiet"]
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


def write_parquet(path: Path, x: NDArray[Any], group: int = 1 << 20) -> None:
    arrow, parquet = require("pyarrow", "parquet"), require("pyarrow.parquet", "parquet")
    parquet.write_table(arrow.table(dict(zip((*on.NAMES, "y"), x.T, strict=False))), path, row_group_size=group)


ROWS, FEW = 30_000, 500
WRITERS: dict[str, tuple[Callable[[Path, NDArray[Any]], None], float]] = {
    ".parquet": (write_parquet, 1.3),
    ".npz": (lambda path, x: np.savez(path, **dict(zip(on.NAMES, x.T, strict=True))), 1.3),
    ".csv": (lambda path, x: np.savetxt(path, x, delimiter=",", header=",".join(on.NAMES), comments=""), 1.6),
}
"""Forms of a table, how each is written, and the bound of its time against `guard(x)` in memory."""


def throughput(rounds: int = 3) -> Record:
    """Rows a second in memory, in turns; then a process for every file, and one for its first rows."""
    guard, x = on.fit_guard(score="paper"), on.table()["score"][0]
    one, both = "a bare GEMM of one pass of all draws", "both passes"
    score, call = "`guard.score` in memory", "`guard(x)` in memory, two passes of all draws"
    works = {score: lambda: guard.score(x), call: lambda: guard(x)}
    timings = race(works, rounds=rounds, gemm={one: works[score], both: works[call]})
    spent: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as name:
        prepare(folder := Path(name), on.trained_net(), on.HIDDEN, guard=guard)
        for suffix, (write, _) in WRITERS.items():
            for rows in (ROWS, FEW):
                write(data := folder / f"data{suffix}", np.random.RandomState(rows).randn(rows, on.FEATURES))
                spent.setdefault(suffix, []).append(score_file(folder, "guard", data, rows).seconds)
    rates = {suffix: (ROWS - FEW) / (every - few) for suffix, (every, few) in spent.items()}
    inverse = measurements({name: timings[name] for name in (one, score, call)})
    measured = [Measurement(m.what, "rows/s", len(x) / m.best, len(x) / m.median, len(x) / (m.wall or m.best)) for m in inverse]
    measured += [once(f"`offmap score`, {suffix}", "rows/s", rate) for suffix, rate in rates.items()]
    measured += [once(f"`offmap score`, {suffix}, {ROWS:,} rows with the start", "s", s[0]) for suffix, s in spent.items()]
    measured.append(once("the start alone", "s", spent[".parquet"][1]))
    best = {name: timing.best for name, timing in timings.items()}
    claims = {
        "times the bare GEMM, `guard.score`": (best[score] / best[one], 1.7),
        "times the bare GEMM of both passes, `guard(x)`": (best[call] / best[both], 1.7),
    }
    for suffix, (_, most) in WRITERS.items():
        claims[f"times `guard(x)` in memory, `offmap score` of {suffix}"] = len(x) / best[call] / rates[suffix], most
    return Record("throughput", rounds, measured, [Claim(what, value, "at most", most) for what, (value, most) in claims.items()])


SMALL, DRAWS = (32, 32), 20
CASES = (("paper", 500_000), ("paper", 5_000_000), ("default", 500_000))
"""Scores, and rows of the file."""

LIMIT, GROWTH = 1000.0, 64.0
"""Megabytes that the process may take in all, and that ten times as many rows may add."""


def command(rounds: int = 1) -> Record:
    """Peak memory and time of Parquet files larger than the memory that scoring may take."""
    with tempfile.TemporaryDirectory() as folder:
        prepare_small(Path(folder))
        runs = {case: score_large(Path(folder), *case) for case in CASES}
    result = Record("command", rounds, [])
    for (kind, rows), spent in runs.items():
        result.measurements.append(once(f'{rows:,} rows ({spent.size:.0f} MB), score="{kind}", peak', "MB", spent.peak))
        result.measurements.append(once(f'{rows:,} rows, score="{kind}", time', "s", spent.seconds, spent.wall))
    few, many, rows = runs[CASES[0]], runs[CASES[1]], CASES[1][1]
    result.claims.append(Claim(f"MB at the peak of `offmap score`, {rows:,} rows", many.peak, "at most", LIMIT))
    result.claims.append(Claim(f"MB more for {rows:,} rows than for {CASES[0][1]:,}", many.peak - few.peak, "at most", GROWTH))
    result.claims.append(Claim('rows a second of the processor, score="paper"', rows / many.seconds, "at least", 50_000))
    return result


def prepare_small(folder: Path) -> None:
    """Train a small net, and fit a guard for every score."""
    net = mlp(on.FEATURES, on.OUTPUTS, hidden=SMALL, seed=0)
    on.descend(net, 200, torch.Generator().manual_seed(0))
    (x, y), valid = on.table()["train"], on.table()["valid"]
    options: dict[str, Any] = {"solver": "closed-form", "draws": DRAWS, "progress": False}
    guards = {kind: offmap.fit(net, (x[:2_000], y[:2_000]), valid, score=kind, **options) for kind in ("paper", "default")}
    prepare(folder, net, SMALL, **guards)


def score_large(folder: Path, kind: str, rows: int) -> Spent:
    """Write a Parquet file in groups of 100,000 rows, and score it."""
    write_parquet(data := folder / "data.parquet", np.random.RandomState(1).randn(rows, on.FEATURES + 1), group=100_000)
    return score_file(folder, kind, data, rows)
