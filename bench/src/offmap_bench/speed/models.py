"""Models of several architectures, with rows to call them on; speed does not ask for trained weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from offmap.integrations.mlp import mlp
from offmap.posterior.noise import generator
from offmap_bench.nets.resnet import resnet


class Encoder(nn.Module):
    """A Transformer encoder over vectors of 16 numbers, averaged and classified."""

    def __init__(self, size: int, *, heads: int, layers: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(size, heads, dim_feedforward=4 * size, batch_first=True)
        self.embed = nn.Linear(16, size)
        self.body = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(size, 10)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, 16) -> (B, 10)."""
        return self.head(self.body(self.embed(x)).mean(1))


def conv1d(inputs: int, *widths: int) -> nn.Sequential:
    """Convolutions of three places with GroupNorm and ReLU, averaged and classified."""
    layers: list[nn.Module] = []
    for before, after in zip((inputs, *widths), widths, strict=False):
        layers += [nn.Conv1d(before, after, 3, padding=1), nn.GroupNorm(4, after), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(widths[-1], 10))


@dataclass(frozen=True)
class Subject:
    """`make` builds the model, `shape` is one row of its inputs, `rows` a data set that takes a second or so."""

    name: str
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    rows: int

    def net(self) -> nn.Module:
        """The same model every time."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return self.make().eval().requires_grad_(False)

    def inputs(self, rows: int) -> Tensor:
        """The same rows every time."""
        return torch.randn(rows, *self.shape, generator=generator("offmap_bench.speed", self.name))


MLP = Subject("MLP 8-100-100-100-2", lambda: mlp(8, 2), (8,), 10_240)
CONV1D = Subject("Conv1d 8-32-64, 64 places", lambda: conv1d(8, 32, 64), (8, 64), 2_048)
SMALL_CONV1D = Subject("Conv1d 4-8-8, 16 places", lambda: conv1d(4, 8, 8), (4, 16), 10_240)
RESNET = Subject("ResNet-20, 32 × 32 images", lambda: resnet(10), (3, 32, 32), 1_024)
TRANSFORMER = Subject("Transformer, 2 layers of 128, 32 tokens", lambda: Encoder(128, heads=4, layers=2), (32, 16), 1_024)
