"""What a model of 25 million weights needs to be fitted and to be scored with: the peaks of fresh processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

import offmap
from offmap.posterior.predictive import Stochastic
from offmap_bench.speed.memory import highest
from offmap_bench.speed.models import Encoder, Subject
from offmap_bench.speed.record import Claim, Measurement, Record

ROWS, DRAWS = 64, 4
NOT_BASES = ("mean.", "raw_scale.", "fixed.")

HOW = """Peak resident memory of a fresh process that fits (closed form, SVD basis) or scores, above what it held with the model
and 64 rows alone: a guard's own copies count, the stored bases do not. In copies of the model's weights; a
guard may take three, and one for every draw of a chunk. {draws} draws; activations and the moments of the largest layers are in
the numbers.
The processes run with `MALLOC_MMAP_THRESHOLD_` and `MALLOC_TRIM_THRESHOLD_` at 65536, so that memory that was given back is not
counted: left to itself, glibc keeps freed blocks of up to 32 MB, which adds one to two copies here."""

ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


class Peak(NamedTuple):
    """Megabytes: the peak above the model, the model's weights, the stored bases; and the draws of a chunk."""

    peak: float
    weights: float
    bases: float
    chunk: int

    @property
    def copies(self) -> float:
        """Copies of the weights that the peak amounts to beyond the bases."""
        return (self.peak - self.bases) / self.weights


def wide() -> nn.Sequential:
    """24 million weights; two layers of 5,000 inputs, which is above the limit of a full basis."""
    return nn.Sequential(nn.Linear(5_000, 2_400), nn.ReLU(), nn.Linear(2_400, 5_000), nn.ReLU(), nn.Linear(5_000, 10))


class Skip(nn.Sequential):
    """Layers and a way around them."""

    def forward(self, input: Tensor) -> Tensor:
        """(B, C, h, w), kept."""
        return torch.relu(input + super().forward(input))


def convolutions() -> nn.Sequential:
    """24 million weights in ten 3 × 3 convolutions of 512 channels: a fan-in of 4,608."""
    widths = (512,) * 3
    layers = [nn.Conv2d(3, 512, 3, padding=1)]
    blocks = [
        Skip(*(p for a, b in pairwise(widths) for p in (nn.Conv2d(a, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU())))
        for _ in range(5)
    ]
    return nn.Sequential(*layers, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


SUBJECTS = {
    "wide": Subject("MLP 5000-2400-5000-10", wide, (5_000,), ROWS),
    "conv": Subject("ten 3 × 3 convolutions of 512 channels", convolutions, (3, 8, 8), ROWS),
    "encoder": Subject("Transformer, 8 layers of 512", lambda: Encoder(512, heads=8, layers=8), (16, 16), ROWS),
}


def run(rounds: int = 1, names: Sequence[str] = tuple(SUBJECTS)) -> Record:
    """A process for every fit and every scoring."""
    peaks: dict[tuple[str, str], Peak] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            for action in ("fit", "score"):
                peaks[name, action] = found = _spawn(action, name, str(Path(folder, name)))
                print(f"{name}, {action}: {found}, {found.copies:.2f} copies", flush=True)
    measurements: list[Measurement] = []
    claims: list[Claim] = []
    for (name, action), found in peaks.items():
        what = SUBJECTS[name].name
        if action == "fit":
            sizes = {"the weights": found.weights, "the bases": found.bases}
            measurements += [Measurement(f"{what}: {part}", "MB", size, size) for part, size in sizes.items()]
        measurements.append(Measurement(f"{what}: peak of `{action}`", "MB", found.peak, found.peak))
        claims.append(Claim(f"{what}, `{action}`: copies of the weights", found.copies, "at most", found.chunk + 3))
    return Record("large", "Memory of a model with 25 million weights", HOW.format(draws=DRAWS), rounds, measurements, claims)


def _spawn(action: str, name: str, path: str) -> Peak:
    command = [sys.executable, "-m", "offmap_bench.speed.large", action, name, path]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=os.environ | ENVIRONMENT)
    return Peak(*json.loads(done.stdout.splitlines()[-1]))


def peak(action: str, name: str, path: str) -> Peak:
    """Megabytes that fitting, or scoring with a guard of an earlier process, adds to this process at its highest."""
    torch.set_num_threads(1)
    net, x = SUBJECTS[name].net(), SUBJECTS[name].inputs(ROWS)
    net(x[:2])
    data = (torch.randn(40, 300), torch.arange(40) % 2)
    offmap.fit(nn.Linear(300, 2), data, data, solver="closed-form", draws=2, risk_draws=2)  # what torch sets up once
    before = highest(afresh=True)
    guard = ACTIONS[action](net, x, path)
    after = highest()
    if action == "fit":
        guard.save(path)
    assert isinstance(guard.predictive, Stochastic)
    q = guard.predictive.q.state_dict()
    bases = sum(t.nbytes for n, t in q.items() if not n.startswith(NOT_BASES))
    weights = sum(p.nbytes for p in net.parameters())
    return Peak(after - before, weights / 1e6, bases / 1e6, guard.predictive.model.chunk_size)


def fit(net: nn.Module, x: Tensor, path: str) -> offmap.Guard:
    """A guard around the net; targets do not matter."""
    data = (x, torch.arange(len(x)) % 10)
    return offmap.fit(net, data, data, solver="closed-form", params="all", draws=DRAWS, risk_draws=DRAWS, progress=False)


def score(net: nn.Module, x: Tensor, path: str) -> offmap.Guard:
    """The guard of a file, after its peak of loading, and scores of all rows."""
    guard = offmap.load(path, net)
    highest(afresh=True)
    guard.score(x)
    return guard


ACTIONS: dict[str, Callable[[nn.Module, Tensor, str], offmap.Guard]] = {"fit": fit, "score": score}


if __name__ == "__main__":
    print(json.dumps(peak(*sys.argv[1:4])))
