"""Addressable noise: z is a function of (seed, stream, member, draw, parameter name) and of nothing else."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor

from offmap._types import Weights
from offmap.errors import ConfigError, nearest
from offmap.random import generator

Stream: TypeAlias = Literal["fit", "valid", "infer", "order", "split", "init"]
"""What the noise is for; streams never share a number."""


@runtime_checkable
class Noise(Protocol):
    """Where z comes from: a zero-mean law that can be sampled, with its entropy at unit scale."""

    def sample(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Independent draws, float32 on the CPU."""
        ...

    def entropy(self) -> float:
        """Differential entropy of one component, in nats."""
        ...


@dataclass(frozen=True)
class Uniform:
    """U(−h, h); h = √3 has unit variance. Entropy log 2h.

    >>> round(Uniform().entropy(), 4)
    1.2425
    """

    half_width: float = math.sqrt(3.0)

    def sample(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Independent draws, float32 on the CPU."""
        return _empty(shape).uniform_(-self.half_width, self.half_width, generator=generator)

    def entropy(self) -> float:
        """Log 2h."""
        return math.log(2.0 * self.half_width)

    def inside(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """P(|z| < t), and what that range has of the entropy."""
        p = (t / self.half_width).clamp_max(1.0)
        return p, p * self.entropy()

    def variance(self) -> float:
        """h²/3."""
        return self.half_width**2 / 3.0


@dataclass(frozen=True)
class Normal:
    """N(0, 1). Entropy ½ log 2πe."""

    def sample(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Independent draws, float32 on the CPU."""
        return _empty(shape).normal_(generator=generator)

    def entropy(self) -> float:
        """½ log 2πe."""
        return 0.5 * math.log(2.0 * math.pi * math.e)

    def inside(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """P(|z| < t), and what that range has of the entropy: ½ log 2π · p + ½ E[z²; |z| < t]."""
        p = torch.erf(t / math.sqrt(2.0))
        edge = 2 * t * torch.exp(-t.square() / 2) / math.sqrt(2.0 * math.pi)
        return p, 0.5 * (math.log(2.0 * math.pi) * p + p - torch.where(t.isinf(), 0.0, edge))

    def variance(self) -> float:
        """1."""
        return 1.0


@dataclass(frozen=True)
class Rademacher:
    """±1 with equal odds. It has no density, hence no entropy."""

    def sample(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Independent draws, float32 on the CPU."""
        return _empty(shape).bernoulli_(0.5, generator=generator).mul_(2.0).sub_(1.0)

    def entropy(self) -> float:
        """Raise: a discrete law has no density."""
        raise ConfigError("Rademacher noise has no density, so its weight entropy is not defined; use 'uniform' or 'normal'.")


def _empty(shape: tuple[int, ...]) -> Tensor:
    # whatever torch's default dtype and device are: the numbers must depend on the address alone
    return torch.empty(shape, dtype=torch.float32, device="cpu")


NOISES: dict[str, Noise] = {"uniform": Uniform(), "normal": Normal(), "rademacher": Rademacher()}


def as_noise(noise: str | Noise) -> Noise:
    """The noise of that name, or the object itself if it can `sample` and knows its `entropy`."""
    if isinstance(noise, str):
        if noise not in NOISES:
            raise ConfigError(f"Expected `noise` to be {nearest(noise, NOISES)}, but got {noise!r}.")
        return NOISES[noise]
    if not isinstance(noise, Noise):
        raise ConfigError(f"Expected `noise` to be a name or an object with `sample` and `entropy`, but got {noise!r}.")
    return noise


def draw_noise(like: Mapping[str, Tensor], index: Iterable[int], *, seed: int, stream: Stream, noise: Noise) -> Weights:
    """Noise for the draws in `index` of every member, in the tensors' dtype: {name: (M, ...)} -> {name: (M, P, ...)}.

    >>> z = draw_noise({"w": torch.zeros(1, 2)}, [7], seed=0, stream="infer", noise=Uniform())
    >>> again = draw_noise({"w": torch.zeros(1, 2)}, range(5, 8), seed=0, stream="infer", noise=Uniform())
    >>> torch.equal(z["w"][:, 0], again["w"][:, 2])
    True
    """
    draws = list(index)
    result: Weights = {}
    for name, tensor in like.items():
        shape = tuple(tensor.shape[1:])
        rows = [
            noise.sample(shape, generator(seed, stream, member, draw, name))
            for member in range(tensor.shape[0])
            for draw in draws
        ]
        z = rows[0].unsqueeze(0) if len(rows) == 1 else torch.stack(rows) if rows else _empty((0, *shape))
        result[name] = z.unflatten(0, (tensor.shape[0], len(draws))).to(tensor)
    return result
