"""What scores are compared with: some rows of the training data, where they lie, and how much the draws disagree there.

Disagreement and distance see different things, so the default score joins them. Every part is a logarithm, relative to familiar
rows nearby, and counted in standard deviations over familiar rows, each compared with the others only (leave-one-out):

    disagreement   log u(x) − the mean of log u over the nearest familiar rows
    inputs         log ratio(x) of `offmap.distance`, in the inputs
    layers         the same in what hidden matrices meet, the mean over them

Their mean is the score. Nothing is tuned, and familiar data are all it needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from offmap._types import Inputs
from offmap.batches import Batches, sample
from offmap.core.features import features
from offmap.core.inputs import Shared, rows_of
from offmap.distance import nearest, relative, spacing
from offmap.methods.protocol import Predictive

ROWS = 1000
"""Familiar rows to compare with: more cost memory and time, and change little."""

WIDEST = 4096
"""Inputs of more numbers than this are not compared: their layers are."""

LAYERS = 3
"""Hidden layers to compare in, spread over the depth, the last among them."""


@dataclass(frozen=True)
class Scale:
    """Mean and standard deviation of a part over familiar rows, () each; a part that tells them nothing apart counts 0."""

    centre: Tensor
    spread: Tensor

    @staticmethod
    def of(values: Tensor) -> Scale:
        """Of finite values, (N,)."""
        kept = values[values.isfinite()]
        if len(kept) < 2:
            kept = values.new_zeros(2)
        return Scale(kept.mean(), kept.std(correction=0))

    def __call__(self, values: Tensor) -> Tensor:
        """In standard deviations above the mean."""
        if float(self.spread) < 1e-6 * (1 + abs(float(self.centre))):
            return torch.where(values.isfinite(), 0.0, values)
        return (values - self.centre) / self.spread


@dataclass(frozen=True)
class Space:
    """Familiar rows (N, D) in units of `unit` (D,), how far apart they are (N,), and the scale of their own log ratios."""

    rows: Tensor
    unit: Tensor
    spacings: Tensor
    scale: Scale

    @staticmethod
    def of(rows: Tensor, *, standardized: bool) -> Space:
        """A space around these rows; `standardized` divides columns by their standard deviation, unless that is 0."""
        rows = rows.float()
        unit = torch.ones_like(rows[0])
        if standardized:
            spread = rows.std(0, correction=0)
            unit = torch.where(spread > 0, spread, unit)
        scaled = rows / unit
        own = spacing(scaled)
        distances, numbers = nearest(scaled, scaled, itself=torch.arange(len(rows)))
        return Space(scaled, unit, own, Scale.of(relative(distances, numbers, own)))

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """How strange rows (B, D) are here, (B,), and the numbers of the familiar ones nearby (B, k)."""
        distances, numbers = nearest(self.rows, x.float() / self.unit)
        return self.scale(relative(distances, numbers, self.spacings)), numbers


@dataclass(frozen=True)
class Familiar:
    """Familiar rows in the inputs (None: they are no vectors) and in some layers, and log u of each, relative to its neighbours.

    `layers` are names of matrices, in the order of `hidden`.
    """

    inputs: Space | None
    hidden: tuple[Space, ...]
    layers: tuple[str, ...]
    disagreement: Tensor | None = None  # log u, (N,)
    scale: Scale | None = None

    def distance(self, predictive: Predictive, x: Inputs) -> Tensor:
        """The mean over the inputs and the hidden layers taken together, (B,)."""
        return torch.stack([part for part, _ in self._parts(predictive, x)]).mean(0)

    def join(self, predictive: Predictive, x: Inputs, uncertainty: Tensor) -> Tensor:
        """The default score, (B,), from the draws' disagreement u (B,)."""
        assert self.disagreement is not None and self.scale is not None
        parts = self._parts(predictive, x)
        near = parts[0][1]
        own = self.scale(logarithm(uncertainty) - self.disagreement[near].mean(1))
        return torch.stack([own, *(part for part, _ in parts)]).mean(0)

    def _parts(self, predictive: Predictive, x: Inputs) -> list[tuple[Tensor, Tensor]]:
        """Strangeness and familiar neighbours, in the inputs and in the layers."""
        parts = [self.inputs(flat(x))] if self.inputs else []  # pyright: ignore[reportArgumentType]
        if self.hidden:
            met = layers_of(predictive, x, self.layers)
            each = [space(met[name]) for space, name in zip(self.hidden, self.layers, strict=True)]
            parts.append((torch.stack([strange for strange, _ in each]).mean(0), each[-1][1]))
        return parts

    def to(self, device: str | torch.device) -> Familiar:
        """The same on another device."""
        return _mapped(self, lambda tensor: tensor.to(device))


def _mapped(value: Any, change: Any) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple):
        return tuple(_mapped(v, change) for v in value)
    if isinstance(value, Familiar | Space | Scale):
        return replace(value, **{f.name: _mapped(getattr(value, f.name), change) for f in fields(value)})
    return value


def familiar_of(predictive: Predictive, train: Batches, *, seed: int) -> tuple[Familiar, Inputs] | None:
    """Some training rows where they lie, and these rows; None if no vectors can be compared."""
    rows = sample(train, ROWS, seed)
    vectors = flat(rows)
    inputs = None if vectors is None else Space.of(vectors, standardized=True)
    met = layers_of(predictive, rows)
    if vectors is not None:
        met = {n: h for n, h in met.items() if h.shape != vectors.shape or not torch.equal(h, vectors.to(h))}
    chosen = spread_out(list(met), LAYERS)
    hidden = tuple(Space.of(met[name], standardized=False) for name in chosen)
    if rows_of(rows) < 3 or (inputs is None and not hidden):
        return None
    return Familiar(inputs, hidden, tuple(chosen)), rows


def with_disagreement(familiar: Familiar, predictive: Predictive, rows: Inputs, uncertainty: Tensor) -> Familiar:
    """The same, knowing the draws' disagreement u (N,) on its own rows."""
    space = familiar.inputs or familiar.hidden[-1]
    values = logarithm(uncertainty)
    _, numbers = nearest(space.rows, space.rows, itself=torch.arange(len(values)))
    return replace(familiar, disagreement=values, scale=Scale.of(values - values[numbers].mean(1)))


def logarithm(uncertainty: Tensor) -> Tensor:
    """log u in float64, finite at 0."""
    return uncertainty.double().clamp_min(1e-30).log()


def flat(x: Inputs) -> Tensor | None:
    """Floating-point inputs as rows, (B, D); None if there are none or too many, or no two examples could be compared."""
    size = rows_of(x)
    leaves = [leaf for leaf in tree_leaves(x) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    own = [leaf.reshape(size, -1) for leaf in leaves if not isinstance(leaf, Shared) and leaf.ndim and leaf.shape[0] == size]
    width = sum(leaf.shape[1] for leaf in own)
    return torch.cat(own, 1) if 0 < width <= WIDEST else None


def layers_of(predictive: Predictive, x: Inputs, names: Sequence[str] | None = None) -> dict[str, Tensor]:
    """What the plain first member's matrices meet; nothing for a Predictive that is no host of ours."""
    plain = getattr(predictive, "plain", None)
    host = getattr(predictive, "host", None)
    if plain is None or host is None:
        return {}
    return features(host.net, plain(), x, host.select, names=names)


def spread_out(names: list[str], most: int) -> list[str]:
    """At most so many of them, evenly spaced, the last among them.

    >>> spread_out(["a", "b", "c", "d", "e"], 2)
    ['c', 'e']
    """
    if len(names) <= most:
        return names
    return [names[round((i + 1) * len(names) / most) - 1] for i in range(most)]
