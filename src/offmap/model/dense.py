"""Plain stacks of Linear layers and activations over many weight sets, as batched matrix products.

`vmap` gives the same numbers; here the bias rides in the product and activations work in place, which for small models is most
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

WORKING_SET = 1 << 18
"""Activations in flight: few enough to stay in a core's cache."""

Plan: TypeAlias = list[tuple[str, nn.Module]]


def plan(net: nn.Module, prefix: str = "") -> Plan | None:
    """Layers by name if the model is nothing but nested Sequentials of Linear and elementwise modules, else None."""
    if vars(net)["_forward_hooks"] or vars(net)["_forward_pre_hooks"] or (not prefix and _tied(net)):
        return None
    if isinstance(net, nn.Sequential) and type(net).forward is nn.Sequential.forward:
        # not `named_children`, which lists a module that stands in two places once
        parts = [plan(child, f"{prefix}{place}.") for place, child in vars(net)["_modules"].items()]
        return None if any(p is None for p in parts) else [layer for p in parts if p for layer in p]
    plain = type(net) is nn.Linear or type(net) in ELEMENTWISE
    return [(prefix, net)] if plain and not net.training else None


def _tied(net: nn.Module) -> bool:
    """Whether one parameter has two names: the weights hold the first alone, and `functional_call` knows the other."""
    return len(list(net.parameters())) < len(list(net.named_parameters(remove_duplicate=False)))


def forward(layers: Plan, weights: Mapping[str, Tensor], x: Tensor, draws: int) -> Tensor:
    """Outputs of all weight sets: {name: (S, ...)}, (B, D) -> (S, B, K); in tiles where no gradient wants the whole."""
    if torch.is_grad_enabled():
        return _run(layers, weights, x, draws)
    linear = [layer for _, layer in layers if isinstance(layer, nn.Linear)]
    widest = max(layer.out_features for layer in linear)
    together = min(draws, max(5, WORKING_SET // (widest * max(1, x.shape[0]))))
    step = max(32, WORKING_SET // (widest * together))
    result = x.new_empty(draws, x.shape[0], linear[-1].out_features)
    for i in range(0, draws, together):
        part = {name: w[i : i + together] for name, w in weights.items()}
        for row in range(0, x.shape[0], step):
            block = _run(layers, part, x[row : row + step], min(together, draws - i))
            result[i : i + together, row : row + step] = block
    return result


def _run(layers: Plan, weights: Mapping[str, Tensor], x: Tensor, draws: int) -> Tensor:
    h = x.expand(draws, *x.shape)
    ours = False  # until the first product, h is the user's own memory
    for prefix, layer in layers:
        if isinstance(layer, nn.Linear):
            h, ours = _linear(prefix, layer, weights, h), not torch.is_grad_enabled()
        elif isinstance(layer, nn.ReLU):
            h = h.relu_() if ours else h.relu()
        else:
            h = layer(h)
    return h


def _linear(prefix: str, layer: nn.Linear, weights: Mapping[str, Tensor], h: Tensor) -> Tensor:
    matrix = weights.get(f"{prefix}weight", layer.weight)
    matrix = _stacked(matrix, 3, h.shape[0]).mT
    if layer.bias is None:
        return torch.bmm(h, matrix)
    bias = _stacked(weights.get(f"{prefix}bias", layer.bias), 2, h.shape[0])
    return torch.baddbmm(bias.unsqueeze(1), h, matrix)


def _stacked(weight: Tensor, axes: int, draws: int) -> Tensor:
    """One of every draw: those that are not random are the same in all."""
    return weight if weight.ndim == axes else weight.expand(draws, *weight.shape)
