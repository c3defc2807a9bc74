"""A cloud of in-distribution rows, and how OOD others are beside them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from offmap._types import Weights
from offmap.scores.distance import nearest, relative

LEAST = 3
"""Fewer rows have no spacing to speak of."""


FAMILIAR = -1.0
"""Below this many standard deviations a part counts as this: no part alone can call an example in-distribution."""


@dataclass(frozen=True)
class Scale:
    """Mean and standard deviation of a part over in-distribution rows, () each; a part that tells them nothing apart counts 0."""

    centre: Tensor
    spread: Tensor

    @staticmethod
    def of(values: Tensor) -> Scale:
        """Of the finite ones among these values, (N,)."""
        kept = values[values.isfinite()]
        if len(kept) < 2:
            kept = values.new_zeros(2)
        return Scale(kept.mean(), kept.std(correction=0))

    def state(self) -> Tensor:
        """Both as one tensor, (2,)."""
        return torch.stack([self.centre, self.spread])

    def __call__(self, values: Tensor) -> Tensor:
        """In standard deviations above the mean, FAMILIAR at least.

        Far from the data a classifier may be sure of itself in every draw: that is no reason to trust it, and must not outweigh
        the distance.

        >>> Scale.of(torch.tensor([1.0, 3.0]))(torch.tensor([5.0, -90.0, torch.inf]))
        tensor([ 3., -1., inf])
        """
        if float(self.spread) < 1e-6 * (1 + abs(float(self.centre))):
            return torch.where(values.isfinite(), 0.0, values)
        return ((values - self.centre) / self.spread).clamp_min(FAMILIAR)


@dataclass(frozen=True)
class KNNDistance:
    """In-distribution rows (N, D) around `centre` (D,) in units of `unit` (D,), how far apart they are (N,), and the scale of their own
    log ratios.
    """

    rows: Tensor
    centre: Tensor
    unit: Tensor
    spacings: Tensor
    scale: Scale

    @staticmethod
    def of(rows: Tensor, *, standardized: bool, even: bool = False) -> KNNDistance | None:
        """A space around the finite ones of these rows; None if they are too few or all the same.

        `standardized` divides columns by their standard deviation, unless that is 0. `even`: all rows count as equally far apart,
        so that the plain distance is told.
        """
        kept = rows[rows.isfinite().all(1)].double()
        if len(kept) < LEAST or torch.equal(kept, kept[:1].expand_as(kept)):
            return None
        centre, unit = kept.mean(0), torch.ones_like(kept[0])
        if standardized:  # the mean of equal numbers is not always that number, so the standard deviation does not tell
            unit = torch.where(kept.amax(0) > kept.amin(0), kept.std(0, correction=0), unit)
        # half precision was enough for the model, not for what is made of it here
        scaled = ((kept - centre) / unit).to(torch.promote_types(rows.dtype, torch.float32))
        distances, numbers = nearest(scaled, scaled, itself=torch.arange(len(scaled), device=scaled.device))
        spacings = distances.mean(1)
        if even:
            spacings = spacings.mean().expand(len(spacings)).contiguous()
        return KNNDistance(scaled, centre, unit, spacings, Scale.of(relative(distances, numbers, spacings)))

    def state(self) -> Weights:
        """Every tensor by name."""
        return {
            "rows": self.rows,
            "centre": self.centre,
            "unit": self.unit,
            "spacings": self.spacings,
            "scale": self.scale.state(),
        }

    @staticmethod
    def from_state(tensors: Mapping[str, Tensor]) -> KNNDistance:
        """What `state` tells."""
        return KNNDistance(**{**tensors, "scale": Scale(*tensors["scale"].unbind())})  # pyright: ignore[reportArgumentType]

    def __call__(self, x: Tensor) -> Tensor:
        """How OOD rows (B, D) are here, (B,)."""
        return self.scale(self.ratio(x))

    def ratio(self, x: Tensor) -> Tensor:
        """The log ratio of rows (B, D), as it is, (B,)."""
        scaled = ((x.double() - self.centre) / self.unit).to(self.rows.dtype)
        return relative(*nearest(self.rows, scaled), self.spacings)

    def rescaled(self, x: Tensor) -> KNNDistance:
        """The same space, its scale from other in-distribution rows (B, D)."""
        return replace(self, scale=Scale.of(self.ratio(x)))
