"""What scoring needs beyond its inputs and its result: the peak of fresh processes."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

import offmap
from offmap.integrations.mlp import mlp
from offmap.posterior.noise import generator
from offmap_bench.speed import subject
from offmap_bench.speed.record import Claim, Measurement, Record

CHUNK = 32.0
"""Megabytes by which peaks may differ: about what a guard holds of stacked outputs at once (`guarding.guard.OUTPUT_NUMBERS`)."""

CASES = [
    ("stream", 10_000, 50), ("stream", 100_000, 50), ("stream", 1_000_000, 50),
    ("tensor", 100_000, 50), ("tensor", 1_000_000, 50),
    ("tensor", 10_000, 500), ("tensor", 10_000, 2_000),
]  # fmt: skip

HOW = """Peak resident memory of a fresh process that loads a guard and scores, less what it held before scoring, less the result;
inputs exist before, or are made batch by batch (a stream: a DataLoader with batches of 10,000 rows). A chunk
of stacked outputs with what scoring makes of it may take 32 MB more or less; growth is from the lowest to the highest run."""


class Lazy(IterableDataset[Tensor]):
    """Rows made when they are asked for."""

    def __init__(self, rows: int, batch: int = 10_000) -> None:
        self.rows, self.batch = rows, batch

    def __iter__(self) -> Iterator[Tensor]:
        source = generator("offmap_bench.speed", "stream")
        for _ in range(self.rows // self.batch):
            yield torch.randn(self.batch, subject.FEATURES, generator=source)


def run(rounds: int = 2) -> Record:
    """One process a case."""
    with tempfile.TemporaryDirectory() as folder:
        subject.fitted().save(Path(folder, "guard"))
        torch.save(subject.net().state_dict(), Path(folder, "net"))
        peaks = {case: [_spawn(folder, case) for _ in range(rounds)] for case in CASES}
    measurements = [
        Measurement(f"{rows:,} rows ({form}), {draws} draws", "MB", min(found), statistics.median(found))
        for (form, rows, draws), found in peaks.items()
    ]

    def growth(small: tuple[str, int, int], large: tuple[str, int, int]) -> float:
        return max(peaks[large]) - min(peaks[small])  # the allocator's luck varies: take the worst

    return Record(
        "memory", "Memory while scoring", HOW, rounds, measurements,
        [
            Claim("MB more for 1,000,000 rows than for 10,000, streamed", growth(CASES[0], CASES[2]), "at most", CHUNK),
            Claim("MB more for 1,000,000 rows than for 100,000, in a tensor", growth(CASES[3], CASES[4]), "at most", CHUNK),
            Claim("MB more for 2,000 draws than for 500", growth(CASES[5], CASES[6]), "at most", CHUNK),
        ],
    )  # fmt: skip


def _spawn(folder: str, case: tuple[str, int, int]) -> float:
    command = [sys.executable, "-m", "offmap_bench.speed.memory", folder, *map(str, case)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def peak(folder: str, form: str, rows: int, draws: int) -> float:
    """Megabytes that scoring adds to this process at its highest."""
    torch.set_num_threads(1)
    net = mlp(subject.FEATURES, subject.OUTPUTS, hidden=subject.HIDDEN)
    net.load_state_dict(torch.load(Path(folder, "net")))
    guard = replace(offmap.load(Path(folder, "guard"), net), draws=draws)
    inputs = DataLoader(Lazy(rows), batch_size=None) if form == "stream" else torch.randn(rows, subject.FEATURES)
    before = highest(afresh=True)
    result = guard.score(inputs)
    return highest() - before - result.numel() * result.element_size() / 1e6


def highest(*, afresh: bool = False) -> float:
    """The high-water mark of resident memory in megabytes, after lowering it to what is held now when `afresh`.

    `ru_maxrss` is the same mark, but a child starts with its parent's and importing torch raises it: what scoring adds
    would drown.
    """
    if afresh:
        Path("/proc/self/clear_refs").write_text("5")
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 / 1e6 for line in status if line.startswith("VmHWM:"))


if __name__ == "__main__":
    print(json.dumps(peak(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))))
