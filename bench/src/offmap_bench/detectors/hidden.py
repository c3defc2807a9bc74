"""Distances to the training rows in the hidden layers of a trained model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from offmap._types import Inputs
from offmap.data import check_finite
from offmap.data.batch import rows_of, take_rows
from offmap.detectors.input_distance import Mahalanobis, Nearest
from offmap.errors import ConfigError, DataError, ModelError, nearest
from offmap.model.capture import features
from offmap.model.forward import OutputFn, copy_model, first_tensor

STEP = 1024
"""Rows that run together."""


@dataclass(frozen=True)
class Layers:
    """Inputs -> what the matrices in `spread` meet, side by side, each layer divided by its spread on the training data."""

    net: nn.Module
    spread: Mapping[str, float]
    output_fn: OutputFn = first_tensor

    def __call__(self, x: Inputs) -> Tensor:
        """(B, ...) -> (B, D)."""
        check_finite(x, None, "the inputs")
        met = read(self.net, x, list(self.spread), self.output_fn)
        return torch.cat([met[name] / spread for name, spread in self.spread.items()], 1)


@dataclass(frozen=True)
class Hidden:
    """A Scorer: the score of another, (B, D) -> (B,), of hidden layers in place of inputs."""

    layers: Layers
    inner: Callable[[Tensor], Tensor]

    def score(self, x: Inputs) -> Tensor:
        """(B,), higher = more OOD."""
        return self.inner(self.layers(x))


def hidden_layers(
    net: nn.Module, inputs: Inputs, names: Sequence[str] | None = None, output_fn: OutputFn = first_tensor
) -> Layers:
    """The layers of a model, seen on its training inputs; `names` are those of matrices, None all that meet no plain input.

    The spread of a layer is √(Σ_d var h_d) over the rows: all layers then count alike, and units keep their proportions.

    >>> net = nn.Sequential(nn.Linear(1, 2, bias=False), nn.Linear(2, 1))
    >>> _ = net[0].weight.data.copy_(torch.tensor([[3.0], [4.0]]))
    >>> hidden_layers(net, torch.tensor([[1.0], [-1.0]])).spread
    {'1.weight': 5.0}
    """
    if rows_of(inputs) < 2:
        raise DataError(f"Expected at least two training rows, but got {rows_of(inputs)}.")
    check_finite(inputs, None, "the training inputs")
    twin = copy_model(net)
    seen = read(twin, inputs, None, output_fn)
    for name in names or ():
        if name not in seen:
            raise ConfigError(f"Expected `names` of matrices to be {nearest(name, seen)}, but got {name!r}.")
    same = {n for n, h in seen.items() if isinstance(inputs, Tensor) and torch.equal(h, inputs.flatten(1).to(h))}
    met = {name: seen[name] for name in (names or (n for n in seen if n not in same))}
    if not met:
        raise ModelError(
            f"Expected a model with hidden layers that meet one row per input, but {type(net).__name__} has none. "
            "Measure the distance of inputs instead."
        )
    total = {name: float(h.double().var(0, correction=0).sum().sqrt()) for name, h in met.items()}
    return Layers(twin, {name: spread if spread > 0 else 1.0 for name, spread in total.items()}, output_fn)


def hidden_nearest(
    net: nn.Module, inputs: Inputs, *, k: int = 1, names: Sequence[str] | None = None, output_fn: OutputFn = first_tensor
) -> Hidden:
    """Score by the distance to the k-th nearest training row in all hidden layers side by side, or in those of `names`."""
    layers = hidden_layers(net, inputs, names, output_fn)
    rows = layers(inputs)
    if not 1 <= k <= len(rows):
        raise ConfigError(f"Expected `k` from 1 to the number of rows, {len(rows)}, but got {k}.")
    return Hidden(layers, Nearest(rows, k=k, standardise=False).score)


def hidden_mahalanobis(
    net: nn.Module,
    inputs: Inputs,
    *,
    shrinkage: float | None = None,
    names: Sequence[str] | None = None,
    output_fn: OutputFn = first_tensor,
) -> Hidden:
    """Score by the distance from the training rows' mean in all hidden layers side by side, or in those of `names`."""
    layers = hidden_layers(net, inputs, names, output_fn)
    return Hidden(layers, Mahalanobis(layers(inputs), shrinkage=shrinkage).score)


def read(net: nn.Module, x: Inputs, names: Sequence[str] | None, output_fn: OutputFn) -> dict[str, Tensor]:
    """What matrices meet, (B, D) by name, some rows at a time; those that not every part meets are left out."""
    weights = {name: p.detach() for name, p in net.named_parameters()}
    size = rows_of(x)
    if not size:
        raise DataError("Expected at least one input, but got none.")
    parts = [
        features(net, weights, take_rows(x, slice(start, start + STEP)), output_fn, names=names) for start in range(0, size, STEP)
    ]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0] if all(name in part for part in parts)}
