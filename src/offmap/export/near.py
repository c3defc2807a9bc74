"""How far rows are from in-distribution ones, and from which layers: as operations of a graph, any number of rows at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from offmap._types import Weights
from offmap.export.passes import Passed
from offmap.scores.distance import NEIGHBOURS, relative


class Scaled(nn.Module):
    """Numbers in standard deviations above the in-distribution mean, `least` at least; 0 where in-distribution ones are all the same."""

    def __init__(self, centre: float, spread: float, least: float) -> None:
        super().__init__()
        self.centre, self.spread, self.least = centre, spread, least

    def forward(self, values: Tensor) -> Tensor:
        """(B,) -> (B,)."""
        if self.spread < 1e-6 * (1 + abs(self.centre)):
            return torch.where(values.isfinite(), 0.0, values)
        return ((values - self.centre) / self.spread).clamp_min(self.least)


class Near(nn.Module):
    """In-distribution rows (N, D), and the scaled log ratio of how far others are: `offmap.scores.distance`, without blocks.

    `rows` are centred, so that little cancels in |x − row|² − |x|² = |row|² − 2 x·row, which finds the nearest.
    """

    rows: Tensor
    centre: Tensor
    unit: Tensor
    spacings: Tensor

    def __init__(self, tensors: Weights, scale: Scaled) -> None:
        super().__init__()
        for name in ("rows", "centre", "unit", "spacings"):
            self.register_buffer(name, tensors[name].detach().clone())
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        """How OOD rows (B, D) are here, (B,)."""
        x, apart = self._apart(x)
        numbers = apart.topk(min(NEIGHBOURS, len(self.rows) - 1), dim=1, largest=False).indices
        distances = (self.rows[numbers].double() - x.double().unsqueeze(1)).square().sum(2).sqrt()
        return self.scale(relative(distances, numbers, self.spacings))

    def _apart(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The scaled rows, and |x − row|² − |x|², (B, N)."""
        x = ((x.double() - self.centre) / self.unit).to(self.rows.dtype)
        near = self.rows.float()
        return x, near.square().sum(1) - 2 * (x.float() @ near.mT)

    def undecided(self, x: Tensor) -> Tensor:
        """Rows (B, D) whose k-th and next neighbour are equally far up to rounding, (B,): either may count, on any machine."""
        x, apart = self._apart(x)
        count = min(NEIGHBOURS, len(self.rows) - 1)
        last, after = apart.topk(count + 1, dim=1, largest=False).values[:, -2:].unbind(1)
        size = x.float().square().sum(1) + self.rows.float().square().sum(1).amax()
        return after - last <= 1e-5 * size


class Layers(nn.Module):
    """What named matrices of all plain members meet, side by side: `directions` (D, NARROW) turn those that are wide.

    Of `pictures`, every member's vectors have length one.
    """

    def __init__(self, names: Sequence[str], directions: Weights, *, pictures: bool) -> None:
        super().__init__()
        self.names, self.pictures, self.wide = tuple(names), pictures, tuple(directions)
        for place, name in enumerate(directions):
            self.register_buffer(f"directions{place}", directions[name].clone())

    def forward(self, passed: Passed) -> list[Tensor]:
        """(B, D) for each name."""
        found: list[Tensor] = []
        for name in self.names:
            each = [met[name] for met in passed.met]
            if self.pictures:
                each = [F.normalize(rows.double(), dim=1).float() for rows in each]
            rows = torch.cat(each, 1)
            if name in self.wide:
                directions: Tensor = getattr(self, f"directions{self.wide.index(name)}")
                rows = rows.to(directions.dtype) @ directions
            found.append(rows)
        return found
