"""The models and the data that themes measure: one trained MLP on a synthetic table, and untrained models of other kinds."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor, nn

import offmap
from offmap.integrations.nets import mlp
from offmap.likelihoods import Gaussian
from offmap.random import generator
from offmap_bench.nets.resnet import resnet

FEATURES, OUTPUTS, HIDDEN = 8, 2, (100, 100, 100)
DRAWS, ROWS, BATCH = 50, 10_000, 128
NAMES = [f"x{i}" for i in range(FEATURES)]

Pair = tuple[Tensor, Tensor]


@cache
def table() -> dict[str, Pair]:
    """3,600 rows to train on, 400 to validate, 10,000 to score; the target is smooth with noise 0.1."""
    sizes = {"train": 3_600, "valid": 400, "score": ROWS}
    source = generator("benchmarks", "table")
    x = torch.randn(sum(sizes.values()), FEATURES, generator=source)
    y = x[:, 0].sin() + x[:, 1] * x[:, 2] / 2 + 0.1 * torch.randn(len(x), generator=source)
    parts = zip(x.split(list(sizes.values())), y.split(list(sizes.values())), strict=True)
    return dict(zip(sizes, parts, strict=True))


def descend(net: nn.Module, steps: int, source: torch.Generator, penalty: Callable[[], Any] = lambda: 0.0) -> nn.Module:
    """Train with Adam on the Gaussian negative log-likelihood plus a penalty."""
    x, y = table()["train"]
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    for _ in range(steps):
        rows = torch.randint(len(x), (BATCH,), generator=source)
        loss = Gaussian().nll(net(x[rows]).unsqueeze(0), y[rows]).mean() + penalty()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return net


@cache
def trained_net(seed: int = 0) -> nn.Sequential:
    """An MLP 8-100-100-100-2 after 300 steps, which is enough to measure speed."""
    net = mlp(FEATURES, OUTPUTS, hidden=HIDDEN, seed=seed)
    descend(net, 300, generator("benchmarks", "order", seed))
    return net.eval()


def fit_guard(solver: Literal["closed-form", "refine"] = "closed-form", *, score: str = "default") -> offmap.Guard:
    data = table()
    return offmap.fit(trained_net(), data["train"], data["valid"], solver=solver, score=score, draws=DRAWS, progress=False)


_seeds = itertools.count(1)


def reseed(guard: offmap.Guard, **changes: Any) -> offmap.Guard:
    """The guard with a seed it never had, so that nothing drawn is cached."""
    return replace(guard, seed=next(_seeds), **changes)


class Encoder(nn.Module):
    """A Transformer encoder over vectors of 16 numbers, averaged and classified."""

    def __init__(self, size: int, *, heads: int, layers: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(size, heads, dim_feedforward=4 * size, batch_first=True)
        self.embed = nn.Linear(16, size)
        self.body = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(size, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.embed(x)).mean(1))


def conv1d(inputs: int, *widths: int) -> nn.Sequential:
    """Convolutions of width three with GroupNorm and ReLU, averaged and classified."""
    layers: list[nn.Module] = []
    for before, after in zip((inputs, *widths), widths, strict=False):
        layers += [nn.Conv1d(before, after, 3, padding=1), nn.GroupNorm(4, after), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(widths[-1], 10))


@dataclass(frozen=True)
class Subject:
    """A model (`make`), the shape of one row of its inputs, and so many `rows` that a pass takes a second or so."""

    name: str
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    rows: int

    def net(self) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return self.make().eval().requires_grad_(False)

    def inputs(self, rows: int) -> Tensor:
        return torch.randn(rows, *self.shape, generator=generator("benchmarks", self.name))


MLP = Subject("MLP 8-100-100-100-2", lambda: mlp(8, 2), (8,), 10_240)
CONV1D = Subject("Conv1d 8-32-64, 64 places", lambda: conv1d(8, 32, 64), (8, 64), 2_048)
SMALL_CONV1D = Subject("Conv1d 4-8-8, 16 places", lambda: conv1d(4, 8, 8), (4, 16), 10_240)
RESNET = Subject("ResNet-20, 32 × 32 images", lambda: resnet(10), (3, 32, 32), 1_024)
TRANSFORMER = Subject("Transformer, 2 layers of 128, 32 tokens", lambda: Encoder(128, heads=4, layers=2), (32, 16), 1_024)


@torch.no_grad()
def run_passes(net: nn.Module, x: Tensor, batch: int, times: int = 1) -> None:
    for _ in range(times):
        for part in x.split(batch):
            net(part)
