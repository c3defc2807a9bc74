"""Plain stacks of Linear layers and activations over many weight sets, as batched matrix products.

`vmap` gives the same numbers; here the bias rides in the product and activations work in place, which for small hosts is most
of the time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import torch
from torch import Tensor, nn

ELEMENTWISE = (
    nn.ReLU,
    nn.Tanh,
    nn.Sigmoid,
    nn.GELU,
    nn.SiLU,
    nn.ELU,
    nn.LeakyReLU,
    nn.Softplus,
    nn.Identity,
    nn.Dropout,
)
"""Modules that treat every number alike (dropout is the identity in evaluation mode)."""

Plan: TypeAlias = list[tuple[str, nn.Module]]


def plan(net: nn.Module, prefix: str = "") -> Plan | None:
    """Layers by name if the host is nothing but nested Sequentials of Linear and elementwise modules, else None."""
    if vars(net)["_forward_hooks"] or vars(net)["_forward_pre_hooks"]:
        return None
    if isinstance(net, nn.Sequential) and type(net).forward is nn.Sequential.forward:
        parts = [plan(child, f"{prefix}{name}.") for name, child in net.named_children()]
        return None if any(p is None for p in parts) else [layer for p in parts if p for layer in p]
    plain = type(net) is nn.Linear or type(net) in ELEMENTWISE
    return [(prefix, net)] if plain and not net.training else None


def width(layers: Plan) -> int:
    """The widest activation."""
    return max((m.out_features for _, m in layers if isinstance(m, nn.Linear)), default=1)


def forward(layers: Plan, weights: Mapping[str, Tensor], x: Tensor, draws: int) -> Tensor:
    """Outputs of all weight sets: {name: (S, ...)}, (B, D) -> (S, B, K)."""
    h = x.expand(draws, *x.shape)
    in_place = not torch.is_grad_enabled()
    for prefix, layer in layers:
        if isinstance(layer, nn.Linear):
            h = _linear(prefix, layer, weights, h)
        elif isinstance(layer, nn.ReLU):
            h = h.relu_() if in_place and h.stride(0) else h.relu()
        else:
            h = layer(h)
    return h


def _linear(prefix: str, layer: nn.Linear, weights: Mapping[str, Tensor], h: Tensor) -> Tensor:
    matrix = weights.get(f"{prefix}weight", layer.weight)
    matrix = matrix.expand(h.shape[0], *matrix.shape[-2:]).mT
    if layer.bias is None:
        return torch.bmm(h, matrix)
    bias = weights.get(f"{prefix}bias", layer.bias)
    return torch.baddbmm(bias.expand(h.shape[0], bias.shape[-1]).unsqueeze(1), h, matrix)
