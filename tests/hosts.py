"""A zoo of small hosts with inputs to call them on. All give two numbers per row: a mean and a log-variance, or two logits."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Case:
    """`build` makes the same host every time; `inputs(rows)` the same rows, of which fewer are the first of more."""

    name: str
    make: Callable[[], nn.Module]
    shape: tuple[int, ...] = (3,)
    vmap: bool = True
    wrap: Callable[[Tensor], Any] = lambda x: x
    dtype: torch.dtype = torch.float32
    whole: int | None = None  # inputs are whole numbers below this

    def build(self, member: int = 0) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(zlib.crc32(self.name.encode()) + member)
            return self.make()

    def inputs(self, rows: int = 12) -> Any:
        generator = torch.Generator().manual_seed(zlib.crc32(self.name.encode()))
        if self.whole is not None:
            return self.wrap(torch.stack([torch.randint(self.whole, self.shape, generator=generator) for _ in range(rows)]))
        # correlated columns of different size, so that no basis is the identity by chance
        x = torch.stack([torch.randn(self.shape, generator=generator) for _ in range(rows)]).to(self.dtype)
        return self.wrap(x + 0.5 * x.roll(1, dims=-1) * torch.linspace(0.2, 2.0, self.shape[-1], dtype=self.dtype))

    def data(self, rows: int = 12) -> tuple[Any, Tensor]:
        """Inputs, and targets to regress on."""
        generator = torch.Generator().manual_seed(1)
        return self.inputs(rows), torch.randn(rows, generator=generator, dtype=self.dtype)


class Through(nn.Module):
    """Layers as attributes and a forward of one's own."""

    def __init__(self, forward: Callable[..., Any], **layers: Any) -> None:
        super().__init__()
        self.function = forward
        for name, layer in layers.items():
            if isinstance(layer, Tensor) and not isinstance(layer, nn.Parameter):
                self.register_buffer(name, layer)
            else:
                setattr(self, name, layer)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 8, bias=False), nn.ReLU(), nn.Linear(8, 2))


def nested() -> nn.Module:
    inner = nn.Sequential(nn.Sequential(nn.Linear(3, 5), nn.GELU()), nn.Identity(), nn.Linear(5, 4))
    return nn.Sequential(inner, nn.Sequential(nn.SiLU(), nn.Linear(4, 2, bias=False)))


def tanh_mlp() -> nn.Module:
    return Through(lambda s, x: s.b(s.a(x).tanh()), a=nn.Linear(3, 6), b=nn.Linear(6, 2))


def shared_activation() -> nn.Module:
    act = nn.Tanh()
    return nn.Sequential(nn.Linear(3, 4), act, nn.Linear(4, 4), act, nn.Linear(4, 2))


def activation_first() -> nn.Module:
    return nn.Sequential(nn.ReLU(), nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


def conv1d() -> nn.Module:
    return nn.Sequential(
        nn.Conv1d(2, 4, 3, stride=2, padding=1), nn.ReLU(), nn.Conv1d(4, 3, 2, dilation=2, bias=False), nn.Tanh(),
        nn.Flatten(), nn.Linear(6, 2),
    )  # fmt: skip


def conv2d() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 3, (3, 2), stride=(1, 2), padding=(1, 0)), nn.Tanh(), nn.Conv2d(3, 2, 2, dilation=2, bias=False),
        nn.Tanh(), nn.Conv2d(2, 2, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2, 2),
    )  # fmt: skip


def conv3d() -> nn.Module:
    return nn.Sequential(
        nn.Conv3d(1, 2, (2, 3, 2), stride=(1, 1, 2), padding=(0, 1, 1), dilation=(2, 1, 1)), nn.Tanh(), nn.Flatten(),
        nn.Linear(36, 2),
    )  # fmt: skip


def batchnorm() -> nn.Module:
    net = nn.Sequential(
        nn.Conv2d(1, 3, 3, padding="same", bias=False), nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 2, 3, stride=2),
        nn.BatchNorm2d(2), nn.Tanh(), nn.Flatten(), nn.Linear(8, 2),
    )  # fmt: skip
    net.train()
    for _ in range(3):
        net(torch.randn(8, 1, 6, 6))
    return net


def layernorm() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 6), nn.LayerNorm(6), nn.GELU(), nn.Linear(6, 2))


def attention() -> nn.Module:
    def forward(s: Any, x: Tensor) -> Tensor:
        return s.head((x + s.attention(x, x, x, need_weights=False)[0]).mean(1))

    return Through(forward, attention=nn.MultiheadAttention(4, 2, batch_first=True), head=nn.Linear(4, 2))


def cross_attention() -> nn.Module:
    def forward(s: Any, x: Tensor, y: Tensor) -> Tensor:
        return s.head(s.attention(x, y, y, need_weights=False)[0].mean(1))

    return Through(forward, attention=nn.MultiheadAttention(4, 2, batch_first=True), head=nn.Linear(4, 2))


def transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(4, 2, dim_feedforward=6, batch_first=True)
    return Through(lambda s, x: s.head(s.layer(x).mean(1)), layer=layer, head=nn.Linear(4, 2))


def tied() -> nn.Module:
    net = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2))
    net[2].weight = net[0].weight
    return net


def repeated() -> nn.Module:
    """One layer in two places."""
    layer = nn.Linear(3, 3)
    return nn.Sequential(layer, nn.Tanh(), layer, nn.Tanh(), nn.Linear(3, 2))


def autoencoder() -> nn.Module:
    """One matrix, met along both of its axes: it has no single fan-in."""

    def forward(s: Any, x: Tensor) -> Tensor:
        return s.head(F.linear(s.code(x).tanh(), s.code.weight.mT))

    return Through(forward, code=nn.Linear(3, 4), head=nn.Linear(3, 2))


def bare() -> nn.Module:
    weight, bias = nn.Parameter(torch.randn(3, 5)), nn.Parameter(torch.randn(5))
    return Through(lambda s, x: s.head((x @ s.weight + s.bias).tanh()), weight=weight, bias=bias, head=nn.Linear(5, 2))


def lstm() -> nn.Module:
    return Through(lambda s, x: s.head(s.lstm(x)[0][:, -1]), lstm=nn.LSTM(2, 3, batch_first=True), head=nn.Linear(3, 2))


def branching() -> nn.Module:
    """What it computes depends on the values of its weights."""

    def forward(s: Any, x: Tensor) -> Tensor:
        h = s.a(x)
        return s.b(h.tanh() if s.a.bias.sum() > 0 else h.sigmoid())

    return Through(forward, a=nn.Linear(3, 4), b=nn.Linear(4, 2))


def width_one() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 1), nn.Tanh(), nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 2))


def dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 2)).train()


def buffers() -> nn.Module:
    net = Through(
        lambda s, x: s.b(F.relu(s.a((x - s.centre) / s.spread))) + s.offset,
        a=nn.Linear(3, 4), b=nn.Linear(4, 2), centre=torch.randn(3), spread=torch.rand(3) + 0.5,
    )  # fmt: skip
    net.register_buffer("offset", torch.randn(2), persistent=False)
    return net


def grouped() -> nn.Module:
    return nn.Sequential(nn.Conv1d(2, 4, 3, groups=2), nn.Tanh(), nn.ConvTranspose1d(4, 2, 2), nn.Flatten(), nn.Linear(10, 2))


def embedding() -> nn.Module:
    return Through(lambda s, x: s.head(s.table(x).mean(1).tanh()), table=nn.Embedding(7, 4), head=nn.Linear(4, 2))


def awkward_names() -> nn.Module:
    """Layers called like the methods of a mapping."""

    def forward(s: Any, x: Tensor) -> Tensor:
        return s.values(s.keys(x).tanh()) * s.items

    return Through(forward, keys=nn.Linear(3, 4), values=nn.Linear(4, 2), items=nn.Parameter(torch.rand(2) + 0.5))


def keywords() -> nn.Module:
    def forward(s: Any, *, tokens: Tensor, mask: Tensor) -> Any:
        return SimpleNamespace(logits=s.head((s.body(tokens) * mask.unsqueeze(-1)).tanh().sum(1)))

    return Through(forward, body=nn.Linear(2, 4), head=nn.Linear(4, 2))


def partly_frozen() -> nn.Module:
    """A host as fine-tuning leaves it: the body frozen and in evaluation mode, the head not."""
    net = nn.Sequential(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU()), nn.Linear(4, 2)).train()
    net[0].eval().requires_grad_(False)
    return net


ZOO: dict[str, Case] = {
    case.name: case
    for case in (
        Case("linear", lambda: nn.Linear(3, 2)),
        Case("mlp", mlp),
        Case("nested", nested),
        Case("tanh_mlp", tanh_mlp),
        Case("shared_activation", shared_activation),
        Case("activation_first", activation_first),
        Case("conv1d", conv1d, (2, 8)),
        Case("conv2d", conv2d, (2, 5, 6)),
        Case("conv3d", conv3d, (1, 4, 3, 4)),
        Case("batchnorm", batchnorm, (1, 6, 6)),
        Case("layernorm", layernorm),
        Case("attention", attention, (3, 4)),
        Case("cross_attention", cross_attention, (3, 4), wrap=lambda x: (x, x.flip(1)[:, :2])),
        Case("transformer", transformer, (3, 4)),
        Case("tied", tied),
        Case("repeated", repeated),
        Case("autoencoder", autoencoder),
        Case("bare", bare),
        Case("lstm", lstm, (4, 2), vmap=False),
        Case("branching", branching, vmap=False),
        Case("width_one", width_one),
        Case("float64", lambda: mlp().double(), dtype=torch.float64),
        Case("dropout", dropout),
        Case("buffers", buffers),
        Case("grouped", grouped, (2, 6)),
        Case("embedding", embedding, (5,), whole=7),
        Case("awkward_names", awkward_names),
        Case("keywords", keywords, (3, 2), wrap=lambda x: {"tokens": x, "mask": (x[..., 0] > -1).to(x)}),
        Case("partly_frozen", partly_frozen),
    )
}
