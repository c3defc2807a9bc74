"""What the pass that finds the SVD basis costs against one plain pass over the same data."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch

from benchmarks.architectures import batches, plain
from benchmarks.hosts import CONV1D, MLP, RESNET, TRANSFORMER, Subject
from benchmarks.race import Timing, race
from benchmarks.record import Claim, Measurement, Record
from offmap.core.construct import centre, observe

SUBJECTS = tuple(
    replace(subject, rows=rows) for subject, rows in ((MLP, 102_400), (CONV1D, 20_480), (RESNET, 4_096), (TRANSFORMER, 8_192))
)
"""As many rows as data sets have: the first few thousand cost more, as all of their inputs are counted."""
BATCH = 128

HOW = """`observe` as a fit calls it (second moments of what every matrix meets, then their eigenvectors; in batches of at least
128 rows, more where activations are small), against one plain pass of the host over the same rows in batches of 128 without
gradients. The time of the `eigh`s is shown apart and is not part of the pass."""


def run(rounds: int = 3) -> Record:
    """Host by host, both passes in turns."""
    measurements: list[Measurement] = []
    claims: list[Claim] = []
    for subject in SUBJECTS:
        simple, full, eigh = passes(subject, rounds)
        ratio = full.best / simple.best
        measurements += [
            Measurement.of(f"{subject.name}, {subject.rows:,} rows: plain pass", simple, unit="ms"),
            Measurement.of(f"basis pass ({ratio:.2f} times)", full, unit="ms"),
            Measurement.of("`eigh`", eigh, unit="ms"),
        ]
        claims.append(Claim(f"{subject.name}: basis pass, times a plain pass", ratio, "at most", 1.5))
        print(f"{subject.name}: {ratio:.2f}, eigh {eigh.best:.3f} s", flush=True)
    return Record("basis", "Finding the basis", HOW, rounds, measurements, claims)


def passes(subject: Subject, rounds: int) -> tuple[Timing, Timing, Timing]:
    """The plain pass, the basis pass without `eigh`, and `eigh`."""
    net, x = subject.net(), subject.inputs(subject.rows)
    at = centre(net)
    with watched("eigh") as eigh:

        def basis() -> None:
            eigh.cpu.append(0.0)
            eigh.wall.append(0.0)
            observe(at, lambda rows: batches(x, max(BATCH, rows)), rotated=True)

        timings = race({"plain": lambda: plain(net, x, BATCH), "basis": basis}, rounds=rounds)
    apart = Timing(eigh.cpu[-rounds:], eigh.wall[-rounds:])  # the first turn was not measured
    both = timings["basis"]
    rest = [[a - b for a, b in zip(whole, part, strict=True)] for whole, part in ((both.cpu, apart.cpu), (both.wall, apart.wall))]
    return timings["plain"], Timing(*rest), apart


@contextmanager
def watched(name: str) -> Generator[Timing]:
    """The time that a function of `torch.linalg` takes is added to the last turn."""
    spent, function = Timing(), getattr(torch.linalg, name)

    def timed(*args: Any, **kwargs: Any) -> Any:
        cpu, wall = time.process_time(), time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            spent.cpu[-1] += time.process_time() - cpu
            spent.wall[-1] += time.perf_counter() - wall

    with mock.patch.object(torch.linalg, name, timed):
        yield spent
