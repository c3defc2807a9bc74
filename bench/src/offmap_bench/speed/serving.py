"""What a request to `offmap serve` costs beside the bare ONNX Runtime call: a server process, and the same calls here."""

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
from typing import Any

import numpy as np
from numpy.typing import NDArray

import offmap
from offmap.export.onnx import opened
from offmap_bench.speed import limit, subject
from offmap_bench.speed.export import asking, written
from offmap_bench.speed.race import Timing
from offmap_bench.speed.record import Claim, Measurement, Record

ROWS, CALLS, TURNS, CLIENTS = 32, 200, 5, 8

HOW = f"""Of the [exported graph](#the-exported-graph): requests of {ROWS} rows, {CALLS} a turn, go to a server process over kept
connections, one after another, or from {CLIENTS} clients at once. Times are of the server's processor per request, against the
bare `session.run` on the same rows in this process, in turns; the wall clock of a request includes the client, and of several
clients their waiting."""


def run() -> Record:
    """One server, bodies of both kinds, and the bare calls in between."""
    guard, rows = subject.fitted(), subject.table()["score"][0][:ROWS]
    x = rows.numpy()
    with tempfile.TemporaryDirectory() as folder:
        path = written(guard, Path(folder))
        call, product = asking(opened(str(path)), rows), limit.product()
        with Server(path) as server:
            contestants: dict[str, Callable[[], tuple[float, list[float]]]] = {
                "bare `session.run`": lambda: timed(call, CALLS),
                "NPY body": lambda: server.asked(*npy(x)),
                "JSON body": lambda: server.asked(*text(x)),
                f"NPY body, {CLIENTS} clients": lambda: server.crowded(*npy(x)),
                "gemm": lambda: timed(product, 1),
            }
            turns: dict[str, list[tuple[float, list[float]]]] = {name: [] for name in contestants}
            for _ in range(TURNS):
                for name, measure in contestants.items():
                    turns[name].append(measure())
    gemm = turns.pop("gemm")
    products = Timing([cpu / 1e3 for cpu, _ in gemm], [wall[0] / 1e3 for _, wall in gemm])
    spent = {name: sorted(cpu for cpu, _ in each) for name, each in turns.items()}
    walls = {name: min((sorted(wall) for _, wall in each), key=lambda wall: wall[len(wall) // 2]) for name, each in turns.items()}
    measured = [Measurement(f"{n}, a call", "ms", t[0], t[TURNS // 2], walls[n][CALLS // 2]) for n, t in spent.items()]
    measured += [Measurement(f"{n}, p99 on the wall", "ms", w[int(0.99 * CALLS)], w[int(0.99 * CALLS)]) for n, w in walls.items()]
    measured.append(Measurement.of(limit.NAME, limit.least(products, limit.flops(lambda: guard(rows))), unit="ms"))
    plain = spent["bare `session.run`"][0]
    return Record(
        "serving", f"Serving requests of {ROWS} rows", HOW, TURNS, measured,
        [
            Claim(f"times the bare call, {name}", spent[name][0] / plain, "at most", 2.0) for name in list(spent)[1:]
        ],
    )  # fmt: skip


def timed(call: Callable[[], object], calls: int) -> tuple[float, list[float]]:
    """Milliseconds of the processor per call, and each call's on the wall."""
    walls: list[float] = []
    start = time.process_time()
    for _ in range(calls):
        before = time.perf_counter()
        call()
        walls.append(1e3 * (time.perf_counter() - before))
    return 1e3 * (time.process_time() - start) / calls, walls


def npy(x: NDArray[Any]) -> tuple[bytes, str]:
    """A body as numpy writes it."""
    file = io.BytesIO()
    np.save(file, x)
    return file.getvalue(), "application/x-npy"


def text(x: NDArray[Any]) -> tuple[bytes, str]:
    """A body in JSON."""
    return json.dumps({"inputs": x.tolist()}).encode(), "application/json"


class Server:
    """A server process; it is told to end when the block does."""

    def __init__(self, path: Path) -> None:
        environment = os.environ | {"PYTHONPATH": str(Path(offmap.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
        words = [sys.executable, "-m", "offmap", "serve", str(path), "--port", "0"]
        self.process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment)

    def __enter__(self) -> Server:
        assert self.process.stdout is not None
        found = re.search(r"http://([\d.]+):(\d+)", self.process.stdout.readline())
        assert found is not None
        self.address = found[1], int(found[2])
        return self

    def __exit__(self, *_: object) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.communicate(timeout=30)

    def spent(self) -> float:
        """Milliseconds of the processor so far."""
        words = Path(f"/proc/{self.process.pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        return 1e3 * (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")

    def asked(self, body: bytes, kind: str, calls: int = CALLS) -> tuple[float, list[float]]:
        """Milliseconds of the server's processor per request, and each request's on the wall."""
        start, walls = self.spent(), self._ask(body, kind, calls)
        return (self.spent() - start) / calls, walls

    def crowded(self, body: bytes, kind: str) -> tuple[float, list[float]]:
        """The same from several clients at once."""
        start = self.spent()
        with ThreadPoolExecutor(CLIENTS) as pool:
            walls = [
                wall for each in pool.map(lambda _: self._ask(body, kind, CALLS // CLIENTS), range(CLIENTS)) for wall in each
            ]
        return (self.spent() - start) / CALLS, walls

    def _ask(self, body: bytes, kind: str, calls: int) -> list[float]:
        connection = http.client.HTTPConnection(*self.address, timeout=30)
        walls: list[float] = []
        for _ in range(calls):
            before = time.perf_counter()
            connection.request("POST", "/score", body, {"Content-Type": kind})
            result = connection.getresponse()
            told = result.read()
            assert result.status == 200, told
            walls.append(1e3 * (time.perf_counter() - before))
        connection.close()
        return walls
