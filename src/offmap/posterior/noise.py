"""Addressable noise: z is a function of (seed, stream, member, draw, parameter name) and of nothing else.

A new law is one class: subclass `Noise`, and put an instance of it in `NOISES` to choose it by name and to save it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from offmap._types import Weights
from offmap.errors import ConfigError, nearest
from offmap.random import generator

Stream: TypeAlias = Literal["fit", "valid", "infer", "order", "split", "init"]
"""What the noise is for; streams never share a number."""


class Noise(ABC):
    """The law of one component of z: zero-mean, symmetric, the same for all weights. A dataclass, to be saved with its fields."""

    @abstractmethod
    def sample(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Draw independent components, float32 on the CPU, from this generator alone."""

    @abstractmethod
    def variance(self) -> float:
        """Return E[z²]."""

    def entropy(self) -> float | None:
        """Return the differential entropy of one component in nats; None if the law has no density."""
        return None

    def density_entropy(self) -> float:
        """Return `entropy`, or raise a ConfigError if there is none."""
        if (entropy := self.entropy()) is None:
            kind = type(self).__name__
            raise ConfigError(f"{kind} noise has no density, so its weight entropy is not defined; use 'uniform' or 'normal'.")
        return entropy

    def truncated_entropy(self, t: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return P(|z| < t) and −∫_{|z|<t} f log f dz, in the shape of t, for clipped draws; None if they are not known."""
        return None


# torch's default dtype and device may be others: the numbers must depend on the address alone


@dataclass(frozen=True)
class Uniform(Noise):
    """U(−h, h); h = √3 has unit variance.

    >>> round(Uniform().entropy(), 4)
    1.2425
    """

    half_width: float = math.sqrt(3.0)

    def __post_init__(self) -> None:
        if not 0 < self.half_width < math.inf:
            raise ConfigError(f"Expected `half_width` to be a number above 0, but got {self.half_width!r}.")

    def sample(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Draw from −h to h."""
        empty = torch.empty(shape, dtype=torch.float32, device="cpu")
        return empty.uniform_(-self.half_width, self.half_width, generator=generator)

    def variance(self) -> float:
        """Return h²/3."""
        return self.half_width**2 / 3.0

    def entropy(self) -> float:
        """Return log 2h."""
        return math.log(2.0 * self.half_width)

    def truncated_entropy(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """Return p = t/h, and p·log 2h."""
        p = (t / self.half_width).clamp_max(1.0)
        return p, p * self.entropy()


@dataclass(frozen=True)
class Normal(Noise):
    """N(0, 1)."""

    def sample(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Draw standard normal numbers."""
        return torch.empty(shape, dtype=torch.float32, device="cpu").normal_(generator=generator)

    def variance(self) -> float:
        """Return 1."""
        return 1.0

    def entropy(self) -> float:
        """Return ½ log 2πe."""
        return 0.5 * math.log(2.0 * math.pi * math.e)

    def truncated_entropy(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """Return p = erf(t/√2), and ½ log 2π · p + ½ E[z²; |z| < t]."""
        p = torch.erf(t / math.sqrt(2.0))
        edge = 2 * t * torch.exp(-t.square() / 2) / math.sqrt(2.0 * math.pi)
        return p, 0.5 * (math.log(2.0 * math.pi) * p + p - torch.where(t.isinf(), 0.0, edge))


@dataclass(frozen=True)
class Rademacher(Noise):
    """±1 with equal odds. It has no density, hence no entropy."""

    def sample(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Draw signs."""
        return torch.empty(shape, dtype=torch.float32, device="cpu").bernoulli_(0.5, generator=generator).mul_(2.0).sub_(1.0)

    def variance(self) -> float:
        """Return 1."""
        return 1.0


NOISES: dict[str, Noise] = {"uniform": Uniform(), "normal": Normal(), "rademacher": Rademacher()}
"""Laws by name, each with its default numbers. Add your own here: `NOISES["laplace"] = Laplace()`."""


def as_noise(noise: str | Noise) -> Noise:
    """Return the noise of that name, or the object itself."""
    if isinstance(noise, Noise):
        return noise
    if not isinstance(noise, str):
        raise ConfigError(f"Expected `noise` to be a name or an `offmap.posterior.noise.Noise`, but got {noise!r}.")
    if noise not in NOISES:
        raise ConfigError(f"Expected `noise` to be {nearest(noise, NOISES)}, but got {noise!r}.")
    return NOISES[noise]


def noise_state(noise: Noise) -> dict[str, Any]:
    """Describe a registered noise for a file: its name, and its numbers."""
    name = next((name for name, registered in NOISES.items() if type(registered) is type(noise)), None)
    if name is None:
        raise ConfigError(
            "A guard with noise of your own cannot be saved: a file holds no code. Register it by name, `offmap.posterior.noise."
            f"NOISES['{type(noise).__name__.lower()}'] = {type(noise).__name__}()`, here and wherever the file is loaded."
        )
    return {"name": name, "state": asdict(noise)}  # pyright: ignore[reportArgumentType, reportCallIssue]


def noise_from_state(state: Mapping[str, Any]) -> Noise:
    """Build the noise that `noise_state` describes."""
    return type(as_noise(state["name"]))(**state["state"])


def draw_noise(like: Mapping[str, Tensor], index: Iterable[int], *, seed: int, stream: Stream, noise: Noise) -> Weights:
    """Draw noise for the draws in `index` of every member, in the tensors' dtype: {name: (M, ...)} -> {name: (M, P, ...)}."""
    draws = list(index)
    result: Weights = {}
    for name, tensor in like.items():
        members, shape = tensor.shape[0], tuple(tensor.shape[1:])
        rows = [noise.sample(shape, generator(seed, stream, m, draw, name)) for m in range(members) for draw in draws]
        # large models draw one at a time: no copy
        z = rows[0].unsqueeze(0) if len(rows) == 1 else torch.stack(rows) if rows else tensor.new_empty(0, *shape)
        result[name] = z.unflatten(0, (members, len(draws))).to(tensor)
    return result
