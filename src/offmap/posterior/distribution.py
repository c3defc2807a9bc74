"""The one equation: w = w̄ + V·clip(φ ⊙ z, c) with φ = softplus(u), for any number of members at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from offmap._types import Weights
from offmap.errors import ConfigError
from offmap.model.matrix_view import MatrixView, rotate
from offmap.model.params import NamedTensors, count
from offmap.posterior.noise import Noise, Stream, Uniform, draw_noise

CACHE_NUMBERS = 1 << 23
"""Noise, and weights drawn from it, of at most this many numbers are kept between calls (32 MB in float32 each)."""

Start: TypeAlias = float | Mapping[str, Tensor] | Callable[[str], Tensor]
"""φ at the start: one number for all, or tensors (M, ...) by name."""


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
    """The bases V (M, G, N, d, d) of rotated parameters and how each is cut, by name; for the others why they are not."""

    matrices: Weights = field(default_factory=dict)
    frames: dict[str, MatrixView] = field(default_factory=dict)
    why: dict[str, str] = field(default_factory=dict)


class WeightDistribution(nn.Module):
    """q(w): every tensor has a leading member axis M. `mean` and `raw_scale` are name-keyed like the model.

    `fixed` holds what differs between members without being random (other parameters, buffers); with one member the model has it.

    >>> q = WeightDistribution({"w": torch.zeros(1, 3)}, initial_scale=2.0)
    >>> q.draw(range(5))["w"].shape, round(q.mean_log_square().item(), 4)
    (torch.Size([5, 3]), 1.3863)
    """

    def __init__(
        self,
        mean: Mapping[str, Tensor],
        *,
        initial_scale: Start = 1e-3,
        rotation: Rotation | None = None,
        fixed: Mapping[str, Tensor] | None = None,
        noise: Noise | None = None,
        parameterization: Parameterization | None = None,
        trainable_mean: bool = False,
    ) -> None:
        super().__init__()
        rotation = rotation or Rotation()
        start = _starting(initial_scale, mean)
        self.mean = NamedTensors({n: m.clone() for n, m in mean.items()} if trainable_mean else mean, trainable=trainable_mean)
        self.raw_scale = NamedTensors({n: inverse_softplus(start(n)) for n in mean}, trainable=True)
        # draws multiply by Vᵀ: that is what lies in one piece
        self.rotation = NamedTensors({n: v.mT.contiguous().mT for n, v in rotation.matrices.items()})
        self.frames = rotation.frames
        self.why = rotation.why
        self.fixed = NamedTensors(fixed or {})
        self.noise = noise or Uniform()
        self.parameterization = parameterization
        self.trainable_mean = trainable_mean
        self._last: tuple[object, Weights] | None = None

    @property
    def members(self) -> int:
        """How many models the distribution is centred on."""
        return next(iter(self.mean.values())).shape[0]

    @property
    def dimension(self) -> int:
        """d, the number of random weights of one member."""
        return count(dict(self.mean.items())) // self.members

    def scale(self) -> Weights:
        """φ = softplus(u) > 0, {name: (M, ...)}."""
        return {name: F.softplus(raw) for name, raw in self.raw_scale.items()}

    @torch.no_grad()
    def set_scale(self, scale: Start) -> None:
        """Write φ (floored where softplus has no inverse)."""
        start = _starting(scale, dict(self.mean.items()))
        for name, raw in self.raw_scale.items():
            raw.copy_(inverse_softplus(start(name)))

    @torch.no_grad()
    def scale_by(self, factor: Tensor | float) -> None:
        """Multiply φ by a number, or by one per member, (M,)."""
        for raw in self.raw_scale.values():
            raw.copy_(inverse_softplus(_widened(F.softplus(raw), factor)))

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
        factor: Tensor | None = None,
    ) -> Weights:
        """The draws in `index` of every member, member-major: {name: (M·P, ...)}; differentiable in φ.

        `clip` bounds |φ ⊙ z| before the rotation: 0 gives the model's weights to the bit, None or inf no bound. `scale` stands in
        for φ, and `factor` (M,) multiplies it.
        """
        if clip is not None and not clip >= 0:
            raise ConfigError(f"Expected `clip` to be a number ≥ 0 or None, but got {clip!r}.")
        index = list(index)
        fixed = {n: _repeat(t, len(index)) for n, t in self.fixed.items()}
        if clip == 0:
            return {n: _repeat(m, len(index)) for n, m in self.mean.items()} | fixed
        if self.parameterization is not None:
            return self._own(self.parameterization, index, seed, stream, clip, scale, factor) | fixed
        result: Weights = {}
        for name, mean in self.mean.items():  # one parameter at a time: what is made on the way stays small
            own = F.softplus(self.raw_scale[name]) if scale is None else scale[name]
            wide = _widened(own, factor, ours=scale is None)
            del own
            z, kept = self._noise(name, wide, index, seed, stream)
            delta = wide.unsqueeze(1) * z if kept or wide.requires_grad else z.mul_(wide.unsqueeze(1))
            del z, wide
            result[name] = self._turned(name, mean, delta, clip)
            del delta
        return result | fixed

    @torch.no_grad()
    def rescale_draws(self, drawn: Weights, span: range, factor: Tensor, which: list[int]) -> Weights:
        """Of unclipped draws, {name: (M·P, ...)}, the p in `span` of the k members in `which`, with φ multiplied by `factor`
        (k,), up to rounding: w̄ + c·(w − w̄), (k·p, ...).
        """
        result: Weights = {}
        for name, stacked in drawn.items():
            own = stacked.unflatten(0, (self.members, -1))[:, span.start : span.stop]
            own = own if len(which) == self.members else own[which]
            if name in self.mean:
                mean, c = self.mean[name][which], factor.to(own).view(-1, *[1] * (own.ndim - 1))
                own = torch.lerp(mean.unsqueeze(1), own, c)
            result[name] = own.flatten(0, 1)
        return result

    def _turned(self, name: str, mean: Tensor, delta: Tensor, clip: float | None) -> Tensor:
        """w̄ + V·clip(δ, c): (M, ...), (M, P, ...) -> (M·P, ...)."""
        if clip is not None:
            delta = delta.clamp(-clip, clip) if delta.requires_grad else delta.clamp_(-clip, clip)
        if name in self.rotation:
            delta = rotate(delta, self.rotation[name], self.frames[name])
        mean = mean.unsqueeze(1)
        apart = delta.requires_grad or mean.requires_grad or mean.dtype != delta.dtype
        return (delta + mean if apart else delta.add_(mean)).to(mean.dtype).flatten(0, 1)

    def _own(
        self, law: Parameterization, index: list[int], seed: int, stream: Stream, clip: float | None,
        scale: Mapping[str, Tensor] | None, factor: Tensor | None,
    ) -> Weights:  # fmt: skip
        """Draws of a user's own ω, which sees all parameters at once."""
        wide = {n: _widened(s, factor) for n, s in (self.scale() if scale is None else scale).items()}
        z = {n: self._noise(n, s, index, seed, stream)[0] for n, s in wide.items()}
        mean = _with_draw_axis(dict(self.mean.items()))
        made = law.omega(mean, _with_draw_axis(wide), z)
        return {n: self._turned(n, m, made[n] - mean[n], clip) for n, m in self.mean.items()}

    def _noise(self, name: str, like: Tensor, index: list[int], seed: int, stream: Stream) -> tuple[Tensor, bool]:
        """Z of one parameter, (M, P, ...), and whether it is kept: when all of it is small and will be asked for again."""
        key = (tuple(index), seed, stream, like.device, like.dtype)
        last = self._last  # read once: another thread may replace it
        if last is not None and last[0] == key and name in last[1]:
            return last[1][name], True
        z = draw_noise({name: like}, index, seed=seed, stream=stream, noise=self.noise)[name]
        keep = stream != "fit" and self.dimension * self.members * len(index) <= CACHE_NUMBERS
        if keep:
            if last is None or last[0] != key:
                self._last = last = (key, {})
            last[1][name] = z
        return z, keep

    def entropy(self, *, draws: int = 50, seed: int = 0) -> Tensor:
        """H(q) per member in nats, (M,), of the unclipped distribution: Σ log φ + d·H(z), or −E[log q] for a user's own ω."""
        if self.parameterization is not None:
            return self.sampled_entropy(range(draws), seed=seed, stream="infer")
        entropy = self.noise.entropy()
        if entropy is None:
            raise ConfigError(
                f"{type(self.noise).__name__} noise has no density, so its weight entropy is not defined; use 'uniform' or 'normal'."
            )
        return self._log_scale() + self.dimension * entropy  # a rotation has unit determinant, so V drops out

    def sampled_entropy(self, index: Iterable[int], *, seed: int, stream: Stream) -> Tensor:
        """−(1/P) Σ log q(w_p) per member, (M,), for a user's own parameterization; differentiable in φ."""
        assert self.parameterization is not None
        mean, scale = dict(self.mean.items()), self.scale()
        z = draw_noise(scale, index, seed=seed, stream=stream, noise=self.noise)
        weights = self.parameterization.omega(_with_draw_axis(mean), _with_draw_axis(scale), z)
        return -self.parameterization.log_density(weights, _with_draw_axis(mean), _with_draw_axis(scale)).mean(1)

    def mean_log_square(self) -> Tensor:
        """The paper's figure of entropy, (1/d) Σ log φ², per member, (M,)."""
        return 2.0 * self._log_scale() / self.dimension

    def _log_scale(self) -> Tensor:
        """Σ log φ per member, (M,), one parameter at a time."""
        return torch.stack([F.softplus(raw).log().flatten(1).sum(1) for raw in self.raw_scale.values()]).sum(0)

    def mixture_entropy_bounds(self) -> tuple[Tensor, Tensor]:
        """Bounds on the entropy of the mixture over members: mean H ≤ H(mixture) ≤ mean H + log M (no overlap)."""
        lower = self.entropy().mean()
        return lower, lower + math.log(self.members)


def sum_per_member(tensors: Mapping[str, Tensor]) -> Tensor:
    """Sum of all entries per member: {name: (M, ...)} -> (M,)."""
    return torch.stack([t.flatten(1).sum(1) for t in tensors.values()]).sum(0)


def inverse_softplus(scale: Tensor) -> Tensor:
    """U with softplus(u) = φ, φ floored at 1e-12 where the inverse would be −∞.

    >>> F.softplus(inverse_softplus(torch.tensor([1e-3, 1.0, 50.0])))
    tensor([1.0000e-03, 1.0000e+00, 5.0000e+01])
    """
    scale = scale.clamp_min(1e-12)
    return scale.neg().expm1_().neg_().log_().add_(scale)  # in place: models may be large


def _starting(scale: Start, mean: Mapping[str, Tensor]) -> Callable[[str], Tensor]:
    """φ at the start of a parameter by name: a number for all, or given for each."""
    if isinstance(scale, Mapping):
        return scale.__getitem__
    if callable(scale):
        return scale
    # scales of half-precision models are kept in float32: steps of a small φ would be lost otherwise
    return lambda name: torch.full_like(mean[name], scale, dtype=torch.promote_types(mean[name].dtype, torch.float32))


def _widened(scale: Tensor, factor: Tensor | float | None, *, ours: bool = False) -> Tensor:
    """φ times a number, or one per member; in place if the tensor is `ours`."""
    if isinstance(factor, Tensor):
        factor = factor.to(scale).view(-1, *[1] * (scale.ndim - 1))
    if factor is None:
        return scale
    return scale.mul_(factor) if ours and not scale.requires_grad else scale * factor


def _with_draw_axis(weights: Mapping[str, Tensor]) -> Weights:
    return {name: tensor.unsqueeze(1) for name, tensor in weights.items()}


def _repeat(tensor: Tensor, draws: int) -> Tensor:
    return tensor.unsqueeze(1).expand(-1, draws, *tensor.shape[1:]).flatten(0, 1)
