"""The one equation: w = w̄ + V·clip(φ ⊙ z, c) with φ = softplus(u), for any number of members at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from offmap._types import Weights
from offmap.core.basis import rotate
from offmap.core.mirror import Mirror
from offmap.core.noise import Noise, Stream, Uniform, draw_noise
from offmap.core.weights import count
from offmap.errors import ConfigError

REMEMBERED = 1 << 23
"""Noise, and weights drawn from it, of at most this many numbers are kept between calls (32 MB in float32 each)."""


@dataclass(frozen=True)
class Parameterization:
    """A user's own ω(z, φ) with its log-density, for weight laws whose entropy has no closed form.

    `omega(mean, scale, z)` gives weights, all name-keyed with leading axes (members, draws); `log_density(weights, mean, scale)`
    gives log q(w) in nats, (members, draws). The entropy is then −E[log q(w)], estimated by sampling.
    """

    omega: Callable[[Weights, Weights, Weights], Weights]
    log_density: Callable[[Weights, Weights, Weights], Tensor]


@dataclass(frozen=True)
class Rotation:
    """The bases V (M, D, D) of rotated parameters and the fan-in axes each runs along, by name."""

    matrices: Weights = field(default_factory=dict)
    axes: dict[str, tuple[int, ...]] = field(default_factory=dict)


class WeightDistribution(nn.Module):
    """q(w): every tensor has a leading member axis M. `mean` and `raw_scale` are name-keyed like the host.

    `fixed` holds what differs between members without being random (other parameters, buffers); with one member the host has it.

    >>> q = WeightDistribution({"w": torch.zeros(1, 3)}, initial_scale=2.0)
    >>> q.draw(range(5))["w"].shape, round(q.mean_log_square().item(), 4)
    (torch.Size([5, 3]), 1.3863)
    """

    def __init__(
        self,
        mean: Mapping[str, Tensor],
        *,
        initial_scale: float | Mapping[str, Tensor] = 1e-3,
        rotation: Rotation | None = None,
        fixed: Mapping[str, Tensor] | None = None,
        noise: Noise | None = None,
        parameterization: Parameterization | None = None,
        trainable_mean: bool = False,
    ) -> None:
        super().__init__()
        rotation = rotation or Rotation()
        start = initial_scale if isinstance(initial_scale, Mapping) else _constant(mean, initial_scale)
        self.mean = Mirror(mean, trainable=trainable_mean)
        self.raw_scale = Mirror({n: inverse_softplus(s) for n, s in start.items()}, trainable=True)
        self.rotation = Mirror(rotation.matrices)
        self.axes = rotation.axes
        self.fixed = Mirror(fixed or {})
        self.noise = noise or Uniform()
        self.parameterization = parameterization
        self._last: tuple[object, Weights] | None = None

    @property
    def members(self) -> int:
        """How many hosts the distribution is centred on."""
        return next(iter(self.mean.values())).shape[0]

    @property
    def dimension(self) -> int:
        """d, the number of random weights of one member."""
        return count(dict(self.mean.items())) // self.members

    def scale(self) -> Weights:
        """φ = softplus(u) > 0, {name: (M, ...)}."""
        return {name: F.softplus(raw) for name, raw in self.raw_scale.items()}

    @torch.no_grad()
    def set_scale(self, scale: Mapping[str, Tensor]) -> None:
        """Write φ (floored where softplus has no inverse)."""
        for name, raw in self.raw_scale.items():
            raw.copy_(inverse_softplus(scale[name]))

    def version(self) -> tuple[int, ...]:
        """Numbers that change whenever someone writes to the mean or to φ."""
        tensors = [*self.mean.values(), *self.raw_scale.values()]
        return tuple(n for t in tensors for n in (t.data_ptr(), 0 if t.is_inference() else t._version))

    def draw(
        self,
        index: Iterable[int],
        *,
        seed: int = 0,
        stream: Stream = "infer",
        clip: float | None = None,
        scale: Mapping[str, Tensor] | None = None,
    ) -> Weights:
        """The draws in `index` of every member, member-major: {name: (M·P, ...)}; differentiable in φ.

        `clip` bounds |φ ⊙ z| before the rotation: 0 gives the host's weights to the bit, None or inf no bound.
        """
        if clip is not None and not clip >= 0:
            raise ConfigError(f"Expected `clip` to be a number ≥ 0 or None, but got {clip!r}.")
        index = list(index)
        mean = dict(self.mean.items())
        if clip == 0:
            drawn = {n: _repeat(m, len(index)) for n, m in mean.items()}
        else:
            scale = dict(self.scale() if scale is None else scale)
            z = self._noise(scale, index, seed, stream)
            drawn = {n: w.flatten(0, 1) for n, w in self._combine(mean, scale, z, clip).items()}
        return drawn | {n: _repeat(t, len(index)) for n, t in self.fixed.items()}

    def _noise(self, like: Weights, index: list[int], seed: int, stream: Stream) -> Weights:
        """z, remembered from the last time when it is small and will be asked for again."""
        where = next(iter(like.values()))
        key = (tuple(index), seed, stream, where.device, where.dtype)
        last = self._last  # read once: another thread may replace it
        if last is not None and last[0] == key:
            return last[1]
        z = draw_noise(like, index, seed=seed, stream=stream, noise=self.noise)
        if stream != "fit" and self.dimension * self.members * len(index) <= REMEMBERED:
            self._last = (key, z)
        return z

    def _combine(self, mean: Weights, scale: Weights, z: Weights, clip: float | None) -> Weights:
        """Mean and scale (M, ...), noise (M, P, ...) -> weights (M, P, ...): the equation itself."""
        mean, scale = _with_draw_axis(mean), _with_draw_axis(scale)
        own = self.parameterization.omega(mean, scale, z) if self.parameterization else None
        result: Weights = {}
        for name in mean:
            delta = scale[name] * z[name] if own is None else own[name] - mean[name]
            if clip is not None:
                delta = delta.clamp(-clip, clip)
            if name in self.rotation:
                delta = rotate(delta, self.rotation[name], self.axes[name])
            result[name] = (mean[name] + delta).to(mean[name].dtype)
        return result

    def entropy(self, *, draws: int = 50, seed: int = 0) -> Tensor:
        """H(q) per member in nats, (M,), of the unclipped distribution: Σ log φ + d·H(z), or −E[log q] for a user's own ω."""
        if self.parameterization is not None:
            return self.sampled_entropy(range(draws), seed=seed, stream="infer")
        # a rotation has unit determinant, so V drops out
        return sum_per_member({n: s.log() for n, s in self.scale().items()}) + self.dimension * self.noise.entropy()

    def sampled_entropy(self, index: Iterable[int], *, seed: int, stream: Stream) -> Tensor:
        """−(1/P) Σ log q(w_p) per member, (M,), for a user's own parameterization; differentiable in φ."""
        assert self.parameterization is not None
        mean, scale = dict(self.mean.items()), self.scale()
        z = draw_noise(scale, index, seed=seed, stream=stream, noise=self.noise)
        weights = self.parameterization.omega(_with_draw_axis(mean), _with_draw_axis(scale), z)
        return -self.parameterization.log_density(weights, _with_draw_axis(mean), _with_draw_axis(scale)).mean(1)

    def mean_log_square(self) -> Tensor:
        """The paper's figure of entropy, (1/d) Σ log φ², per member, (M,)."""
        return 2.0 * sum_per_member({n: s.log() for n, s in self.scale().items()}) / self.dimension

    def mixture_entropy_bounds(self) -> tuple[Tensor, Tensor]:
        """Bounds on the entropy of the mixture over members: mean H ≤ H(mixture) ≤ mean H + log M (no overlap)."""
        lower = self.entropy().mean()
        return lower, lower + torch.tensor(float(self.members)).log().to(lower)


def sum_per_member(tensors: Mapping[str, Tensor]) -> Tensor:
    """Sum of all entries per member: {name: (M, ...)} -> (M,)."""
    return torch.stack([t.flatten(1).sum(1) for t in tensors.values()]).sum(0)


def inverse_softplus(scale: Tensor) -> Tensor:
    """U with softplus(u) = φ, φ floored at 1e-12 where the inverse would be −∞.

    >>> F.softplus(inverse_softplus(torch.tensor([1e-3, 1.0, 50.0])))
    tensor([1.0000e-03, 1.0000e+00, 5.0000e+01])
    """
    scale = scale.clamp_min(1e-12)
    return scale + (-torch.expm1(-scale)).log()


def _constant(mean: Mapping[str, Tensor], value: float) -> Weights:
    # scales of half-precision hosts are kept in float32: steps of a small φ would be lost otherwise
    return {n: torch.full_like(m, value, dtype=torch.promote_types(m.dtype, torch.float32)) for n, m in mean.items()}


def _with_draw_axis(weights: Mapping[str, Tensor]) -> Weights:
    return {name: tensor.unsqueeze(1) for name, tensor in weights.items()}


def _repeat(tensor: Tensor, draws: int) -> Tensor:
    return tensor.unsqueeze(1).expand(-1, draws, *tensor.shape[1:]).flatten(0, 1)
