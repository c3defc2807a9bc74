"""Models made of Linear and Bilinear layers: stacks, norms, sharing, dtypes."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.case import Case, Through


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 8, bias=False), nn.ReLU(), nn.Linear(8, 2))


def build_nested() -> nn.Module:
    inner = nn.Sequential(nn.Sequential(nn.Linear(3, 5), nn.GELU()), nn.Identity(), nn.Linear(5, 4))
    return nn.Sequential(inner, nn.Sequential(nn.SiLU(), nn.Linear(4, 2, bias=False)))


def tanh_mlp() -> nn.Module:
    return Through(lambda s, x: s.b(s.a(x).tanh()), a=nn.Linear(3, 6), b=nn.Linear(6, 2))


def shared_activation() -> nn.Module:
    act = nn.Tanh()
    return nn.Sequential(nn.Linear(3, 4), act, nn.Linear(4, 4), act, nn.Linear(4, 2))


def activation_first() -> nn.Module:
    return nn.Sequential(nn.ReLU(), nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


def width_one() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 1), nn.Tanh(), nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 2))


def layernorm() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 6), nn.LayerNorm(6), nn.GELU(), nn.Linear(6, 2))


def rmsnorm() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 6), nn.RMSNorm(6), nn.SiLU(), nn.Linear(6, 2))


def bilinear() -> nn.Module:
    return Through(lambda s, x, y: s.b(s.a(x, y).tanh(), x), a=nn.Bilinear(3, 2, 4, bias=False), b=nn.Bilinear(4, 3, 2))


def residual() -> nn.Module:
    def forward(s: Any, x: Tensor) -> Tensor:
        h = s.stem(x)
        return s.head(h + s.norm(s.up(F.gelu(s.down(h)))))

    return Through(
        forward, stem=nn.Linear(3, 5), down=nn.Linear(5, 2), up=nn.Linear(2, 5), norm=nn.LayerNorm(5), head=nn.Linear(5, 2)
    )


def build_tied() -> nn.Module:
    net = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2))
    net[2].weight = net[0].weight
    return net


def build_repeated() -> nn.Module:
    layer = nn.Linear(3, 3)
    return nn.Sequential(layer, nn.Tanh(), layer, nn.Tanh(), nn.Linear(3, 2))


def siamese() -> nn.Module:
    body = nn.Sequential(nn.Linear(3, 4), nn.Tanh())
    return Through(lambda s, x, y: s.head((s.body(x) - s.body(y)).square()), body=body, head=nn.Linear(4, 2))


def autoencoder() -> nn.Module:
    def forward(s: Any, x: Tensor) -> Tensor:
        return s.head(F.linear(s.code(x).tanh(), s.code.weight.mT))

    return Through(forward, code=nn.Linear(3, 4), head=nn.Linear(3, 2))


def lora() -> nn.Module:
    """A frozen layer with a trained detour of low rank."""
    net = Through(
        lambda s, x: s.head((s.base(x) + s.back(s.there(x))).tanh()), base=nn.Linear(3, 4),
        there=nn.Linear(3, 2, bias=False), back=nn.Linear(2, 4, bias=False), head=nn.Linear(4, 2),
    )  # fmt: skip
    net.base.requires_grad_(False)
    return net


def branching() -> nn.Module:
    def forward(s: Any, x: Tensor) -> Tensor:
        h = s.a(x)
        return s.b(h.tanh() if s.a.bias.sum() > 0 else h.sigmoid())

    return Through(forward, a=nn.Linear(3, 4), b=nn.Linear(4, 2))


def dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 2)).train()


def buffers() -> nn.Module:
    net = Through(
        lambda s, x: s.b(F.relu(s.a((x - s.centre) / s.spread))) + s.offset,
        a=nn.Linear(3, 4), b=nn.Linear(4, 2), centre=torch.randn(3), spread=torch.rand(3) + 0.5,
    )  # fmt: skip
    net.register_buffer("offset", torch.randn(2), persistent=False)
    return net


def partly_frozen() -> nn.Module:
    """A model as fine-tuning leaves it: the body frozen and in evaluation mode, the head not."""
    net = nn.Sequential(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU()), nn.Linear(4, 2)).train()
    net[0].eval().requires_grad_(False)
    return net


def awkward_names() -> nn.Module:
    def forward(s: Any, x: Tensor) -> Tensor:
        return s.values(s.keys(x).tanh()) * s.items

    return Through(forward, keys=nn.Linear(3, 4), values=nn.Linear(4, 2), items=nn.Parameter(torch.rand(2) + 0.5))


def halves(x: Tensor) -> tuple[Tensor, Tensor]:
    return x[:, :3], x[:, 3:]


CASES = (
    Case("linear", lambda: nn.Linear(3, 2), shows="the root is one Linear"),
    Case("linear_no_bias", lambda: nn.Linear(4, 2, bias=False), (4,), shows="the root is one matrix"),
    Case("mlp", mlp, shows="Linear and ReLU, one layer without bias"),
    Case("nested", build_nested, shows="Sequential within Sequential, GELU, SiLU"),
    Case("tanh_mlp", tanh_mlp, shows="a forward of its own"),
    Case("shared_activation", shared_activation, shows="one activation in two places"),
    Case("activation_first", activation_first, shows="no matrix multiplies the raw input"),
    Case("width_one", width_one, shows="layers of width one"),
    Case("layernorm", layernorm, shows="LayerNorm"),
    Case("rmsnorm", rmsnorm, shows="RMSNorm"),
    Case(
        "root_bilinear", lambda: nn.Bilinear(3, 2, 2), (5,), vmap=False, wrap=halves, shows="the root is one Bilinear; two inputs"
    ),
    Case("bilinear", bilinear, (5,), vmap=False, wrap=halves, shows="Bilinear, with and without bias"),
    Case("residual", residual, shows="a bottleneck around a skip"),
    Case("tied", build_tied, shows="one weight in two layers"),
    Case("repeated", build_repeated, shows="one layer in two places"),
    Case("siamese", siamese, (6,), wrap=halves, shows="one body called on two inputs"),
    Case("autoencoder", autoencoder, plain={"code.weight": "two different axes"}, shows="a matrix and its transpose"),
    Case("lora", lora, shows="a frozen layer with a low-rank detour"),
    Case("branching", branching, vmap=False, shows="what it computes depends on the values of its weights"),
    Case("dropout", dropout, shows="dropout, handed over in training mode"),
    Case("buffers", buffers, shows="buffers that matter, one not persistent"),
    Case("partly_frozen", partly_frozen, shows="frozen parameters, BatchNorm1d, mixed modes"),
    Case("awkward_names", awkward_names, shows="layers called `keys`, `values`, `items`"),
    Case("float64", lambda: mlp().double(), dtype=torch.float64, shows="a float64 model"),
    Case("bfloat16", lambda: mlp().bfloat16(), dtype=torch.bfloat16, shows="a bfloat16 model"),
)
