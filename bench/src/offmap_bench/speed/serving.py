"""Themes of deployment: the exported graph beside the guard, and requests to `offmap serve` beside the bare graph."""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np

import offmap
from offmap.export.onnx import open_session
from offmap_bench.speed import measure
from offmap_bench.speed.measure import GEMM, Claim, Measurement, Record, Timing, Work, measurements, once, race, record, repeat
from offmap_bench.speed.subjects import fit_guard, table

SIZES = {32: 100, 4_096: 1}
"""Rows of a call, and calls in a turn."""


def export(rounds: int = 5) -> Record:
    """Few rows and many, the graph and the guard in turns."""
    guard, every = fit_guard(), dict[str, Timing]()
    with tempfile.TemporaryDirectory() as folder:
        session = open_session(str(_export(guard, folder)))
        for rows, calls in SIZES.items():
            x = table()["score"][0][:rows]
            works: dict[str, Work] = {
                f"{rows:,} rows: the graph, ONNX Runtime": repeat(calls, lambda x=x: session.run(None, {"input": x.numpy()})),
                (ours := f"{rows:,} rows: `guard(x)`, torch"): repeat(calls, lambda x=x: guard(x)),
            }
            timings = race(works, rounds=rounds, gemm={f"{rows:,} rows: {GEMM}": works[ours]})
            every |= {name: timing.times(1 / calls) for name, timing in timings.items()}
    return record("export", rounds, every, "ms")


def _export(guard: offmap.Guard, folder: str) -> Path:
    return guard.export(Path(folder, "g.onnx"), table()["valid"][0][:64]).path


ROWS, CALLS, CLIENTS = 32, 200, 8

Turn = tuple[float, list[float]]
"""Milliseconds of the processor per call, and of each call on the wall."""


def serving(rounds: int = 5) -> Record:
    """One server, bodies of both kinds, and the bare calls in between."""
    guard, rows = fit_guard(), table()["score"][0][:ROWS]
    x, buffer = rows.numpy(), io.BytesIO()
    np.save(buffer, x)
    npy = {"content": buffer.getvalue(), "headers": {"Content-Type": "application/x-npy"}}
    bare, product, turns = "bare `session.run`", measure.multiply(), dict[str, list[Turn]]()
    with tempfile.TemporaryDirectory() as folder:
        path = _export(guard, folder)
        session = open_session(str(path))
        with start_server(path) as (process, address):
            contestants: dict[str, Callable[[], Turn]] = {
                bare: lambda: time_calls(lambda: session.run(None, {"input": x})),
                "NPY body": lambda: time_requests(process, address, **npy),
                "JSON body": lambda: time_requests(process, address, json={"inputs": x.tolist()}),
                f"NPY body, {CLIENTS} clients": lambda: time_requests(process, address, clients=CLIENTS, **npy),
                "gemm": lambda: time_calls(product, 1),
            }
            for _ in range(rounds):
                for name, take_turn in contestants.items():
                    turns.setdefault(name, []).append(take_turn())
    gemm = turns.pop("gemm")
    bound = measure.least_time(
        Timing([ms / 1e3 for ms, _ in gemm], [w[0] / 1e3 for _, w in gemm]), measure.count_flops(lambda: guard(rows))
    )
    cpu = {name: sorted(ms for ms, _ in each) for name, each in turns.items()}
    walls = {name: min((sorted(wall) for _, wall in each), key=lambda wall: wall[CALLS // 2]) for name, each in turns.items()}
    measured = [Measurement(f"{n}, a call", "ms", t[0], t[rounds // 2], walls[n][CALLS // 2]) for n, t in cpu.items()]
    measured += [once(f"{name}, p99 on the wall", "ms", wall[int(0.99 * CALLS)]) for name, wall in walls.items()]
    measured += measurements({GEMM: bound}, "ms")
    claims = [
        Claim(f"times the bare call, {name}", t[0] / cpu[bare][0], "at most", 2.0) for name, t in cpu.items() if name != bare
    ]
    return Record("serving", rounds, measured, claims)


def time_calls(call: Work, calls: int = CALLS) -> Turn:
    walls, start = list[float](), time.process_time()
    for _ in range(calls):
        before = time.perf_counter()
        call()
        walls.append(1e3 * (time.perf_counter() - before))
    return 1e3 * (time.process_time() - start) / calls, walls


def time_requests(process: int, address: str, clients: int = 1, **body: Any) -> Turn:
    """Post a body from so many clients at once, `CALLS` times in all; the processor time is the server's."""

    def spent() -> float:
        words = Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        return 1e3 * (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")

    def post(_: int) -> list[float]:
        with httpx.Client(timeout=30) as client:
            return time_calls(lambda: client.post(f"{address}/score", **body).raise_for_status(), CALLS // clients)[1]

    start = spent()
    with ThreadPoolExecutor(clients) as pool:
        walls = [wall for each in pool.map(post, range(clients)) for wall in each]
    return (spent() - start) / CALLS, walls


@contextmanager
def start_server(path: Path) -> Generator[tuple[int, str]]:
    """Serve an exported guard in a process of its own: its id and its address."""
    environment = os.environ | {"PYTHONPATH": str(Path(offmap.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-m", "offmap", "serve", str(path), "--port", "0"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        address = re.search(r"http://[\d.]+:\d+", process.stdout.readline())
        assert address is not None
        yield process.pid, address[0]
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)
