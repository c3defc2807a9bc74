"""PixMix (Hendrycks et al., 2022): images are mixed with fractals and with altered copies of themselves, again and again."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from offmap.random import generator
from offmap_bench.classifiers.training import Moment, TrainConfig, TrainingMethod

FRACTALS = 256


@dataclass(frozen=True)
class Config(TrainConfig):
    """At most `rounds` of mixing, by weights of Beta(beta, 1); copies are altered by up to `severity` of 10."""

    rounds: int = 4
    beta: float = 3.0
    severity: float = 3.0


@lru_cache(maxsize=4)
def fractals(channels: int, side: int) -> Tensor:
    """Draw attractors of random contractions (iterated function systems, Barnsley, 1988), always the same: (256, K, side, side).

    Points jump by one of four maps of the plane, chosen at random. Each map has a colour, and the ground another one; a pixel
    shows the mean colour of the points that came there, by the logarithm of their number.
    """
    random, count, maps = generator("fractals"), FRACTALS, 4

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return low + (high - low) * torch.rand(count, *shape, generator=random, device="cpu")

    left, right = (
        torch.stack([a.cos(), -a.sin(), a.sin(), a.cos()], 2).unflatten(2, (2, 2)) for a in uniform(0, 7, 2, maps).mT.unbind(2)
    )
    matrix = left @ (uniform(0.4, 0.9, maps, 2, 1) * right)
    shift, colour, ground = uniform(-1, 1, maps, 2), uniform(0, 1, maps, channels), uniform(0, 1, 1, channels)
    rows, at, path = torch.arange(count)[:, None], torch.zeros(count, 64, 2), list[tuple[Tensor, Tensor]]()
    for _ in range(120):
        chosen = torch.randint(0, maps, at.shape[:2], generator=random, device="cpu")
        at = (matrix[rows, chosen] @ at[..., None])[..., 0] + shift[rows, chosen]
        path.append((at, F.pad(colour[rows, chosen], (0, 1), value=1.0)))
    where, paint = (torch.cat(parts, 1) for parts in zip(*path[20:], strict=True))  # the first ones are on their way
    low, high = where.amin(1, keepdim=True), where.amax(1, keepdim=True)
    row, column = ((where - low) / (high - low) * (side - 1)).round().long().unbind(2)
    index = (row * side + column)[..., None].expand_as(paint)
    *paints, number = torch.zeros(count, side * side, channels + 1).scatter_add(1, index, paint).unbind(2)
    shown = (number.log1p() / number.log1p().amax(1, keepdim=True))[..., None]
    images = ground + shown * (torch.stack(paints, 2) / number.clamp_min(1)[..., None] - ground)
    return images.mT.unflatten(2, (side, side))


def alter(x: Tensor, severity: float, random: torch.Generator) -> Tensor:
    """Each image turned, sheared or shifted (in two ways each), posterised, solarised, or stretched to full contrast."""
    kind = torch.randint(0, 8, (len(x),), generator=random, device="cpu")
    level = (0.1 + (severity - 0.1) * torch.rand(len(x), generator=random, device="cpu")) / 10
    signed = torch.where(torch.rand(len(x), generator=random, device="cpu") < 0.5, level, -level)
    angle = torch.where(kind == 0, signed * math.pi / 6, 0.0)
    theta = torch.stack([torch.stack([angle.cos(), -angle.sin()], 1), torch.stack([angle.sin(), angle.cos()], 1)], 1)
    theta = F.pad(theta, (0, 1))
    for number, (row, column, most) in enumerate(((0, 1, 0.3), (1, 0, 0.3), (0, 2, 2 / 3), (1, 2, 2 / 3)), 1):
        theta[:, row, column] += torch.where(kind == number, signed * most, 0.0)
    moved = F.grid_sample(x, F.affine_grid(theta.to(x), list(x.shape), align_corners=False), align_corners=False)
    kind, level = kind.to(x.device).view(-1, 1, 1, 1), level.to(x).view(-1, 1, 1, 1)
    shades = 2 ** (4 - (4 * level).floor())
    low, high = x.amin((1, 2, 3), keepdim=True), x.amax((1, 2, 3), keepdim=True)
    others = (shades.mul(x).floor() / shades, torch.where(x < 1 - level, x, 1 - x), (x - low) / (high - low).clamp_min(1e-6))
    for number, image in enumerate(others, 5):
        moved = torch.where(kind == number, image, moved)
    return moved


def mix(first: Tensor, second: Tensor, a: Tensor, b: Tensor, adds: Tensor) -> Tensor:
    """Add, (a·(2x − 1) + b·(2z − 1) + 1) / 2, or multiply, (2x)^a·(2z)^b / 2; cut to 0 … 1.

    >>> one = torch.ones(2)
    >>> mix(0.25 * one, 0.75 * one, one, one, torch.tensor([True, False]))
    tensor([0.5000, 0.3750])
    """
    total = (a * (2 * first - 1) + b * (2 * second - 1) + 1) / 2
    product = (2 * first).clamp_min(1e-37) ** a * (2 * second).clamp_min(1e-37) ** b / 2
    return torch.where(adds, total, product).clamp(0, 1)


def draw_weights(rows: int, beta: float, random: torch.Generator) -> tuple[Tensor, Tensor]:
    """Half of the rows: a of Beta(β, 1), b of Beta(1, β); the others: 1 + a′ and −b of Beta(1, β); (B, 1, 1, 1) each."""
    first, second, coin = torch.rand(3, rows, 1, 1, 1, generator=random, device="cpu")
    small, b = 1 - first ** (1 / beta), 1 - second ** (1 / beta)
    return torch.where(coin < 0.5, 1 - small, 1 + small), torch.where(coin < 0.5, b, -b)


def pixmix(x: Tensor, config: Config, random: torch.Generator) -> Tensor:
    """Start from the image or an altered copy; a random number of times mix with a fractal or an altered copy."""

    def coin() -> Tensor:
        return (torch.rand(len(x), 1, 1, 1, generator=random, device="cpu") < 0.5).to(x.device)

    sources = fractals(x.shape[1], x.shape[2])
    mixed = torch.where(coin(), alter(x, config.severity, random), x)
    rounds = torch.randint(0, config.rounds + 1, (len(x), 1, 1, 1), generator=random, device="cpu").to(x.device)
    for number in range(config.rounds):
        chosen = torch.randint(0, FRACTALS, (len(x),), generator=random, device="cpu")
        other = torch.where(coin(), alter(x, config.severity, random), sources[chosen].to(x))
        a, b = (weight.to(x) for weight in draw_weights(len(x), config.beta, random))
        mixed = torch.where(number < rounds, mix(mixed, other, a, b, coin()), mixed)
    return mixed


def pixmix_loss(net: nn.Module, x: Tensor, y: Tensor, config: Config, moment: Moment) -> Tensor:
    """The cross-entropy of mixed images."""
    return F.cross_entropy(net(pixmix(x, config, moment.random)), y)


METHOD = TrainingMethod(Config, pixmix_loss)
