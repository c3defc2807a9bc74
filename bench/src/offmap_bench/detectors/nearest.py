"""The distance to the k-th nearest training row, in inputs or in the layer before the last of a trained model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from offmap._types import Inputs
from offmap.data.batch import arguments, rows_of, take_rows
from offmap.errors import ConfigError, ModelError

BLOCK = 256
"""Rows that are compared with all training rows together."""
NUMBERS = 1 << 22
"""Numbers of inputs that run through a model together."""


@dataclass(frozen=True)
class NearestRows:
    """A Scorer: the distance to the k-th nearest of `rows`, (n, D), of what `embed` makes of inputs."""

    embed: Callable[[Inputs], Tensor]
    rows: Tensor
    k: int = 1

    def score(self, x: Inputs) -> Tensor:
        """(B,), higher = more OOD."""
        return torch.cat([torch.cdist(part, self.rows).kthvalue(self.k, 1).values for part in self.embed(x).split(BLOCK)])


def nearest_inputs(inputs: Tensor, *, k: int = 1) -> NearestRows:
    """Measure distances in inputs, each column in units of its standard deviation.

    >>> nearest_inputs(torch.tensor([[0.0], [2.0]])).score(torch.tensor([[4.0]]))
    tensor([2.])
    """
    rows = inputs.flatten(1)
    mean, std = rows.mean(0), rows.std(0, correction=0)
    return _nearest(lambda x: (x.flatten(1) - mean) / torch.where(std > 0, std, 1.0), inputs, k)


def nearest_features(model: nn.Module, inputs: Inputs, *, k: int = 1) -> NearestRows:
    """Measure distances in what the last linear layer takes, each row of length one: they order rows as angles do."""
    return _nearest(lambda x: F.normalize(last_inputs(model, x), dim=1), inputs, k)


def _nearest(embed: Callable[[Inputs], Tensor], inputs: Inputs, k: int) -> NearestRows:
    if not 1 <= k <= rows_of(inputs):
        raise ConfigError(f"Expected `k` from 1 to the number of rows, {rows_of(inputs)}, but got {k}.")
    return NearestRows(embed, embed(inputs), k)


@torch.no_grad()
def last_inputs(model: nn.Module, x: Inputs) -> Tensor:
    """What the last linear layer of a model takes, (B, D), some rows at a time."""
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    if not layers:
        raise ModelError(f"Expected a model with a linear layer, but {type(model).__name__} has none.")
    seen: list[Tensor] = []
    with layers[-1].register_forward_pre_hook(lambda _, given: seen.append(given[0])):
        run_model(model, x)
    return torch.cat(seen).flatten(1)


@torch.no_grad()
def run_model(model: nn.Module, x: Inputs) -> Tensor:
    """The outputs of a model, some rows at a time: (B, ...)."""
    first = next(iter(x.values())) if isinstance(x, dict) else x
    step = max(1, min(1024, NUMBERS // max(1, first[0].numel())))
    outputs: list[Tensor] = []
    for start in range(0, rows_of(x), step):
        positional, named = arguments(take_rows(x, slice(start, start + step)))
        outputs.append(model(*positional, **named))
    return torch.cat(outputs)
