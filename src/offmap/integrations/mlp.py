"""The paper's model: a fully connected net of three hidden layers of 100 ReLU units."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn

from offmap.random import generator


def mlp(
    inputs: int, outputs: int, *, hidden: Sequence[int] = (100, 100, 100), dropout: float = 0.0, seed: int = 0
) -> nn.Sequential:
    """Glorot-uniform weights by `seed` alone, zero biases; with `dropout`, a Dropout after every activation.

    >>> [tuple(p.shape) for p in mlp(8, 2, hidden=[5]).parameters()]
    [(5, 8), (5,), (2, 5), (2,)]
    """
    layers: list[nn.Module] = []
    width = inputs
    for size in hidden:
        layers += [nn.Linear(width, size), nn.ReLU()] + ([nn.Dropout(dropout)] if dropout else [])
        width = size
    net = nn.Sequential(*layers, nn.Linear(width, outputs))
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            if parameter.ndim == 2:
                bound = math.sqrt(6.0 / sum(parameter.shape))
                parameter.uniform_(-bound, bound, generator=generator(seed, "init", name))
            else:
                parameter.zero_()
    return net
