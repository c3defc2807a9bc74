"""Models whose last layer alone is random: what it meets is the same in all draws, and is found once for them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from offmap._types import Inputs, Weights
from offmap.data.inputs import rows_of, take_rows
from offmap.model.cache import LRUCache
from offmap.model.calls import MODEL_ERRORS, OutputFn, call, first_tensor

KEPT = 1 << 22
"""Numbers met that are remembered (16 MB in float32): a prediction and a score of the same inputs share a pass."""

LOOKED_AT = 4
"""Rows of the passes that find the last layer."""


@dataclass(frozen=True)
class LastLayer:
    """The name of the `nn.Linear` that gives a model's output, and what it met for the last inputs."""

    layer: str
    memory: LRUCache = field(default_factory=lambda: LRUCache(KEPT), repr=False, compare=False)

    def names(self, net: nn.Module) -> list[str]:
        """Its weight and, if it has one, its bias."""
        return [f"{self.layer}.{leaf}" if self.layer else leaf for leaf, _ in net.get_submodule(self.layer).named_parameters()]

    def met(self, net: nn.Module, members: list[Weights], x: Inputs, output_fn: OutputFn, step: int) -> tuple[Tensor, ...]:
        """What the layer meets in every member, (B, D) each, `step` rows at a time."""
        blocks = [take_rows(x, slice(start, start + step)) for start in range(0, rows_of(x), step)]
        return self.memory.find(
            x, lambda: tuple(torch.cat([meets(net, self.layer, w, b, output_fn)[0] for b in blocks]) for w in members)
        )

    def outputs(self, net: nn.Module, met: tuple[Tensor, ...], weights: Mapping[str, Tensor]) -> Tensor:
        """(M·p, B, C) from what was met and a stack of weights, {name: (M·p, ...)}: one product for every member."""
        weight, *bias = (weights[name].unflatten(0, (len(met), -1)) for name in self.names(net))
        found: list[Tensor] = []
        for member, h in enumerate(met):
            w = weight[member]  # (p, C, D)
            z = F.linear(h, w.flatten(0, 1), bias[0][member].flatten() if bias else None)
            found.append(z.unflatten(1, w.shape[:2]).transpose(0, 1))
        return torch.cat(found)

    def gives(self, net: nn.Module, weights: Weights, other: Weights, x: Inputs, output_fn: OutputFn) -> bool:
        """Whether the model's output with other weights in the layer is the layer's own."""
        h, _ = meets(net, self.layer, weights, x, output_fn)
        output = call(net, weights | other, x, output_fn)
        if h.ndim != 2:
            return False
        alone = self.outputs(net, (h,), {n: w.unsqueeze(0) for n, w in other.items()})[0]
        near = 1e-3 * float(output.abs().max())
        return alone.shape == output.shape and torch.allclose(alone, output, rtol=1e-2, atol=near)


def meets(net: nn.Module, layer: str, weights: Mapping[str, Tensor], x: Inputs, output_fn: OutputFn) -> tuple[Tensor, Tensor]:
    """What a module is given in one pass of the model, and the model's output."""
    given: list[Tensor] = []
    handle = net.get_submodule(layer).register_forward_pre_hook(lambda module, args: given.append(args[0]))
    try:
        with torch.no_grad():
            output = call(net, weights, x, output_fn)
    finally:
        handle.remove()
    return given[-1], output


@torch.no_grad()
def find_last_layer(
    net: nn.Module, random: Collection[str], weights: Weights, x: Inputs, output_fn: OutputFn = first_tensor
) -> LastLayer | None:
    """The ending of a model of which only the weights in `random` are, if they are a last `nn.Linear`'s and used nowhere else.

    Other weights are put there, and the model's output is compared with the layer's: whatever else a model does is noticed.

    >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    >>> find_last_layer(net, ["2.weight", "2.bias"], {}, torch.ones(4, 2))
    Ending(layer='2')
    >>> find_last_layer(net, ["0.weight"], {}, torch.ones(4, 2))
    """
    few = take_rows(x, slice(0, LOOKED_AT))
    for name, module in net.named_modules():
        if type(module) is not nn.Linear or set((found := LastLayer(name)).names(net)) != set(random):
            continue
        other = {n: weights.get(n, net.get_parameter(n)).flip(0) + 0.5 for n in random}
        turned = {n: -w for n, w in other.items()}  # what comes after the layer may leave one sign alone
        try:
            return found if all(found.gives(net, weights, w, few, output_fn) for w in (other, turned)) else None
        except MODEL_ERRORS:
            return None
    return None
