"""Themes of memory, in fresh processes: what scoring needs beyond inputs and result, and a model of 25 million weights."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

import offmap
from offmap.integrations.nets import mlp
from offmap.posterior.predictive import Stochastic
from offmap.random import generator
from offmap_bench.speed import subjects as on
from offmap_bench.speed.measure import Claim, Measurement, Record, once, peak_memory

CHUNK = 32.0
"""Megabytes by which peaks may differ: about what a guard holds of stacked outputs at once."""

CASES = [
    ("stream", 10_000, 50), ("stream", 100_000, 50), ("stream", 1_000_000, 50),
    ("tensor", 100_000, 50), ("tensor", 1_000_000, 50),
    ("tensor", 10_000, 500), ("tensor", 10_000, 2_000),
]  # fmt: skip
GROWTH = {
    "MB more for 1,000,000 rows than for 10,000, streamed": (CASES[0], CASES[2]),
    "MB more for 1,000,000 rows than for 100,000, in a tensor": (CASES[3], CASES[4]),
    "MB more for 2,000 draws than for 500": (CASES[5], CASES[6]),
}


def memory(rounds: int = 2) -> Record:
    with tempfile.TemporaryDirectory() as folder:
        on.fit_guard().save(Path(folder, "guard"))
        torch.save(on.trained_net().state_dict(), Path(folder, "net"))
        peaks = {case: [_spawn("score_rows", folder, *map(str, case)) for _ in range(rounds)] for case in CASES}
    measured = [
        Measurement(f"{rows:,} rows ({form}), {draws} draws", "MB", min(mb), statistics.median(mb))
        for (form, rows, draws), mb in peaks.items()
    ]
    growth = {what: max(peaks[large]) - min(peaks[small]) for what, (small, large) in GROWTH.items()}  # the allocator's worst
    return Record("memory", rounds, measured, [Claim(what, mb, "at most", CHUNK) for what, mb in growth.items()])


class Stream(IterableDataset[Tensor]):
    def __init__(self, rows: int, batch: int = 10_000) -> None:
        self.rows, self.batch = rows, batch

    def __iter__(self) -> Iterator[Tensor]:
        source = generator("benchmarks", "stream")
        for _ in range(self.rows // self.batch):
            yield torch.randn(self.batch, on.FEATURES, generator=source)


def score_rows(folder: str, form: str, rows: str, draws: str) -> float:
    """Megabytes that scoring adds to this process at its highest."""
    net = mlp(on.FEATURES, on.OUTPUTS, hidden=on.HIDDEN)
    net.load_state_dict(torch.load(Path(folder, "net")))
    guard = replace(offmap.load(Path(folder, "guard"), net), draws=int(draws))
    inputs = DataLoader(Stream(int(rows)), batch_size=None) if form == "stream" else torch.randn(int(rows), on.FEATURES)
    before = peak_memory(reset=True)
    scores = guard.score(inputs)
    return peak_memory() - before - scores.numel() * scores.element_size() / 1e6


class Skip(nn.Sequential):
    def forward(self, input: Tensor) -> Tensor:
        return torch.relu(input + super().forward(input))


def wide() -> nn.Sequential:
    """24 million weights; two layers of 5,000 inputs, which is above the limit of a full basis."""
    return nn.Sequential(nn.Linear(5_000, 2_400), nn.ReLU(), nn.Linear(2_400, 5_000), nn.ReLU(), nn.Linear(5_000, 10))


def convolutions() -> nn.Sequential:
    """24 million weights in ten 3 × 3 convolutions of 512 channels: a fan-in of 4,608."""

    def layer() -> list[nn.Module]:
        return [nn.Conv2d(512, 512, 3, padding=1, bias=False), nn.BatchNorm2d(512), nn.ReLU()]

    first, blocks = nn.Conv2d(3, 512, 3, padding=1), [Skip(*layer(), *layer()) for _ in range(5)]
    return nn.Sequential(first, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


ROWS, DRAWS = 64, 4
SUBJECTS = {
    "wide": on.Subject("MLP 5000-2400-5000-10", wide, (5_000,), ROWS),
    "conv": on.Subject("ten 3 × 3 convolutions of 512 channels", convolutions, (3, 8, 8), ROWS),
    "encoder": on.Subject("Transformer, 8 layers of 512", lambda: on.Encoder(512, heads=8, layers=8), (16, 16), ROWS),
}


def large(rounds: int = 1) -> Record:
    """One process for every fit and every scoring; memory counts in copies of the weights, beyond the stored bases."""
    result = Record("large", rounds, [])
    with tempfile.TemporaryDirectory() as folder:
        for key, subject in SUBJECTS.items():
            for action in ("fit", "score"):
                peak, weights, bases, chunk = _spawn("fit_or_score", action, key, str(Path(folder, key)))
                sizes = {"the weights": weights, "the bases": bases} if action == "fit" else {}
                sizes[f"peak of `{action}`"] = peak
                result.measurements.extend(once(f"{subject.name}: {part}", "MB", size) for part, size in sizes.items())
                what, copies = f"{subject.name}, `{action}`: copies of the weights", (peak - bases) / weights
                result.claims.append(Claim(what, copies, "at most", chunk + 3))
                print(what, copies, flush=True)
    return result


def fit_or_score(action: str, name: str, path: str) -> tuple[float, float, float, int]:
    """Megabytes that a fit, or scores of a guard of an earlier process, add; of weights and of bases; and the chunk size."""
    net, x = SUBJECTS[name].net(), SUBJECTS[name].inputs(ROWS)
    net(x[:2])
    data = (torch.randn(40, 300), torch.arange(40) % 2)
    offmap.fit(nn.Linear(300, 2), data, data, solver="closed-form", draws=2, risk_draws=2)  # what torch sets up once
    before = peak_memory(reset=True)
    if action == "fit":
        data = (x, torch.arange(len(x)) % 10)  # targets do not matter
        guard = offmap.fit(net, data, data, solver="closed-form", params="all", draws=DRAWS, risk_draws=DRAWS, progress=False)
    else:
        guard = offmap.load(path, net)
        peak_memory(reset=True)  # after the peak of loading
        guard.score(x)
    after = peak_memory()
    if action == "fit":
        guard.save(path)
    assert isinstance(guard.predictive, Stochastic)
    state = guard.predictive.q.state_dict()
    bases = sum(t.nbytes for n, t in state.items() if not n.startswith(("mean.", "raw_scale.", "fixed.")))
    weights = sum(p.nbytes for p in net.parameters())
    return after - before, weights / 1e6, bases / 1e6, guard.predictive.model.chunk_size


def _spawn(function: str, *arguments: str) -> Any:
    """Run one of this module's functions in a process of its own; what it prints at last, as JSON.

    In `fit_or_score` malloc gives freed memory back at once: left to itself, glibc keeps freed blocks of up to 32 MB.
    """
    trim = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"} if function == "fit_or_score" else {}
    command = [sys.executable, "-m", "offmap_bench.speed.memory", function, *arguments]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=os.environ | trim)
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps({"score_rows": score_rows, "fit_or_score": fit_or_score}[sys.argv[1]](*sys.argv[2:])))
