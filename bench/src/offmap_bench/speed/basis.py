"""What the pass that finds the SVD basis costs against one plain pass over the same data."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch

from offmap.posterior.construct import centre, observe
from offmap_bench.speed import limit, peer
from offmap_bench.speed.architectures import batches, plain
from offmap_bench.speed.models import CONV1D, MLP, RESNET, TRANSFORMER, Subject
from offmap_bench.speed.race import Timing, race
from offmap_bench.speed.record import Claim, Measurement, Record

SUBJECTS = tuple(
    replace(subject, rows=rows) for subject, rows in ((MLP, 102_400), (CONV1D, 20_480), (RESNET, 4_096), (TRANSFORMER, 8_192))
)
"""As many rows as data sets have: the first few thousand cost more, as all of their inputs are counted."""
BATCH = 128

HOW = """`observe` as a fit calls it (second moments of what every matrix meets, then their eigenvectors; in batches of at least
128 rows, more where activations are small), against one plain pass of the model over the same rows in batches of 128 without
gradients. The time of the `eigh`s is shown apart and is not part of the pass. The bare GEMM is of the basis pass, whose moments
are float64 products, at half the rate. `fit_svd` is maxwent's, `eigh` included, in batches of 128; it knows linear layers."""


def run(rounds: int = 3) -> Record:
    """Model by model, all passes in turns."""
    measurements: list[Measurement] = []
    claims: list[Claim] = []
    for subject in SUBJECTS:
        found = passes(subject, rounds)
        ratio, eigh = found["basis pass"].best / found["plain pass"].best, found["`eigh`"].best
        rows = f"{subject.name}, {subject.rows:,} rows"
        measurements += [Measurement.of(f"{rows}: {what}", timing, unit="ms") for what, timing in found.items()]
        claims.append(Claim(f"{subject.name}: basis pass, times a plain pass", ratio, "at most", 1.5))
        print(f"{subject.name}: {ratio:.2f}, eigh {eigh:.3f} s", flush=True)
    return Record("basis", "Finding the basis", HOW, rounds, measurements, claims)


def passes(subject: Subject, rounds: int) -> dict[str, Timing]:
    """The plain pass, the basis pass without `eigh`, `eigh`, both, and what they are compared with."""
    net, x = subject.net(), subject.inputs(subject.rows)
    at, eigh = centre(net), Timing()

    def basis() -> None:
        with watched("eigh", eigh):
            observe(at, lambda rows: batches(x, max(BATCH, rows)), rotated=True)

    contestants = {"plain": lambda: plain(net, x, BATCH), "basis": basis, "gemm": limit.product()}
    if subject.name == MLP.name:
        contestants["peer"] = lambda: peer.around(net).fit_svd(x.numpy(), batch_size=BATCH)
    timings = race(contestants, rounds=rounds)
    both, apart = timings["basis"], Timing(eigh.cpu[-rounds:], eigh.wall[-rounds:])  # the first turn was not measured
    rest = [[a - b for a, b in zip(whole, part, strict=True)] for whole, part in ((both.cpu, apart.cpu), (both.wall, apart.wall))]
    return {
        "plain pass": timings["plain"],
        "basis pass": Timing(*rest),
        "`eigh`": apart,
        "basis pass and `eigh`": both,
        limit.NAME: limit.least(timings["gemm"], limit.flops(basis)),
        **({"maxwent, `fit_svd`": timings["peer"]} if "peer" in timings else {}),
    }


@contextmanager
def watched(name: str, spent: Timing) -> Generator[None]:
    """The time that a function of `torch.linalg` takes is one more turn of `spent`."""
    function = getattr(torch.linalg, name)
    spent.cpu.append(0.0)
    spent.wall.append(0.0)

    def timed(*args: Any, **kwargs: Any) -> Any:
        cpu, wall = time.process_time(), time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            spent.cpu[-1] += time.process_time() - cpu
            spent.wall[-1] += time.perf_counter() - wall

    with mock.patch.object(torch.linalg, name, timed):
        yield
