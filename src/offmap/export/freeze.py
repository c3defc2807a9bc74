"""P draws become one plain module: no randomness left, so that it can be traced and exported."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from offmap._types import Weights
from offmap.model.forward import OutputFn, copy_model, first_tensor, swap_weights
from offmap.model.params import at
from offmap.posterior.distribution import NamedTensors


class Frozen(nn.Module):
    """A model with S weight sets inside: a call gives all outputs, (S, B, ...)."""

    def __init__(self, net: nn.Module, weights: Weights, output_fn: OutputFn = first_tensor) -> None:
        super().__init__()
        self.net = net
        self.weights = NamedTensors(weights)
        self.size = next(iter(weights.values())).shape[0]
        self.output_fn = output_fn

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Outputs of every weight set, unrolled: a loop exports with a dynamic batch where `vmap` does not."""
        weights = dict(self.weights.items())
        outputs: list[Tensor] = []
        for i in range(self.size):
            with swap_weights(self.net, at(weights, i)):
                outputs.append(self.output_fn(self.net(*args, **kwargs)))
        return torch.stack(outputs)


def freeze(net: nn.Module, weights: Weights, *, output_fn: OutputFn = first_tensor) -> Frozen:
    """One exportable module out of a model and a stack of drawn weights."""
    return Frozen(copy_model(net), weights, output_fn).eval()
