"""Models of one's own: bare parameters, parametrized weights, inputs and outputs of every form."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

from zoo.case import Case, Through, pair, weight


def bare() -> nn.Module:
    return Through(
        lambda s, x: s.head((x @ s.weight + s.bias).tanh()), weight=weight(3, 5), bias=nn.Parameter(torch.randn(5)),
        head=nn.Linear(5, 2),
    )  # fmt: skip


def functional() -> nn.Module:
    def forward(s: Any, x: Tensor) -> Tensor:
        return F.linear(F.linear(x, s.first, s.bias).tanh(), s.second)

    return Through(forward, first=weight(4, 3), bias=nn.Parameter(torch.randn(4)), second=weight(2, 4))


def build_left() -> nn.Module:
    """W x rather than x Wᵀ, with a parameter that is itself a transpose."""
    turned = nn.Parameter(torch.randn(4, 2).mT)
    return Through(lambda s, x: (s.b @ (s.a @ x.mT).tanh()).mT, a=weight(4, 3), b=turned)


def einsum() -> nn.Module:
    def forward(s: Any, x: Tensor) -> Tensor:
        return torch.einsum("bo,po->bp", torch.einsum("bti,io->bo", x, s.a).tanh(), s.b)

    return Through(forward, a=weight(3, 4), b=weight(2, 4))


def heads(product: Any) -> nn.Module:
    """Two heads with a matrix each."""

    def forward(s: Any, x: Tensor) -> Tensor:
        return s.head(product(x, s.weight).tanh().flatten(1))

    return Through(forward, weight=weight(2, 3, 4), head=nn.Linear(8, 2))


def split_and_merge() -> nn.Module:
    """Into heads and out of them again, by tensors of three axes."""

    def forward(s: Any, x: Tensor) -> Tensor:
        return torch.einsum("bho,hop->bp", torch.einsum("bi,iho->bho", x, s.split).tanh(), s.merge)

    return Through(forward, split=weight(3, 2, 4), merge=weight(2, 4, 2))


def inputs_by_heads(net: Any, x: Tensor) -> dict[str, Tensor]:
    return {"split": x, "merge": torch.einsum("bi,iho->bho", x, net.split).tanh().flatten(1)}


def experts() -> nn.Module:
    """Every expert reads every row."""

    def forward(s: Any, x: Tensor) -> Tensor:
        gate = s.gate(x).softmax(-1)
        return s.head(torch.einsum("beo,be->bo", torch.einsum("bi,eio->beo", x, s.weight).tanh(), gate))

    return Through(forward, weight=weight(2, 3, 4), gate=nn.Linear(3, 2), head=nn.Linear(4, 2))


def build_sliced() -> nn.Module:
    """One matrix used in two parts, by hand."""

    def forward(s: Any, x: Tensor) -> Tensor:
        return s.head((x @ s.both[:, :2]).tanh() * (x.tanh() @ s.both[:, 2:]))

    return Through(forward, both=weight(3, 4), head=nn.Linear(2, 2))


def build_normed(norm: Any) -> nn.Module:
    return nn.Sequential(norm(nn.Linear(3, 4)), nn.Tanh(), norm(nn.Linear(4, 2)))


def normed_conv() -> nn.Module:
    conv = parametrizations.weight_norm(nn.Conv1d(2, 3, 2))
    return nn.Sequential(conv, nn.Tanh(), nn.Flatten(), nn.Linear(9, 2))


def old_weight_norm(layer: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return nn.utils.weight_norm(layer)


class Halved(nn.Module):
    """A parametrization of one's own."""

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x


def build_parametrized(how: nn.Module) -> nn.Module:
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    parametrize.register_parametrization(net[0], "weight", how)
    return net


def build_pruned() -> nn.Module:
    """A fifth of the weights of each layer is held at zero by a mask."""
    net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    for layer in (net[0], net[2]):
        prune.random_unstructured(layer, "weight", 0.2)
    return net


def prototypes() -> nn.Module:
    def forward(s: Any, x: Tensor) -> Tensor:
        return s.head((x.unsqueeze(1) - s.centres).square().sum(-1).neg().exp())

    return Through(forward, centres=weight(4, 3), head=nn.Linear(4, 2))


def keywords() -> nn.Module:
    def forward(s: Any, *, tokens: Tensor, mask: Tensor) -> Any:
        return SimpleNamespace(logits=s.head((s.body(tokens) * mask.unsqueeze(-1)).tanh().sum(1)))

    return Through(forward, body=nn.Linear(2, 4), head=nn.Linear(4, 2))


def build_tokenized() -> nn.Module:
    """Like a text classifier: token numbers and a mask in a dict, an object with `.logits` out."""

    def forward(s: Any, input_ids: Tensor, attention_mask: Tensor | None = None) -> Any:
        hidden = s.body(s.table(input_ids), src_key_padding_mask=attention_mask == 0)
        return SimpleNamespace(logits=s.head(hidden[:, 0]), hidden_states=hidden)

    body = nn.TransformerEncoderLayer(4, 2, dim_feedforward=4, batch_first=True)
    return Through(forward, table=nn.Embedding(6, 4, padding_idx=0), body=body, head=nn.Linear(4, 2))


def as_tokenizers_do(x: Tensor) -> dict[str, Tensor]:
    ids = x.clone()
    ids[:, 0] = 1
    return {"input_ids": ids, "attention_mask": (ids > 0).long()}


def several(forward: Any) -> nn.Module:
    return Through(forward, body=nn.Linear(3, 4), head=nn.Linear(4, 2))


def tuple_out(s: Any, x: Tensor) -> Any:
    h = s.body(x).tanh()
    return s.head(h), h


def dict_inside(s: Any, x: Tensor) -> Any:
    h = s.body(x).tanh()
    return h, {"result": s.head(h)}


def image_and_table() -> nn.Module:
    def forward(s: Any, image: Tensor, table: Tensor) -> Tensor:
        return s.head(torch.cat([s.eye(image).tanh().flatten(1), s.body(table)], 1))

    return Through(forward, eye=nn.Conv2d(1, 1, 2), body=nn.Linear(3, 2), head=nn.Linear(4, 2))


def batch_of_heads(x: Tensor, w: Tensor) -> Tensor:
    return torch.bmm(x.transpose(0, 1), w).transpose(0, 1)


def by_matmul(x: Tensor, w: Tensor) -> Tensor:
    return (x.unsqueeze(2) @ w).squeeze(2)


def flat_rows(net: Any, x: Tensor) -> dict[str, Tensor]:
    return {"weight": x.transpose(0, 1)}


TWO = {"blocks": {"weight": 2}, "layer_inputs": flat_rows}
G = "parametrizations.weight.original0"

CASES = (
    Case("bare", bare, layer_inputs=lambda net, x: {"weight": x}, shows="a bare parameter by `@`"),
    Case("functional", functional, layer_inputs=lambda net, x: {"first": x, "second": F.linear(x, net.first, net.bias).tanh()},
         shows="bare parameters by `F.linear`; no module at all"),
    Case("left", build_left, layer_inputs=lambda net, x: {"a": x, "b": (x @ net.a.mT).tanh()},
         shows="W @ x; a transposed parameter"),
    Case("einsum", einsum, (2, 3), layer_inputs=lambda net, x: {"a": x.sum(1), "b": (x.sum(1) @ net.a).tanh()},
         shows="einsum along either axis"),
    Case("heads_einsum", lambda: heads(lambda x, w: torch.einsum("bhd,hde->bhe", x, w)), (2, 3), **TWO,
         shows="a matrix per head by einsum"),
    Case("heads_matmul", lambda: heads(by_matmul), (2, 3), **TWO, shows="a matrix per head by broadcast matmul"),
    Case("heads_bmm", lambda: heads(batch_of_heads), (2, 3), **TWO, shows="a matrix per head by bmm"),
    Case("split_and_merge", split_and_merge, layer_inputs=inputs_by_heads, shows="into heads and out again by einsum"),
    Case("experts", experts, layer_inputs=lambda net, x: {"weight": x}, shows="experts that all read the same rows"),
    Case("sliced", build_sliced, blocks={"both": 2}, layer_inputs=lambda net, x: {"both": torch.stack([x, x.tanh()])},
         shows="two halves of one matrix"),
    Case("weight_norm", lambda: build_normed(parametrizations.weight_norm), plain={f"0.{G}": "", f"2.{G}": ""}, vmap=False,
         shows="weight_norm by parametrize"),
    Case("weight_norm_conv", normed_conv, (2, 4), plain={f"0.{G}": ""}, vmap=False, shows="weight_norm of a convolution"),
    Case("old_weight_norm", lambda: build_normed(old_weight_norm), plain={"0.weight_g": "", "2.weight_g": ""}, vmap=False,
         shows="the old weight_norm, by hooks"),
    Case("spectral_norm", lambda: build_normed(parametrizations.spectral_norm), shows="spectral_norm"),
    Case("parametrized", lambda: build_parametrized(Halved()), shows="a parametrization of one's own: scaled"),
    Case("squashed", lambda: build_parametrized(nn.Tanh()), plain={"0.parametrizations.weight.original": "no product"},
         shows="a parametrization that bends every entry"),
    Case("pruned", build_pruned, shows="pruned layers: a mask times a weight"),
    Case("prototypes", prototypes, plain={"centres": "no product"}, shows="distances to centres, which no product reads"),
    Case("two_inputs", image_and_table, (9,), wrap=lambda x: (x[:, :6].reshape(-1, 1, 2, 3), x[:, 6:]),
         shows="two inputs of different kind"),
    Case("keywords", keywords, (3, 2), wrap=lambda x: {"tokens": x, "mask": (x[..., 0] > -1).to(x)},
         shows="a dict in, `.logits` out"),
    Case("tokenized", build_tokenized, (4,), whole=6, wrap=as_tokenizers_do, plain={"table.weight": "index"},
         shows="as tokenizers give; padding"),
    Case("tuple_out", lambda: several(tuple_out), shows="a tuple out"),
    Case("picked", lambda: several(dict_inside), output_fn=lambda out: out[1]["result"], shows="`output_fn=` picks the output"),
    Case("memory", lambda: Through(lambda s, x, y: s.head(torch.cat([s.a(x).mean(1), s.b(y).mean(1)], 1)), a=nn.Linear(3, 2),
         b=nn.Linear(3, 2), head=nn.Linear(4, 2)), (3, 3), wrap=pair, shows="inputs of different length"),
)  # fmt: skip
