"""The one equation: w = w̄ + V·clip(φ ⊙ z, c) with φ = softplus(u), for any number of members at once; and its entropy."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from offmap._torch_private import child_table, tensor_tables
from offmap._types import Weights
from offmap.errors import ConfigError
from offmap.model.forward import CACHE_NUMBERS, LRUCache
from offmap.model.matrix_view import MatrixView, rotate
from offmap.model.params import ParamSelection, stack_models
from offmap.posterior.basis import LIMIT, Rotation, observe
from offmap.posterior.noise import Noise, Stream, Uniform, as_noise, draw_noise
from offmap.posterior.parameterization import COORDINATES, Draw, WeightLaw, expand

Start: TypeAlias = float | Mapping[str, Tensor] | Callable[[str], Tensor]
"""φ at the start: one number for all, or tensors (M, ...) by name."""

Models: TypeAlias = nn.Module | Sequence[nn.Module]
"""One model, or several of one architecture."""


class NamedTensors(nn.Module, Mapping[str, Tensor]):
    """Tensors by dotted name, as parameters (`trainable`) or buffers, not copied; a read-only mapping."""

    __eq__, __hash__ = object.__eq__, object.__hash__  # pyright: ignore[reportAssignmentType]  # a module equals itself alone

    def __init__(self, tensors: Mapping[str, Tensor], *, trainable: bool = False) -> None:
        super().__init__()
        self.names: tuple[str, ...] = tuple(tensors)
        for name, tensor in tensors.items():
            *path, leaf = name.split(".")
            module: nn.Module = self
            for step in path:
                # filed by hand: a model may have a layer called `values`, which `add_module` would refuse here
                module = child_table(module).setdefault(step, nn.Module())
            parameters, buffers = tensor_tables(module)
            if trainable:
                parameters[leaf] = nn.Parameter(tensor.detach())
            else:
                buffers[leaf] = tensor

    def __getitem__(self, name: str) -> Tensor:
        *path, leaf = name.split(".")
        module: nn.Module = self
        for step in path:
            module = child_table(module)[step]
        parameters, buffers = tensor_tables(module)
        return parameters[leaf] if leaf in parameters else buffers[leaf]

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


@dataclass(frozen=True)
class ClippedEntropy:
    """Both parts of the entropy per member in nats, (M,) each, and the mean probability that a weight sits at its clip, (M,)."""

    continuous: Tensor
    points: Tensor
    share: Tensor


class WeightDistribution(nn.Module):
    """q(w): every tensor has a leading member axis M. `mean` and `raw_scale` are name-keyed like the model.

    Args:
        mean: w̄, {name: (M, ...)}.
        initial_scale: φ at the start.
        rotation: V of the rotated parameters.
        fixed: What differs between members without being random (other parameters, buffers); with one member the model has it.
        noise: The law of z; uniform with unit variance by default.
        parameterization: Another law than φ ⊙ z, such as a `LowRank` or your own ω(z, φ).
        directions: Orthonormal directions S that stand for all parameters, {name: (M, k, ...)}; φ is then (M, k) by one name.
        trainable_mean: Whether the mean is a parameter too.

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
        parameterization: WeightLaw | None = None,
        directions: Mapping[str, Tensor] | None = None,
        trainable_mean: bool = False,
    ) -> None:
        super().__init__()
        rotation = rotation or Rotation()
        # in the order of the parameters and at even addresses, unlike those of a file: sums and products round otherwise
        self.directions: NamedTensors = NamedTensors({n: directions[n].clone() for n in mean} if directions else {})
        like = mean if not directions else {COORDINATES: next(iter(directions.values())).flatten(2)[:, :, 0]}
        start = _start(initial_scale, like)
        own_mean = {n: m.clone() for n, m in mean.items()} if trainable_mean else mean
        self.mean: NamedTensors = NamedTensors(own_mean, trainable=trainable_mean)
        self.raw_scale: NamedTensors = NamedTensors({n: inverse_softplus(start(n)) for n in like}, trainable=True)
        # draws multiply by Vᵀ: that is what lies in one piece
        self.rotation: NamedTensors = NamedTensors({n: v.mT.contiguous().mT for n, v in rotation.matrices.items()})
        self.views: dict[str, MatrixView] = rotation.views
        self.why: dict[str, str] = rotation.why
        self.fixed: NamedTensors = NamedTensors(fixed or {})
        self.noise: Noise = noise or Uniform()
        self.parameterization: WeightLaw | None = parameterization
        state = {} if parameterization is None else parameterization.start(self.raw_scale)
        self.state: NamedTensors = NamedTensors(state, trainable=True)  # what a parameterization trains beside φ
        self.trainable_mean = trainable_mean
        self.members: int = next(iter(mean.values())).shape[0]  # M, the number of models the distribution is centred on
        self.dimension: int = sum(raw[0].numel() for raw in self.raw_scale.values())  # d, of the noise of one member
        self.size: int = sum(w[0].numel() for w in mean.values())  # the number of random weights of one member
        self._cache = LRUCache()

    def scale(self) -> Weights:
        """Return φ = softplus(u) > 0, {name: (M, ...)}."""
        return {name: F.softplus(raw) for name, raw in self.raw_scale.items()}

    @torch.no_grad()
    def set_scale(self, scale: Start) -> None:
        """Write `scale`, φ (at least 1e-12, below which softplus has no inverse)."""
        start = _start(scale, self.raw_scale)
        for name, raw in self.raw_scale.items():
            raw.copy_(inverse_softplus(start(name)))

    @torch.no_grad()
    def scale_by(self, factor: Tensor | float) -> None:
        """Multiply φ by `factor`, a number or one per member, (M,)."""
        for raw in self.raw_scale.values():
            raw.copy_(inverse_softplus(F.softplus(raw) * _per_member(factor, raw)))

    def trained(self) -> Weights:
        """Return all that a fit finds, by name, members first: u, what the parameterization has beside it, a trained mean."""
        parts = {"raw_scale": self.raw_scale, "state": self.state} | ({"mean": self.mean} if self.trainable_mean else {})
        return {f"{part}.{name}": tensor for part, tensors in parts.items() for name, tensor in tensors.items()}

    @torch.no_grad()
    def restart(self, scale: Start) -> None:
        """Write φ, and bring back what is trained beside it to its start."""
        self.set_scale(scale)
        if self.parameterization is not None:
            for name, tensor in self.parameterization.start(self.raw_scale).items():
                self.state[name].copy_(tensor)

    def draw(
        self,
        draws: Iterable[int],
        *,
        seed: int = 0,
        stream: Stream = "infer",
        clip: float | None = None,
        scale: Mapping[str, Tensor] | None = None,
        factor: Tensor | None = None,
    ) -> Weights:
        """Draw w = w̄ + V · clip(φ ⊙ z, ±clip) for every member and draw, member-major: {name: (M·P, ...)}; differentiable in φ.

        Args:
            draws: Numbers of the draws; each is the same whatever the others are.
            seed: Seed of z.
            stream: What the draws are for.
            clip: Bound on |φ ⊙ z| before the rotation, or along directions if there are some: 0 gives the model's weights to the
                bit, None or inf no bound.
            scale: Stands in for φ.
            factor: Multiplies φ, one number per member, (M,).
        """
        if clip is not None and not clip >= 0:
            raise ConfigError(f"Expected `clip` to be a number ≥ 0 or None, but got {clip!r}.")
        draws = list(draws)
        fixed = {n: _repeat(t, len(draws)) for n, t in self.fixed.items()}
        if clip == 0:
            return {n: _repeat(m, len(draws)) for n, m in self.mean.items()} | fixed
        if self.parameterization is None and scale is None and not _needs_gradient(*self.parameters()):
            return self._draw_in_place(draws, seed, stream, clip, factor) | fixed
        phi = dict(self.scale() if scale is None else scale)
        phi = phi if factor is None else {n: s * _per_member(factor, s) for n, s in phi.items()}
        law, noise, weights = self.parameterization, self._noise(draws, seed, stream), Weights()
        z = noise(phi) if law is None else law.delta(self.mean, phi, self.state, noise)
        if len(self.directions):  # the clip bounds coordinates
            y = z[COORDINATES]
            z, clip = expand(y if clip is None else y.clamp(-clip, clip), self.directions), None
        for name, mean in self.mean.items():
            delta = phi[name].unsqueeze(1) * z[name] if law is None else z[name]  # (M, P, ...)
            delta = delta if clip is None else delta.clamp(-clip, clip)
            delta = rotate(delta, self.rotation[name], self.views[name]) if name in self.rotation else delta
            weights[name] = (mean.unsqueeze(1) + delta).to(mean.dtype).flatten(0, 1)
        return weights | fixed

    @torch.no_grad()
    def _draw_in_place(self, draws: list[int], seed: int, stream: Stream, clip: Any, factor: Tensor | None) -> Weights:
        """Do as `draw` without gradients, to the bit, one parameter at a time and writing where nobody else reads."""
        # noise that is small and will be asked for again is cached
        cached = stream != "fit" and self.dimension * self.members * len(draws) <= CACHE_NUMBERS
        like = next(iter(self.raw_scale.values()))
        key = (tuple(draws), seed, stream, like.device, like.dtype)
        noise = self._cache.get(key) if cached else {}
        if noise is None:
            noise = self._cache.put(key, draw_noise(self.raw_scale, draws, seed=seed, stream=stream, noise=self.noise))
        weights: Weights = {}
        for name, mean in self.mean.items():
            phi = F.softplus(self.raw_scale[name])
            phi = (phi if factor is None else phi.mul_(_per_member(factor, phi))).unsqueeze(1)
            if cached:
                delta = phi * noise[name]
            else:
                delta = draw_noise({name: self.raw_scale[name]}, draws, seed=seed, stream=stream, noise=self.noise)[name].mul_(
                    phi
                )
            del phi
            delta = delta if clip is None else delta.clamp_(-clip, clip)
            delta = rotate(delta, self.rotation[name], self.views[name]) if name in self.rotation else delta
            delta = delta.add_(mean.unsqueeze(1)) if delta.dtype == mean.dtype else (delta + mean.unsqueeze(1)).to(mean.dtype)
            weights[name] = delta.flatten(0, 1)
            del delta
        return weights

    def _noise(self, draws: Iterable[int], seed: int, stream: Stream) -> Draw:
        """Return a function that draws noise like tensors by name."""
        return partial(draw_noise, index=draws, seed=seed, stream=stream, noise=self.noise)

    @torch.no_grad()
    def rescale_draws(self, drawn: Weights, span: range, factor: Tensor, which: list[int]) -> Weights:
        """Return unclipped draws in `span` of k members in `which` with φ times `factor` (k,), up to rounding, (k·p, ...)."""
        result: Weights = {}
        for name, stacked in drawn.items():
            w = stacked.unflatten(0, (self.members, -1))[:, span.start : span.stop]
            w = w if len(which) == self.members else w[which]
            if name in self.mean:
                w = torch.lerp(self.mean[name][which].unsqueeze(1), w, _per_member(factor, w))
            result[name] = w.flatten(0, 1)
        return result

    def entropy(self, *, draws: int = 50, seed: int = 0) -> Tensor:
        """Return H(q) per member in nats, (M,), without clip: Σ log φ + d·H(z), or what another parameterization says.

        Where directions stand for the parameters, it is the entropy of the k coordinates, and d is k. Some `draws` with a `seed`
        estimate what has no closed form.
        """
        if self.parameterization is not None:
            return self.sampled_entropy(range(draws), seed=seed, stream="infer")
        return self._log_volume() + self.dimension * self.noise.density_entropy()  # V has unit determinant and drops out

    def sampled_entropy(self, draws: Iterable[int], *, seed: int, stream: Stream) -> Tensor:
        """Return the entropy of a parameterization per member, (M,), with these draws where it is a mean; differentiable."""
        assert self.parameterization is not None
        draw = self._noise(draws, seed, stream)
        return self.parameterization.entropy(self.mean, self.scale(), self.state, self.noise, draw)

    def mean_log_square(self) -> Tensor:
        """Return the paper's figure of entropy, (1/d) Σ log φ², per member, (M,): in general (2/d)(H(q) − d·H(z))."""
        return 2.0 * self._log_volume() / self.dimension

    def _log_volume(self) -> Tensor:
        """Σ log φ per member, (M,), one parameter at a time, or what stands for it."""
        if self.parameterization is not None:
            return self.parameterization.log_volume(self.scale(), self.state, self._noise(range(50), 0, "valid"))
        return torch.stack([F.softplus(raw).log().flatten(1).sum(1) for raw in self.raw_scale.values()]).sum(0)

    def mixture_entropy_bounds(self) -> tuple[Tensor, Tensor]:
        """Bound the entropy of the mixture over members: mean H ≤ H(mixture) ≤ mean H + log M (no overlap)."""
        lower = self.entropy().mean()
        return lower, lower + math.log(self.members)

    @torch.no_grad()
    def clipped_entropy(self, clip: float | None) -> ClippedEntropy:
        """Return the entropy of the draws as they are with this clip; without one there are no points.

        A component clip(φ·z, ±c) lies inside with probability p = P(|z| < t), t = c/φ, and at each end with m = (1 − p)/2:

            continuous   p·log φ − ∫_{|z|<t} f log f dz        points   −2·m·log m

        Components are independent and V has unit determinant, so the parts of a member are sums over its weights.

        >>> q = WeightDistribution({"w": torch.zeros(1, 2)}, initial_scale=1.0)
        >>> q.clipped_entropy(3**0.5 / 2)  # half of the noise is cut off
        ClippedEntropy(continuous=tensor([1.2425]), points=tensor([1.3863]), share=tensor([0.5000]))
        """
        law = self.parameterization
        if not (law is None or law.diagonal) or self.noise.truncated_entropy(torch.ones(1, device="cpu")) is None:
            raise ConfigError(
                "Expected noise with a `truncated_entropy`, such as uniform or normal, for the entropy of clipped draws, with "
                f"the library's own w = w̄ + Vφz, but got {type(law or self.noise).__name__}."
            )
        parts: list[tuple[Tensor, ...]] = []
        for scale in self.scale().values():
            phi = scale.double().flatten(1)
            truncated = self.noise.truncated_entropy((math.inf if clip is None else clip) / phi)
            assert truncated is not None
            p, inside = truncated
            m = (1 - p) / (1 if clip == 0 else 2)  # without room between them, both ends are one point
            parts.append(((p * phi.log() + inside).sum(1), -2 * torch.xlogy(m, m).sum(1), (1 - p).sum(1)))
        continuous, points, outside = (torch.stack(part).sum(0) for part in zip(*parts, strict=True))
        return ClippedEntropy(continuous.float(), points.float(), (outside / self.dimension).float())


def scaling(
    models: Models, *, params: ParamSelection = None, noise: str | Noise = "uniform", initial_scale: float = 1e-3
) -> WeightDistribution:
    """Make a distribution with V = I around models, which are not touched: every weight has its own scale."""
    stack = stack_models(models, params)
    return WeightDistribution(stack.mean, fixed=stack.fixed, noise=as_noise(noise), initial_scale=initial_scale)


def svd(
    models: Models,
    inputs: Iterable[Any],
    *,
    params: ParamSelection = None,
    noise: str | Noise = "uniform",
    initial_scale: float = 1e-3,
    limit: int = LIMIT,
) -> WeightDistribution:
    """Make a distribution with V from the second moments of the layer inputs, over batches of `inputs`."""
    stack, batches = stack_models(models, params), list(inputs)
    rotation, law = observe(stack, lambda rows: batches, rotated=True, limit=limit).rotation(), as_noise(noise)
    return WeightDistribution(stack.mean, rotation=rotation, fixed=stack.fixed, noise=law, initial_scale=initial_scale)


def sum_per_member(tensors: Mapping[str, Tensor]) -> Tensor:
    """Sum all entries per member: {name: (M, ...)} -> (M,)."""
    return torch.stack([t.flatten(1).sum(1) for t in tensors.values()]).sum(0)


def inverse_softplus(scale: Tensor) -> Tensor:
    """Return u with softplus(u) = φ, for φ of at least 1e-12, below which it would be −∞."""
    scale = scale.clamp_min(1e-12)
    return scale.neg().expm1_().neg_().log_().add_(scale)  # in place: models may be large


def _needs_gradient(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


def _start(scale: Start, mean: Mapping[str, Tensor]) -> Callable[[str], Tensor]:
    """φ at the start of a parameter by name."""
    if isinstance(scale, Mapping):
        return scale.__getitem__
    if callable(scale):
        return scale
    # scales of half-precision models are kept in float32: steps of a small φ would be lost otherwise
    return lambda name: torch.full_like(mean[name], scale, dtype=torch.promote_types(mean[name].dtype, torch.float32))


def _per_member(factor: Tensor | float, like: Tensor) -> Tensor | float:
    """One number, or one per member, (M,), to multiply a tensor (M, ...) with."""
    return factor.to(like).view(-1, *[1] * (like.ndim - 1)) if isinstance(factor, Tensor) else factor


def _repeat(tensor: Tensor, draws: int) -> Tensor:
    return tensor.unsqueeze(1).expand(-1, draws, *tensor.shape[1:]).flatten(0, 1)
