"""What `offmap score` needs for a Parquet file that is larger than the memory it may take: a process for each file."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file

import offmap
from offmap.extras import require
from offmap.integrations.mlp import mlp
from offmap.likelihoods import Gaussian
from offmap_bench.speed.record import Claim, Measurement, Record

FEATURES, HIDDEN, DRAWS = 8, (32, 32), 20
NAMES = [f"x{i}" for i in range(FEATURES)]
FEW, MANY = ("paper", 500_000), ("paper", 5_000_000)
CASES = (FEW, MANY, ("default", 500_000))
"""Scores, and rows of the file."""

PART = 100_000
"""Rows of a row group."""

LIMIT = 1000.0
"""Megabytes that the process may take in all, interpreter and torch included."""

GROWTH = 64.0
"""Megabytes that ten times as many rows may add."""

HOW = f"""`offmap score guard.safetensors data.parquet -o scores.parquet` in a process of its own: peak resident memory, the
interpreter and torch included, and time of the processor, loading included. The net is 8-32-32-2, the guard has {DRAWS} draws;
the default score also looks for neighbours among 2,000 training rows. Columns are eight float64 and a target that is not used.
Output: score, verdict, p-value, mean and standard deviation of each row. The peak is what the kernel says (`VmHWM`). The machine
was busy with other work: the wall clock says little."""

MODULE = f"""
from offmap.integrations.mlp import mlp

def make_net():
    return mlp({FEATURES}, 2, hidden={HIDDEN}, seed=0)
"""


class Run(NamedTuple):
    """One process: megabytes at its peak, seconds of the processor and on the wall, megabytes of the file."""

    peak: float
    seconds: float
    wall: float
    size: float


def run() -> Record:
    """One process a file."""
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder))
        runs = {case: score(Path(folder), *case) for case in CASES}
    measurements = [
        each
        for (kind, rows), found in runs.items()
        for each in (
            Measurement(f'{rows:,} rows ({found.size:.0f} MB), score="{kind}", peak', "MB", found.peak, found.peak),
            Measurement(f'{rows:,} rows, score="{kind}", time', "s", found.seconds, found.seconds, found.wall),
        )
    ]
    return Record(
        "command", "Scoring a large file from the command line", HOW, 1, measurements,
        [
            Claim(f"MB at the peak of `offmap score`, {MANY[1]:,} rows", runs[MANY].peak, "at most", LIMIT),
            Claim(f"MB more for {MANY[1]:,} rows than for {FEW[1]:,}", runs[MANY].peak - runs[FEW].peak, "at most", GROWTH),
            Claim('rows a second of the processor, score="paper"', MANY[1] / runs[MANY].seconds, "at least", 50_000),
        ],
    )  # fmt: skip


def prepare(folder: Path) -> None:
    """A module that makes the net, its trained weights, and a guard that remembers the names of the columns."""
    (folder / "bench_module.py").write_text(MODULE, encoding="utf-8")
    x, y = (torch.from_numpy(each).float() for each in rows_of(2_400, 0))
    net = mlp(FEATURES, 2, hidden=HIDDEN, seed=0)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    for _ in range(200):
        loss = Gaussian().nll(net(x[:2_000]).unsqueeze(0), y[:2_000]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    save_file(net.state_dict(), folder / "w.safetensors")
    parts = (x[:2_000], y[:2_000]), (x[2_000:], y[2_000:])
    for kind in {kind for kind, _ in CASES}:
        guard = offmap.fit(net, *parts, solver="closed-form", score=kind, draws=DRAWS, progress=False)
        replace(guard, about={"inputs": NAMES, "targets": ["y"]}).save(folder / f"{kind}.safetensors")


def rows_of(count: int, part: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Inputs (count, 8) and targets."""
    source = np.random.RandomState(part)
    x = source.randn(count, FEATURES)
    return x, np.sin(x[:, 0]) + x[:, 1] * x[:, 2] / 2 + 0.1 * source.randn(count)


def write(path: Path, rows: int) -> None:
    """A Parquet file, a part at a time."""
    arrow, parquet = require("pyarrow", "parquet"), require("pyarrow.parquet", "parquet")
    writer = None
    for part in range(rows // PART):
        x, y = rows_of(PART, part + 1)
        table = arrow.table({**dict(zip(NAMES, x.T, strict=True)), "y": y})
        writer = writer or parquet.ParquetWriter(path, table.schema)
        writer.write_table(table)
    assert writer is not None
    writer.close()


def score(folder: Path, kind: str, rows: int) -> Run:
    """Write a file, score it in another process, watch that process, and see that every row was scored."""
    data, scores = folder / "data.parquet", folder / "scores.parquet"
    write(data, rows)
    words = [sys.executable, "-m", "offmap", "score", f"{kind}.safetensors", data.name, "-o", scores.name]
    words += ["--net", "bench_module:make_net", "--weights", "w.safetensors", "--quiet"]
    before, start, peak = os.times(), time.perf_counter(), 0.0
    environment = os.environ | {"PYTHONPATH": str(Path(offmap.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(words, cwd=folder, env=environment, stdout=subprocess.DEVNULL) as process:
        while process.poll() is None:
            peak = max(peak, highest(process.pid))
            time.sleep(0.05)
    if process.returncode:
        raise SystemExit(f"`offmap score` ended with {process.returncode}")
    after = os.times()
    seconds = after.children_user + after.children_system - before.children_user - before.children_system
    written = require("pyarrow.parquet", "parquet").read_metadata(scores)
    assert written.num_rows == rows
    return Run(peak, seconds, time.perf_counter() - start, data.stat().st_size / 1e6)


def highest(process: int) -> float:
    """The high-water mark of a process in megabytes; 0 if it is gone."""
    try:
        status = Path(f"/proc/{process}/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) * 1024 / 1e6 for line in status if line.startswith("VmHWM:")), 0.0)
