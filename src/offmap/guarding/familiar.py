"""What scores are compared with: some rows of the training data, where they lie, and how much the draws disagree there.

Disagreement and distance see different things, so the default score joins them. Every part is a logarithm, counted in standard
deviations over familiar rows, each compared with the others only (leave-one-out):

    disagreement   log u(x), the mean over members
    inputs         log ratio(x) of `offmap.distance`, in the inputs
    layers         the same in what hidden matrices meet, the mean over them

Their mean is the score. Nothing is tuned, and familiar data are all it needs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from offmap._types import Inputs, Weights
from offmap.batches import Batches, sample
from offmap.core.features import features
from offmap.core.inputs import Shared, rows_of, take_rows
from offmap.distance import nearest, relative
from offmap.errors import ShapeError
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

    def state(self) -> Tensor:
        """Both as one tensor, (2,)."""
        return torch.stack([self.centre, self.spread])

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
        own = torch.arange(len(rows), device=rows.device)
        distances, numbers = nearest(scaled, scaled, itself=own)
        spacings = distances.mean(1)
        return Space(scaled, unit, spacings, Scale.of(relative(distances, numbers, spacings)))

    def state(self) -> Weights:
        """Every tensor by name."""
        return {"rows": self.rows, "unit": self.unit, "spacings": self.spacings, "scale": self.scale.state()}

    def __call__(self, x: Tensor) -> Tensor:
        """How strange rows (B, D) are here, (B,)."""
        return self.scale(relative(*nearest(self.rows, x.float() / self.unit), self.spacings))


@dataclass(frozen=True)
class Familiar:
    """Familiar rows in the inputs (None: they are no vectors) and in some layers, and the scale of log u on them.

    `layers` are names of matrices, in the order of `hidden`.
    """

    inputs: Space | None
    hidden: tuple[Space, ...]
    layers: tuple[str, ...]
    disagreement: Scale

    def distance(self, predictive: Predictive, x: Inputs) -> Tensor:
        """The mean over the inputs and the hidden layers taken together, (B,)."""
        return torch.stack(self._distances(predictive, x)).mean(0)

    def join(self, predictive: Predictive, x: Inputs, log_uncertainty: Tensor) -> Tensor:
        """The default score, (B,), from log u (B,)."""
        return torch.stack([self.disagreement(log_uncertainty), *self._distances(predictive, x)]).mean(0)

    def _distances(self, predictive: Predictive, x: Inputs) -> list[Tensor]:
        parts: list[Tensor] = []
        if self.inputs is not None:
            vectors = flat(x)
            if vectors is None or vectors.shape[1] != self.inputs.rows.shape[1]:
                found = "none" if vectors is None else vectors.shape[1]
                raise ShapeError(f"Expected {self.inputs.rows.shape[1]} numbers per input, as at fit time, but got {found}.")
            parts.append(self.inputs(vectors))
        if self.hidden:
            met = layers_of(predictive, x, self.layers)
            parts.append(torch.stack([space(met[n]) for space, n in zip(self.hidden, self.layers, strict=True)]).mean(0))
        return parts

    def to(self, device: str | torch.device) -> Familiar:
        """The same on another device."""
        return Familiar.from_state(self.layers, {name: tensor.to(device) for name, tensor in self.state().items()})

    def state(self) -> Weights:
        """Every tensor by name."""
        spaces = [("inputs", self.inputs)] if self.inputs is not None else []
        spaces += [(f"hidden.{i}", space) for i, space in enumerate(self.hidden)]
        tensors = {f"{name}.{field}": tensor for name, space in spaces for field, tensor in space.state().items()}
        return tensors | {"disagreement": self.disagreement.state()}

    @staticmethod
    def from_state(layers: Sequence[str], tensors: Mapping[str, Tensor]) -> Familiar:
        """What `state` and the layers' names tell."""

        def space(name: str) -> Space:
            rows, unit, spacings, scale = (tensors[f"{name}.{field}"] for field in ("rows", "unit", "spacings", "scale"))
            return Space(rows, unit, spacings, Scale(*scale.unbind()))

        return Familiar(
            inputs=space("inputs") if "inputs.rows" in tensors else None,
            hidden=tuple(space(f"hidden.{i}") for i in range(len(layers))),
            layers=tuple(layers),
            disagreement=Scale(*tensors["disagreement"].unbind()),
        )


def familiar_of(
    predictive: Predictive, train: Batches, log_uncertainty: Callable[[Inputs], Tensor], *, seed: int
) -> Familiar | None:
    """Some training rows, where they lie and how uncertain the draws are there; None if there are no vectors to compare."""
    rows = sample(train, ROWS, seed)
    uncertain = log_uncertainty(rows) if rows_of(rows) >= 3 else None
    if uncertain is None or uncertain.ndim > 1:  # positions have no neighbours here
        return None
    vectors = flat(rows)
    met = layers_of(predictive, rows)
    if vectors is not None:
        met = {n: h for n, h in met.items() if h.shape != vectors.shape or not torch.equal(h, vectors.to(h))}
    layers = spread_out(list(met), LAYERS)
    if vectors is None and not layers:
        return None
    return Familiar(
        inputs=None if vectors is None else Space.of(vectors, standardized=True),
        hidden=tuple(Space.of(met[name], standardized=False) for name in layers),
        layers=tuple(layers),
        disagreement=Scale.of(uncertain),
    )


def flat(x: Inputs) -> Tensor | None:
    """Floating-point inputs as rows, (B, D); None if there are none or too many."""
    size = rows_of(x)
    leaves = [leaf for leaf in tree_leaves(x) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    own = [leaf.reshape(size, -1) for leaf in leaves if not isinstance(leaf, Shared) and leaf.ndim and leaf.shape[0] == size]
    width = sum(leaf.shape[1] for leaf in own)
    return torch.cat(own, 1) if 0 < width <= WIDEST else None


def layers_of(predictive: Predictive, x: Inputs, names: Sequence[str] | None = None) -> dict[str, Tensor]:
    """What the plain first member's matrices meet, (B, D) each; nothing for a Predictive that is no host of ours."""
    plain, host = getattr(predictive, "plain", None), getattr(predictive, "host", None)
    if plain is None or host is None:
        return {}
    weights, step = plain(), max(host.batch_size, 1024)
    parts = [
        features(host.net, weights, take_rows(x, slice(start, start + step)), host.select, names=names)
        for start in range(0, rows_of(x), step)
    ]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def spread_out(names: list[str], most: int) -> list[str]:
    """At most so many of them, evenly spaced, the last among them.

    >>> spread_out(["a", "b", "c", "d", "e"], 2)
    ['b', 'e']
    """
    if len(names) <= most:
        return names
    return [names[(i + 1) * len(names) // most - 1] for i in range(most)]
