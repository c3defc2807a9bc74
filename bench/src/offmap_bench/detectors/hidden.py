"""Distances to the training rows in inputs, in the hidden layers of a trained model, or before its last layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from offmap._types import Inputs
from offmap.data import check_finite
from offmap.data.batch import arguments, rows_of, take_rows
from offmap.detectors.input_distance import Mahalanobis, Nearest
from offmap.errors import ConfigError, DataError, ModelError, nearest
from offmap.model.capture import features
from offmap.model.forward import copy_model, first_tensor

STEP, NUMBERS = 1024, 1 << 22
"""Rows, and numbers of inputs, that run through a model together, at most."""
BLOCK = 256
"""Rows that are compared with all training rows together."""


@dataclass(frozen=True)
class Layers:
    """Inputs -> the inputs of the matrices in `spread`, side by side, each layer divided by its spread on the training data."""

    model: nn.Module
    spread: Mapping[str, float]

    def __call__(self, x: Inputs) -> Tensor:
        """(B, ...) -> (B, D)."""
        check_finite(x, None, "the inputs")
        inputs = read(self.model, x, list(self.spread))
        return torch.cat([inputs[name] / spread for name, spread in self.spread.items()], 1)


@dataclass(frozen=True)
class Hidden:
    """A Scorer: the score of another, (B, D) -> (B,), of what `embed` makes of inputs."""

    embed: Callable[[Inputs], Tensor]
    inner: Callable[[Tensor], Tensor]

    def score(self, x: Inputs) -> Tensor:
        """(B,), higher = more OOD."""
        return self.inner(self.embed(x))


def hidden_layers(model: nn.Module, inputs: Inputs, names: Sequence[str] | None = None) -> Layers:
    """The layers of a model on its training inputs; `names` are those of matrices, None all whose input is not the model's own.

    The spread of a layer is √(Σ_d var h_d) over the rows: all layers then count alike, and units keep their proportions.

    >>> net = nn.Sequential(nn.Linear(1, 2, bias=False), nn.Linear(2, 1))
    >>> _ = net[0].weight.data.copy_(torch.tensor([[3.0], [4.0]]))
    >>> hidden_layers(net, torch.tensor([[1.0], [-1.0]])).spread
    {'1.weight': 5.0}
    """
    if rows_of(inputs) < 2:
        raise DataError(f"Expected at least two training rows, but got {rows_of(inputs)}.")
    check_finite(inputs, None, "the training inputs")
    replica = copy_model(model)
    inputs_of = read(replica, inputs)
    for name in names or ():
        if name not in inputs_of:
            raise ConfigError(f"Expected `names` of matrices to be {nearest(name, inputs_of)}, but got {name!r}.")
    same = {n for n, h in inputs_of.items() if isinstance(inputs, Tensor) and torch.equal(h, inputs.flatten(1).to(h))}
    chosen = {name: inputs_of[name] for name in (names or (n for n in inputs_of if n not in same))}
    if not chosen:
        raise ModelError(f"Expected a model with hidden layers that have one row per input, but {type(model).__name__} has none.")
    total = {name: float(h.double().var(0, correction=0).sum().sqrt()) for name, h in chosen.items()}
    return Layers(replica, {name: spread if spread > 0 else 1.0 for name, spread in total.items()})


def hidden_nearest(model: nn.Module, inputs: Inputs, *, k: int = 1, names: Sequence[str] | None = None) -> Hidden:
    """Score by the distance to the k-th nearest training row in all hidden layers side by side, or in those of `names`."""
    layers = hidden_layers(model, inputs, names)
    rows = layers(inputs)
    if not 1 <= k <= len(rows):
        raise ConfigError(f"Expected `k` from 1 to the number of rows, {len(rows)}, but got {k}.")
    return Hidden(layers, Nearest(rows, k=k, standardise=False).score)


def hidden_mahalanobis(
    model: nn.Module, inputs: Inputs, *, shrinkage: float | None = None, names: Sequence[str] | None = None
) -> Hidden:
    """Score by the distance from the training rows' mean in all hidden layers side by side, or in those of `names`."""
    layers = hidden_layers(model, inputs, names)
    return Hidden(layers, Mahalanobis(layers(inputs), shrinkage=shrinkage).score)


def read(model: nn.Module, x: Inputs, names: Sequence[str] | None = None) -> dict[str, Tensor]:
    """The inputs of matrices, (B, D) by name, some rows at a time; those that not every part reaches are left out."""
    weights = {name: p.detach() for name, p in model.named_parameters()}
    if not rows_of(x):
        raise DataError("Expected at least one input, but got none.")
    parts = [features(model, weights, part, first_tensor, names=names) for part in split_rows(x)]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0] if all(name in part for part in parts)}


def split_rows(x: Inputs) -> Iterator[Inputs]:
    """Cut inputs into parts that run together."""
    first = next(iter(x.values())) if isinstance(x, dict) else x
    step = max(1, min(STEP, NUMBERS // max(1, first[0].numel())))
    return (take_rows(x, slice(start, start + step)) for start in range(0, rows_of(x), step))


@torch.no_grad()
def run_model(model: nn.Module, x: Inputs) -> Tensor:
    """The outputs of a model, some rows at a time: (B, ...)."""
    calls = (arguments(part) for part in split_rows(x))
    return torch.cat([model(*positional, **named) for positional, named in calls])


def last_inputs(model: nn.Module, x: Inputs) -> Tensor:
    """What the last linear layer of a model takes, (B, D)."""
    names = [f"{name}.weight".removeprefix(".") for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    if not names:
        raise ModelError(f"Expected a model with a linear layer, but {type(model).__name__} has none.")
    return read(model, x, names[-1:])[names[-1]]


def nearest_inputs(inputs: Tensor, *, k: int = 1) -> Hidden:
    """Measure distances in inputs, each column in units of its standard deviation.

    >>> nearest_inputs(torch.tensor([[0.0], [2.0]])).score(torch.tensor([[4.0]]))
    tensor([2.])
    """
    rows = inputs.flatten(1)
    mean, std = rows.mean(0), rows.std(0, correction=0)
    return _nearest(lambda x: (x.flatten(1) - mean) / torch.where(std > 0, std, 1.0), inputs, k)


def nearest_features(model: nn.Module, inputs: Inputs, *, k: int = 1) -> Hidden:
    """Measure distances in what the last linear layer takes, each row of length one: they order rows as angles do."""
    return _nearest(lambda x: F.normalize(last_inputs(model, x), dim=1), inputs, k)


def _nearest(embed: Callable[[Inputs], Tensor], inputs: Inputs, k: int) -> Hidden:
    rows = embed(inputs)
    if not 1 <= k <= len(rows):
        raise ConfigError(f"Expected `k` from 1 to the number of rows, {len(rows)}, but got {k}.")
    return Hidden(embed, lambda x: torch.cat([torch.cdist(part, rows).kthvalue(k, 1).values for part in x.split(BLOCK)]))
