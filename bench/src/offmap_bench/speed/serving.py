"""Themes of deployment: the exported graph beside the guard, and requests to `offmap serve` beside the bare graph."""

from __future__ import annotations

import http.client
import io
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

import offmap
from offmap.export.onnx import opened
from offmap_bench.speed import measure
from offmap_bench.speed.measure import GEMM, Claim, Measurement, Record, Timing, Work, measurements, once, race, record, repeat
from offmap_bench.speed.subjects import fit_guard, table

SIZES = {32: 100, 4_096: 1}
"""Rows of a call, and calls in a turn."""


def export(rounds: int = 5) -> Record:
    """Few rows and many, the graph and the guard in turns."""
    guard, found = fit_guard(), dict[str, Timing]()
    with tempfile.TemporaryDirectory() as folder:
        session = opened(str(_export(guard, folder)))
        for rows, calls in SIZES.items():
            x = table()["score"][0][:rows]
            works: dict[str, Work] = {
                f"{rows:,} rows: the graph, ONNX Runtime": repeat(calls, lambda x=x: session.run(None, {"input": x.numpy()})),
                (ours := f"{rows:,} rows: `guard(x)`, torch"): repeat(calls, lambda x=x: guard(x)),
            }
            timings = race(works, rounds=rounds, gemm={f"{rows:,} rows: {GEMM}": works[ours]})
            found |= {name: timing.times(1 / calls) for name, timing in timings.items()}
    return record("export", rounds, found, "ms")


def _export(guard: offmap.Guard, folder: str) -> Path:
    return guard.export(Path(folder, "g.onnx"), table()["valid"][0][:64]).path


ROWS, CALLS, CLIENTS = 32, 200, 8

Turn = tuple[float, list[float]]
"""Milliseconds of the processor per call, and of each call on the wall."""


def serving(rounds: int = 5) -> Record:
    """One server, bodies of both kinds, and the bare calls in between."""
    guard, rows = fit_guard(), table()["score"][0][:ROWS]
    x = rows.numpy()
    npy = io.BytesIO()
    np.save(npy, x)
    bodies = {
        "npy": (npy.getvalue(), "application/x-npy"),
        "json": (json.dumps({"inputs": x.tolist()}).encode(), "application/json"),
    }
    bare, product = "bare `session.run`", measure.multiply()
    with tempfile.TemporaryDirectory() as folder:
        path = _export(guard, folder)
        session = opened(str(path))
        with Server(path) as server:
            contestants: dict[str, Callable[[], Turn]] = {
                bare: lambda: time_calls(lambda: session.run(None, {"input": x}), CALLS),
                "NPY body": lambda: server.request(*bodies["npy"]),
                "JSON body": lambda: server.request(*bodies["json"]),
                f"NPY body, {CLIENTS} clients": lambda: server.request(*bodies["npy"], clients=CLIENTS),
                "gemm": lambda: time_calls(product, 1),
            }
            turns: dict[str, list[Turn]] = {name: [] for name in contestants}
            for _ in range(rounds):
                for name, take_turn in contestants.items():
                    turns[name].append(take_turn())
    gemm = turns.pop("gemm")
    bound = measure.least_time(
        Timing([cpu / 1e3 for cpu, _ in gemm], [w[0] / 1e3 for _, w in gemm]), measure.count_flops(lambda: guard(rows))
    )
    cpu = {name: sorted(ms for ms, _ in each) for name, each in turns.items()}
    walls = {name: min((sorted(wall) for _, wall in each), key=lambda wall: wall[len(wall) // 2]) for name, each in turns.items()}
    measured = [Measurement(f"{n}, a call", "ms", t[0], t[rounds // 2], walls[n][CALLS // 2]) for n, t in cpu.items()]
    measured += [once(f"{name}, p99 on the wall", "ms", wall[int(0.99 * CALLS)]) for name, wall in walls.items()]
    measured += measurements({GEMM: bound}, "ms")
    claims = [
        Claim(f"times the bare call, {name}", t[0] / cpu[bare][0], "at most", 2.0) for name, t in cpu.items() if name != bare
    ]
    return Record("serving", rounds, measured, claims)


def time_calls(call: Work, calls: int) -> Turn:
    walls: list[float] = []
    start = time.process_time()
    for _ in range(calls):
        before = time.perf_counter()
        call()
        walls.append(1e3 * (time.perf_counter() - before))
    return 1e3 * (time.process_time() - start) / calls, walls


class Server:
    """A server process, which ends with the block."""

    def __init__(self, path: Path) -> None:
        environment = os.environ | {"PYTHONPATH": str(Path(offmap.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
        words = [sys.executable, "-m", "offmap", "serve", str(path), "--port", "0"]
        self.process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment)

    def __enter__(self) -> Server:
        assert self.process.stdout is not None
        address = re.search(r"http://([\d.]+):(\d+)", self.process.stdout.readline())
        assert address is not None
        self.address = address[1], int(address[2])
        return self

    def __exit__(self, *_: object) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.communicate(timeout=30)

    def cpu(self) -> float:
        words = Path(f"/proc/{self.process.pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        return 1e3 * (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")

    def request(self, body: bytes, kind: str, clients: int = 1) -> Turn:
        """Post a body from so many clients at once, `CALLS` times in all; the processor time is the server's."""
        start = self.cpu()
        with ThreadPoolExecutor(clients) as pool:
            walls = [
                wall for each in pool.map(lambda _: self._post(body, kind, CALLS // clients), range(clients)) for wall in each
            ]
        return (self.cpu() - start) / CALLS, walls

    def _post(self, body: bytes, kind: str, calls: int) -> list[float]:
        connection = http.client.HTTPConnection(*self.address, timeout=30)
        walls: list[float] = []
        for _ in range(calls):
            before = time.perf_counter()
            connection.request("POST", "/score", body, {"Content-Type": kind})
            response = connection.getresponse()
            text = response.read()
            assert response.status == 200, text
            walls.append(1e3 * (time.perf_counter() - before))
        connection.close()
        return walls
