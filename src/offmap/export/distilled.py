"""A score from one plain pass: a small net learns what a guard says of in-distribution rows, and of OOD ones made of them.

What one plain member makes of an example, its inputs and what its hidden layers meet, is known after one pass. A head of three
small layers reads the guard's score off it:

    score(x) = c + s·sinh(head(W·(features(x) − m)))

with c and s the middle and the spread of the guard's scores on in-distribution data, and W the whitening of in-distribution features, which
becomes part of the head's first layer. OOD rows are made of in-distribution ones alone: nothing else is ever seen.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import skip_init

from offmap._types import Inputs
from offmap.data import Batch, Rows
from offmap.export.passes import Passed
from offmap.maxwent.train import adam, minimize
from offmap.posterior.noise import Normal
from offmap.random import generator

WIDTH = 64
"""Units of the head's hidden layers."""

STEPS, BATCH, RATE = 1500, 256, 3e-3
"""Of the head's training with Adam; the rate rises over a tenth of the steps and falls like a cosine."""

FLOOR = 3e-2
"""Directions in which in-distribution features vary less than this share of the most are not stretched further."""

LARGEST = 30.0
"""Of the head's output: sinh of it is what float32 can hold with ease."""


def strange(rows: Tensor, count: int, seed: int = 0) -> Tensor:
    """Rows near in-distribution ones (N, D), between them, beside them and far away, (count, D); the recipe is the same for all data.

    Two sixths lie on lines through two rows, up to half their distance beyond; a sixth there with some noise; a sixth are rows
    with little to much noise; a sixth have some columns from other rows; the rest fill a box around all, or are scaled up.

    >>> strange(torch.eye(3), 12).shape
    torch.Size([12, 3])
    """
    source, sixth = generator(seed, "strange"), count // 6
    middle, unit = rows.mean(0), rows.std(0, correction=0)

    def between(shape: tuple[int, ...], low: float, high: float) -> Tensor:
        return (low + (high - low) * torch.rand(shape, generator=source, device="cpu")).to(rows)

    def picked(size: int) -> Tensor:
        return rows[torch.randint(len(rows), (size,), generator=source, device="cpu").to(rows.device)]

    def lines(size: int) -> Tensor:
        first, second = picked(size), picked(size)
        return first + between((size, 1), -0.5, 1.5) * (second - first)

    def noise(size: int, low: float, high: float) -> Tensor:
        normal = Normal().sample((size, rows.shape[1]), source).to(rows)
        return unit * normal * 10 ** between((size, 1), low, high)

    def shuffled(size: int) -> Tensor:
        places = torch.randint(len(rows), (size, rows.shape[1]), generator=source, device="cpu").to(rows.device)
        other = between((size, rows.shape[1]), 0, 1) < between((size, 1), 0, 1)
        return torch.where(other, rows.gather(0, places), picked(size))

    low, high, half = rows.amin(0), rows.amax(0), (count - 5 * sixth) // 2
    box = low + (high - low) * between((half, rows.shape[1]), 0, 1)
    parts = [
        lines(2 * sixth),
        lines(sixth) + noise(sixth, -2.5, -0.5),
        picked(sixth) + noise(sixth, -2.0, 0.3),
        shuffled(sixth),
        middle + (box - middle) * between((half, 1), 0.5, 1.5),
        middle + (picked(count - 5 * sixth - half) - middle) * between((count - 5 * sixth - half, 1), 1, 3),
    ]
    return torch.cat(parts)


class Looks(nn.Module):
    """What is known of an example after one pass: its inputs and what named layers of the first member meet, (B, D).

    Of those wider than `narrow`, {place: (D, narrow)} are the directions that are kept: place 0 is the inputs.
    """

    def __init__(self, names: Sequence[str], narrow: dict[int, Tensor]) -> None:
        super().__init__()
        self.names, self.narrow = tuple(names), tuple(narrow)
        for place, directions in narrow.items():
            self.register_buffer(f"directions{place}", directions.clone())

    def forward(self, inputs: Inputs, passed: Passed | None) -> Tensor:
        """One tensor of B rows, and what a pass over it showed."""
        assert isinstance(inputs, Tensor)
        met = [] if passed is None else [passed.met[0][name] for name in self.names]
        parts = [inputs.flatten(1), *met]
        for place in self.narrow:
            directions: Tensor = getattr(self, f"directions{place}")
            parts[place] = parts[place].to(directions.dtype) @ directions
        return torch.cat([part.to(torch.promote_types(part.dtype, torch.float32)) for part in parts], 1)


class Head(nn.Module):
    """Three small layers and the scale of the guard's scores: (B, D) -> (B,)."""

    def __init__(self, width: int, centre: float, spread: float, seed: int = 0) -> None:
        super().__init__()
        self.first, self.second, self.last = (
            _started(inputs, outputs, generator(seed, "head", place))
            for place, (inputs, outputs) in enumerate([(width, WIDTH), (WIDTH, WIDTH), (WIDTH, 1)])
        )
        self.centre, self.spread = centre, spread

    def bent(self, features: Tensor) -> Tensor:
        """Asinh of the scaled score, which the head learns, (B,)."""
        return self.last(F.relu(self.second(F.relu(self.first(features))))).squeeze(1)

    def forward(self, features: Tensor) -> Tensor:
        """The score, (B,); what is not finite is infinitely OOD."""
        bent = self.bent(features.to(self.first.weight)).clamp(-LARGEST, LARGEST)
        return (self.centre + self.spread * bent.sinh()).nan_to_num(nan=torch.inf, posinf=torch.inf)


def _started(inputs: int, outputs: int, source: torch.Generator) -> nn.Linear:
    """A layer with small random weights, so that what is not learned stays smooth, and no bias."""
    # without its own start: it would draw from the global generator
    layer = skip_init(nn.Linear, inputs, outputs, device="cpu", dtype=torch.float32)
    assert isinstance(layer, nn.Linear)
    with torch.no_grad():
        layer.weight.copy_(Normal().sample((outputs, inputs), source) * (3 * inputs) ** -0.5)
        layer.bias.zero_()
    return layer


def distil(features: Tensor, scores: Tensor, familiar: Tensor, levels: Tensor, *, seed: int = 0) -> Head:
    """A head for the guard's `scores` (N,) of rows with these `features` (N, D), whitened as the `familiar` ones (n, D) are.

    `levels` (n,) are the guard's scores of in-distribution data: their median and the half of what 68 % span set the scale.
    """
    levels = levels[levels.isfinite()].double()
    levels = levels if len(levels) else levels.new_zeros(1)
    low, centre, high = levels.quantile(levels.new_tensor([0.16, 0.5, 0.84])).tolist()
    spread = (high - low) / 2 or 1.0
    head = Head(features.shape[1], centre, spread, seed).to(features.device)
    turn, shift = whitening(familiar)
    wanted = ((scores.double() - centre) / spread).nan_to_num(nan=torch.inf).clamp(-1e9, 1e9).asinh().float()
    data = Rows((features.double() @ turn + shift).float(), wanted, BATCH, "the guard's scores")

    def objective(step: int, batch: Batch) -> Tensor:
        x, y = batch
        assert isinstance(x, Tensor)
        return F.smooth_l1_loss(head.bent(x), y)

    minimize(objective, adam(head.parameters(), lr=RATE), data, steps=STEPS, seed=seed, schedule=_rate)
    with torch.no_grad():  # W·(f − m) becomes part of the first layer
        weight, bias = head.first.weight, head.first.bias
        bias.copy_(bias.double() + weight.double() @ shift)
        weight.copy_(weight.double() @ turn.mT)
    return head.requires_grad_(False).eval()


def whitening(familiar: Tensor) -> tuple[Tensor, Tensor]:
    """W (D, D) and −m·W (D,) in float64: in-distribution features (n, D) times W, plus the shift, are uncorrelated and of variance 1,
    or less where they hardly vary.
    """
    rows = familiar.double()
    middle = rows.mean(0)
    values, vectors = torch.linalg.eigh((rows - middle).mT @ (rows - middle) / len(rows))
    size = values.clamp_min(0).sqrt()
    turn = vectors / size.clamp_min(FLOOR * float(size.max()) or 1.0)
    return turn, -middle @ turn


def _rate(step: int) -> float:
    return min(1.0, 10 * (step + 1) / STEPS) * (1 + math.cos(math.pi * step / STEPS)) / 2


class Plain(nn.Module):
    """Outputs of the plain members, one weight set each, (M, B, ...), where drawn ones would be."""

    def forward(self, inputs: Inputs, passed: Passed) -> Tensor:
        """What the pass gave."""
        return torch.stack(passed.outputs)


class Distilled(nn.Module):
    """The score that the head reads off one pass, (B,)."""

    def __init__(self, looks: Looks, head: Head) -> None:
        super().__init__()
        self.looks, self.head = looks, head

    def forward(self, inputs: Inputs, outputs: Tensor | None, passed: Passed | None) -> Tensor:
        """Inputs of B rows and what a pass over them showed -> (B,)."""
        return self.head(self.looks(inputs, passed))
