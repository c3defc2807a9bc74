"""What the exported graph takes under ONNX Runtime, beside the guard that it came from."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

import offmap
from offmap.export.onnx import opened
from offmap_bench.speed import limit, subject
from offmap_bench.speed.race import race, repeated
from offmap_bench.speed.record import Claim, Measurement, Record

SIZES = {32: 100, 4_096: 1}
"""Rows of a call, and calls in a turn."""

HOW = f"""The guard has {subject.DRAWS} draws and the default score, which looks for neighbours among 3,600 training rows; its
graph answers the same: prediction, score and verdict. Both run on one thread (`intra_op_num_threads` of ONNX Runtime is 1), the
guard with its draws remembered, as they are frozen in the graph. Their products are the same, and so is the bare GEMM."""


def run(rounds: int = 5) -> Record:
    """Few rows and many, the graph and the guard in turns."""
    guard, measurements, claims = subject.fitted(), list[Measurement](), list[Claim]()
    with tempfile.TemporaryDirectory() as folder:
        session = opened(str(written(guard, Path(folder))))
        for rows, calls in SIZES.items():
            x = subject.table()["score"][0][:rows]
            turns = {"graph": repeated(calls, asking(session, x)), "guard": repeated(calls, lambda x=x: guard(x))}
            timings = race({**turns, "gemm": limit.product()}, rounds=rounds)
            least = limit.least(timings["gemm"], limit.flops(lambda x=x: guard(x)))
            measurements += [
                Measurement.of(f"{rows:,} rows: the graph, ONNX Runtime", timings["graph"], unit="ms", per=calls),
                Measurement.of(f"{rows:,} rows: `guard(x)`, torch", timings["guard"], unit="ms", per=calls),
                Measurement.of(f"{rows:,} rows: {limit.NAME}", least, unit="ms"),
            ]
            ratio = timings["graph"].best / timings["guard"].best
            claims.append(Claim(f"{rows:,} rows: times `guard(x)`", ratio, "at most", 1.0))
    return Record("export", "The exported graph", HOW, rounds, measurements, claims)


def written(guard: offmap.Guard, folder: Path) -> Path:
    """Its graph as a file."""
    return guard.export(folder / "g.onnx", subject.table()["valid"][0][:64]).path


def asking(session: Any, x: Tensor) -> Callable[[], object]:
    """One call of the graph."""
    feed = {"input": x.numpy()}
    return lambda: session.run(None, feed)
