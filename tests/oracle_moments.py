"""What every matrix meets, by hooks on the modules and plain loops: one function per kind of module.

Each gives, by the parameter's name within the module, the rows h of one call: (G, n, D), or a list of G tensors (n, D) where
blocks see different numbers of rows.
"""

from __future__ import annotations

import copy
import itertools
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from offmap.model.forward import copy_model
from oracles import run_once

Rows: TypeAlias = dict[str, Tensor | list[Tensor]]


def linear(layer: nn.Linear, x: Tensor) -> Rows:
    return {"weight": [x.reshape(-1, layer.in_features)]}


def bilinear(layer: nn.Bilinear, x: Tensor, y: Tensor) -> Rows:
    pairs = [torch.outer(a, b).flatten() for a, b in zip(x.flatten(0, -2), y.flatten(0, -2), strict=True)]
    return {"weight": [torch.stack(pairs)]}


def windows(x: Tensor, layer: Any) -> Tensor:
    """What the kernel of a convolution sees, one place after another: (B, C, *space) -> (n, C·prod(kernel))."""
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    x = F.pad(x, layer._reversed_padding_repeated_twice, mode=mode)
    spans = [d * (k - 1) + 1 for d, k in zip(layer.dilation, layer.kernel_size, strict=True)]
    starts = [range(0, n - w + 1, s) for n, w, s in zip(x.shape[2:], spans, layer.stride, strict=True)]
    parts = [
        x[(..., *(slice(i, i + w, d) for i, w, d in zip(place, spans, layer.dilation, strict=True)))].flatten(1)
        for place in itertools.product(*starts)
    ]
    return torch.cat(parts)


def convolution(layer: Any, x: Tensor) -> Rows:
    return {"weight": windows(x, layer).unflatten(1, (layer.groups, -1)).transpose(0, 1)}


def transposed_rows(layer: Any, x: Tensor, output_size: list[int] | None = None) -> Rows:
    """Output place o meets input i at tap k where o + padding = i·stride + k·dilation, and zero where there is no such i."""
    space = type(layer).forward(layer, x, output_size).shape[2:]
    rows = x.new_zeros(len(x), *space, x.shape[1], *layer.kernel_size)
    for o, k in itertools.product(itertools.product(*map(range, space)), itertools.product(*map(range, layer.kernel_size))):
        steps = [a + p - b * d for a, p, b, d in zip(o, layer.padding, k, layer.dilation, strict=True)]
        i = [t // s for t, s in zip(steps, layer.stride, strict=True)]
        inside = all(t % s == 0 and 0 <= t // s < n for t, s, n in zip(steps, layer.stride, x.shape[2:], strict=True))
        if inside:
            rows[(slice(None), *o, slice(None), *k)] = x[(..., *i)]
    return {"weight": rows.reshape(-1, layer.groups, rows[0].numel() // space.numel() // layer.groups).transpose(0, 1)}


def attention(layer: nn.MultiheadAttention, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Rows:
    # with an identity in its place, attention returns what the output projection reads
    plain = copy.deepcopy(layer)
    plain._forward_pre_hooks.clear()
    plain.out_proj.weight.copy_(torch.eye(layer.embed_dim))
    if plain.out_proj.bias is not None:
        plain.out_proj.bias.zero_()
    rows: Rows = {"out_proj.weight": [plain(q, k, v, **options)[0].flatten(0, -2)]}
    parts = [q] if q is k is v else [q, k] if k is v else [q, k, v]
    if layer.in_proj_weight is not None:
        return rows | {"in_proj_weight": [part.flatten(0, -2) for part in parts]}
    names = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
    return rows | {name: [part.flatten(0, -2)] for name, part in zip(names, (q, k, v), strict=True)}


STEPS: dict[str, Callable[..., Any]] = {
    "GRU": torch.gru_cell, "RNN_TANH": torch.rnn_tanh_cell, "RNN_RELU": torch.rnn_relu_cell,
}  # fmt: skip


def lstm_step(x: Tensor, h: Tensor, c: Tensor, *own: Tensor | None) -> tuple[Tensor, Tensor]:
    """By hand: torch's own cell knows no projection."""
    write, keep, new, read = (F.linear(x, own[0], own[2]) + F.linear(h, own[1], own[3])).chunk(4, -1)
    c = keep.sigmoid() * c + write.sigmoid() * new.tanh()
    return read.sigmoid() * c.tanh(), c


def recurrent(layer: nn.RNNBase, x: Tensor, start: Any = None) -> Rows:
    """Step by step, layer by layer, forwards and backwards."""
    x = x.transpose(0, 1) if layer.batch_first else x
    starts = start if isinstance(start, tuple) else (start,)
    seen: dict[str, list[Tensor]] = defaultdict(list)
    for depth in range(layer.num_layers):
        sides: list[Tensor] = []
        for ending in ("", "_reverse")[: 2 if layer.bidirectional else 1]:
            place = depth * (2 if layer.bidirectional else 1) + len(sides)
            states = [s[place] if s is not None else None for s in starts]
            sides.append(one_way(layer, x, f"_l{depth}{ending}", states, seen))
        x = torch.cat(sides, -1)
    return {name: [torch.cat(rows)] for name, rows in seen.items()}


def one_way(layer: nn.RNNBase, x: Tensor, ending: str, states: Sequence[Any], seen: dict[str, list[Tensor]]) -> Tensor:
    """Outputs (T, B, H) of one layer in one direction; what its weights meet is added to `seen`."""
    own = [getattr(layer, f"{leaf}{ending}", None) for leaf in ("weight_ih", "weight_hh", "bias_ih", "bias_hh", "weight_hr")]
    h = x.new_zeros(x.shape[1], layer.proj_size or layer.hidden_size) if states[0] is None else states[0]
    c = x.new_zeros(x.shape[1], layer.hidden_size) if len(states) < 2 else states[1]
    made: dict[int, Tensor] = {}
    for t in reversed(range(len(x))) if ending.endswith("_reverse") else range(len(x)):
        seen[f"weight_ih{ending}"].append(x[t])
        seen[f"weight_hh{ending}"].append(h)
        if layer.mode == "LSTM":
            h, c = lstm_step(x[t], h, c, *own[:4])
        else:
            h = STEPS[layer.mode](x[t], h, *own[:4])
        if own[4] is not None:
            seen[f"weight_hr{ending}"].append(h)
            h = h @ own[4].mT
        made[t] = h
    return torch.stack([made[t] for t in range(len(x))])


def cell(layer: nn.RNNCellBase, x: Tensor, state: Any = None) -> Rows:
    h = state[0] if isinstance(state, tuple) else state
    return {"weight_ih": [x], "weight_hh": [x.new_zeros(len(x), layer.hidden_size) if h is None else h]}


KINDS: dict[Any, Callable[..., Rows]] = {
    nn.Linear: linear,
    nn.Bilinear: bilinear,
    (nn.Conv1d, nn.Conv2d, nn.Conv3d): convolution,
    (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d): transposed_rows,
    nn.MultiheadAttention: attention,
    nn.RNNBase: recurrent,
    nn.RNNCellBase: cell,
}

ORIGINALS = ("{}", "parametrizations.{}.original", "parametrizations.{}.original1", "{}_v", "{}_orig")
"""Under which name a module may keep the tensor that its weight is made of."""


@torch.no_grad()
def second_moments(
    net: nn.Module, batches: Iterable[Any], layer_inputs: Callable[[Any, Any], Mapping[str, Tensor]] = lambda net, x: {}
) -> dict[str, Tensor]:
    """E[h hᵀ] of every matrix by name, (G, D, D) in float64; `layer_inputs(net, x)` gives the rows of bare parameters."""
    twin = copy_model(net)
    names = {id(p): name for name, p in twin.named_parameters()}
    seen: dict[str, list[list[Tensor]]] = defaultdict(list)

    def hook(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        kind = next(k for k in KINDS if isinstance(layer, k))
        own = dict(layer.named_parameters(remove_duplicate=False))
        for leaf, blocks in KINDS[kind](layer, *args, **kwargs).items():
            held = next(own[form.format(leaf)] for form in ORIGINALS if form.format(leaf) in own)
            seen[names[id(held)]].append([rows.double() for rows in blocks])

    for layer in twin.modules():
        if isinstance(layer, tuple(k for kind in KINDS for k in (kind if isinstance(kind, tuple) else (kind,)))):
            layer.register_forward_pre_hook(hook, with_kwargs=True)
    with slow_path():
        for x in batches:
            run_once(twin, x)
            for name, rows in layer_inputs(twin, x).items():
                seen[name].append([block.double() for block in (rows if rows.ndim == 3 else rows.unsqueeze(0))])
    return {name: torch.stack([moment(torch.cat(block)) for block in zip(*calls, strict=True)]) for name, calls in seen.items()}


def moment(rows: Tensor) -> Tensor:
    """Mean of h hᵀ, (n, D) -> (D, D)."""
    return rows.mT @ rows / len(rows)


@contextmanager
def slow_path() -> Generator[None]:
    """Transformers call their sub-modules only off the fast path."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
