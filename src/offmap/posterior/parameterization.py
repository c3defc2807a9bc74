"""Laws of weights beside the diagonal one, all of one form: w = w̄ + V·clip(φ ⊙ T(z), c), with entropy Σ log φ + H(T(z)).

    low-rank    T(z) = z + A·ε per parameter, in the basis V: a Gaussian of covariance φ(I + AAᵀ)φ
    subspace    T(z) = z, and V = S holds k directions in which gradient steps from w̄ move
    flow        T is a normalizing flow, and V = S holds k random directions

φ alone carries the size: solvers and searches multiply it. What T is made of has no unit and is trained beside φ. A new law is
one class: subclass `WeightLaw`, and put an instance of it in `PARAMETERIZATIONS` to choose it by name and to save it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor

from offmap._types import Tensors, Weights
from offmap.checks import option, validate
from offmap.errors import ConfigError, nearest
from offmap.posterior.noise import Noise, Normal, draw_noise

Draw: TypeAlias = Callable[[Tensors], Weights]
"""Noise for tensors by name: {name: (M, ...)} -> {name: (M, P, ...)}."""

Walk: TypeAlias = Callable[[int, float, int], Weights]
"""(steps, lr, every) -> w − w̄ after every so many gradient steps on the training NLL, {name: (M, T, ...)}."""

COORDINATES = "coordinates"
"""The name of φ, (M, k), where k directions stand for all parameters."""


class WeightLaw(ABC):
    """How φ and noise become w − w̄, with which entropy. A frozen dataclass of options: tensors live in the distribution.

    Methods get tensors by name, members first: `mean` is w̄, `scale` is φ, and `state` is trained beside φ. `draw(like)` gives
    `noise` in the shape of other tensors. `walk(steps, lr, every)` takes gradient steps from w̄. A `seed` decides what is random.
    """

    title: ClassVar[str] = ""  # in messages
    solvers: ClassVar[tuple[str, ...]] = ("refine", "sgd")
    normal: ClassVar[bool] = False  # z must be Gaussian
    rotated: ClassVar[bool] = False  # φ stands in the basis of the fit
    linear: ClassVar[bool] = True  # w − w̄ is proportional to φ
    spans: ClassVar[bool] = False  # k directions stand for all parameters
    diagonal: ClassVar[bool] = False  # the entropy is Σ log φ up to a constant, so that g(φ) may stand for it

    def check(self, solver: str, noise: Noise) -> None:
        """Raise a ConfigError unless the law goes with this `solver` and `noise`."""
        if solver not in self.solvers:
            raise ConfigError(f"{self.title} has no closed form: pass `solver={self.solvers[0]!r}`.")
        if self.normal and not isinstance(noise, Normal):
            name = type(noise).__name__.lower()
            raise ConfigError(f"{self.title} has the entropy of a Gaussian: expected `noise` to be 'normal', but got {name!r}.")

    def directions(self, mean: Tensors, walk: Walk, seed: int) -> Weights:
        """Return the orthonormal directions S that stand for V where the law `spans` some, {name: (M, k, ...)}."""
        raise NotImplementedError

    def shapes(self, scale: Tensors) -> dict[str, tuple[int, ...]]:
        """Return the shapes, without members, of what is trained beside φ."""
        return {}

    def start(self, scale: Tensors) -> Weights:
        """Return what is trained beside φ at the start, {name: (M, ...)}: such that T(z) is close to z."""
        some = next(iter(scale.values()))
        like = {name: some.new_empty(len(some), *shape) for name, shape in self.shapes(scale).items()}
        noise = draw_noise(like, [0], seed=0, stream="init", noise=Normal())
        return {name: self.initial_std(name, like[name]) * z.squeeze(1) for name, z in noise.items()}

    def initial_std(self, name: str, like: Tensor) -> float:
        """Return the standard deviation at the start of the tensor `name`, whose shape is that of `like`."""
        return 0.01

    @abstractmethod
    def delta(self, mean: Tensors, scale: Tensors, state: Tensors, draw: Draw) -> Weights:
        """Return φ ⊙ T(z), which the clip bounds and V turns into w − w̄, {name: (M, P, ...)}; `state` is trained beside φ."""

    def log_volume(self, scale: Tensors, state: Tensors, draw: Draw) -> Tensor:
        """Return by how much φ ⊙ T widens z, H(q) − d·H(z) in nats, (M,); by default Σ log φ."""
        return torch.stack([s.log().flatten(1).sum(1) for s in scale.values()]).sum(0)

    def entropy(self, mean: Tensors, scale: Tensors, state: Tensors, noise: Noise, draw: Draw) -> Tensor:
        """Return H(q) in nats, (M,)."""
        return self.log_volume(scale, state, draw) + sum(s[0].numel() for s in scale.values()) * noise.density_entropy()


@dataclass(frozen=True)
class Parameterization(WeightLaw):
    """A user's own ω(z, φ) with its log-density, for weight laws whose entropy has no closed form.

    Args:
        omega: `omega(mean, scale, z)` gives weights, all name-keyed with leading axes (members, draws).
        log_density: `log_density(weights, mean, scale)` gives log q(w) in nats, (members, draws). The entropy is then
            −E[log q(w)], estimated by sampling.
    """

    omega: Callable[[Weights, Weights, Weights], Weights]
    log_density: Callable[[Weights, Weights, Weights], Tensor]
    title: ClassVar[str] = "A parameterization of your own"
    solvers: ClassVar[tuple[str, ...]] = ("sgd",)
    linear: ClassVar[bool] = False

    def delta(self, mean: Tensors, scale: Tensors, state: Tensors, draw: Draw) -> Weights:
        """Return ω(z, φ) − w̄."""
        w = self.omega(with_draw_axis(mean), with_draw_axis(scale), draw(scale))
        return {name: w[name] - m.unsqueeze(1) for name, m in mean.items()}

    def entropy(self, mean: Tensors, scale: Tensors, state: Tensors, noise: Noise, draw: Draw) -> Tensor:
        """Return −(1/P) Σ log q(w_p), (M,)."""
        centre, phi = with_draw_axis(mean), with_draw_axis(scale)
        return -self.log_density(self.omega(centre, phi, draw(scale)), centre, phi).mean(1)


@dataclass(frozen=True)
class LowRank(WeightLaw):
    """A Gaussian with low-rank plus diagonal covariance per parameter, in the basis: δ = φ ⊙ (z + A·ε), A (n × r).

    By the matrix determinant lemma, log det φ(I + AAᵀ)φ = Σ log φ² + log det(I + AᵀA). It holds r numbers more per weight.

    >>> phi, a = {"w": torch.ones(1, 3)}, {"w": torch.ones(1, 1, 3)}
    >>> round(LowRank(rank=1).log_volume(phi, a, dict).item(), 4)  # ½ log 4
    0.6931
    """

    rank: int = option(4, "r, the number of columns of A per parameter.", at_least=1, at_most=1024)
    title: ClassVar[str] = "`parameterization='low-rank'`"
    normal: ClassVar[bool] = True
    rotated: ClassVar[bool] = True

    def __post_init__(self) -> None:
        validate(self)

    def shapes(self, scale: Tensors) -> dict[str, tuple[int, ...]]:
        """Return those of Aᵀ: (r, ...), with r at most the number of weights."""
        return {name: (min(self.rank, s[0].numel()), *s.shape[1:]) for name, s in scale.items()}

    def delta(self, mean: Tensors, scale: Tensors, state: Tensors, draw: Draw) -> Weights:
        """Return φ ⊙ (z + A·ε)."""
        z, eps = draw(scale), draw({f"{name}/rank": a.flatten(2)[:, :, 0] for name, a in state.items()})
        shared = {name: product(eps[f"{name}/rank"], a.flatten(2)).view_as(z[name]) for name, a in state.items()}
        return {name: s.unsqueeze(1) * (z[name] + shared[name]) for name, s in scale.items()}

    def log_volume(self, scale: Tensors, state: Tensors, draw: Draw) -> Tensor:
        """Return Σ log φ + ½ log det(I + AᵀA)."""
        grams = [a.flatten(2) @ a.flatten(2).mT for a in state.values()]
        extra = [torch.logdet(gram + torch.eye(gram.shape[1], dtype=gram.dtype, device=gram.device)) for gram in grams]
        return super().log_volume(scale, state, draw) + torch.stack(extra).sum(0) / 2


@dataclass(frozen=True)
class Subspace(WeightLaw):
    """A diagonal law over k directions, w = w̄ + S(φ ⊙ z): the principal ones of some hundred gradient steps from w̄.

    The steps are Adam's on the training NLL; S, (d × k), is orthonormal. The entropy is that of the k coordinates: there is no
    density over all weights.
    """

    dimensions: int = option(
        32, "k, the number of directions; 2k copies of the weights are held while they are sought.", at_least=1, at_most=1 << 16
    )
    steps: int = option(200, "Gradient steps that look for directions.", at_least=1)
    lr: float = option(1e-3, "Adam's learning rate of these steps.", above=0)
    title: ClassVar[str] = "`parameterization='subspace'`"
    solvers: ClassVar[tuple[str, ...]] = ("refine", "closed-form", "sgd")
    spans: ClassVar[bool] = True
    diagonal: ClassVar[bool] = True

    def __post_init__(self) -> None:
        validate(self)

    def directions(self, mean: Tensors, walk: Walk, seed: int) -> Weights:
        """Return the right singular vectors of the steps, w − w̄ after every few of them, largest first."""
        steps = walk(self.steps, self.lr, max(1, self.steps // (2 * self.dimensions)))
        return orthonormal(steps, lambda rows: torch.linalg.svd(rows, full_matrices=False)[2][:, : self.dimensions])

    def delta(self, mean: Tensors, scale: Tensors, state: Tensors, draw: Draw) -> Weights:
        """Return φ ⊙ z."""
        return {name: scale[name].unsqueeze(1) * z for name, z in draw(scale).items()}


@dataclass(frozen=True)
class Flow(WeightLaw):
    """A normalizing flow over k random orthonormal directions: w = w̄ + S(φ ⊙ f(z)), f of affine couplings (RealNVP).

    A coupling keeps half of its inputs, a, and moves the others by a net of a, b ↦ b·exp(s(a)) + t(a), |s| < 1; then the halves
    change places. By the change of variables H = Σ log φ + k·H(z) + E[Σ s], a mean over draws, again of the k coordinates.

    >>> Flow(layers=1, hidden=8).shapes({"coordinates": torch.ones(2, 4)})["0.out"]  # s and t of two coordinates
    (8, 4)
    """

    dimensions: int = option(32, "k, the number of directions.", at_least=1, at_most=1 << 16)
    layers: int = option(4, "Couplings; 0 leaves f(z) = z.", at_least=0, at_most=64)
    hidden: int = option(32, "Hidden units of a coupling's net.", at_least=1, at_most=1 << 12)
    title: ClassVar[str] = "`parameterization='flow'`"
    spans: ClassVar[bool] = True

    def __post_init__(self) -> None:
        validate(self)

    def directions(self, mean: Tensors, walk: Walk, seed: int) -> Weights:
        """Return an orthonormal basis of Gaussian directions."""
        sources = draw_noise(mean, range(self.dimensions), seed=seed, stream="init", noise=Normal())
        return orthonormal(sources, lambda rows: torch.linalg.qr(rows.mT)[0].mT)

    def shapes(self, scale: Tensors) -> dict[str, tuple[int, ...]]:
        """Return those of the couplings' nets, with one hidden layer each."""
        k = scale[COORDINATES].shape[1]
        kept, moved = k // 2, k - k // 2
        net = {"in": (kept, self.hidden), "in_bias": (self.hidden,), "out": (self.hidden, 2 * moved), "out_bias": (2 * moved,)}
        return {f"{layer}.{name}": shape for layer in range(self.layers) for name, shape in net.items()}

    def initial_std(self, name: str, like: Tensor) -> float:
        """Return 1/√fan-in for the first layers, and little for what f does with them."""
        return 1 / math.sqrt(max(1, like.shape[1])) if name.endswith(".in") else 0.01 / math.sqrt(self.hidden)

    def transform(self, z: Tensor, state: Tensors) -> tuple[Tensor, Tensor]:
        """Return f(z) and log |det ∂f/∂z|: (M, P, k) -> (M, P, k), (M, P)."""
        log_det, kept = z.new_zeros(z.shape[:2]), z.shape[2] // 2
        for layer in range(self.layers):
            w, b, w_out, b_out = (state[f"{layer}.{name}"] for name in ("in", "in_bias", "out", "out_bias"))
            a, moved = z[..., :kept], z[..., kept:]
            hidden = (product(a, w) + b.unsqueeze(1)).tanh()
            s, t = (product(hidden, w_out) + b_out.unsqueeze(1)).chunk(2, -1)
            s = s.tanh()
            log_det = log_det + s.sum(-1)
            z = torch.cat([moved * s.exp() + t, a], -1)
        return z, log_det

    def delta(self, mean: Tensors, scale: Tensors, state: Tensors, draw: Draw) -> Weights:
        """Return φ ⊙ f(z)."""
        return {COORDINATES: scale[COORDINATES].unsqueeze(1) * self.transform(draw(scale)[COORDINATES], state)[0]}

    def log_volume(self, scale: Tensors, state: Tensors, draw: Draw) -> Tensor:
        """Return Σ log φ + E[log |det ∂f/∂z|]."""
        return super().log_volume(scale, state, draw) + self.transform(draw(scale)[COORDINATES], state)[1].mean(1)


PARAMETERIZATIONS: dict[str, WeightLaw] = {"low-rank": LowRank(), "subspace": Subspace(), "flow": Flow()}
"""Laws by name, each with its default options. Add your own here."""


def as_law(law: str | WeightLaw) -> WeightLaw:
    """Return the law of that name, or the object itself."""
    if isinstance(law, WeightLaw):
        return law
    if not isinstance(law, str) or law not in PARAMETERIZATIONS:
        words = f"{nearest(str(law), PARAMETERIZATIONS)}, or an object such as `LowRank(rank=8)`"
        raise ConfigError(f"Expected `parameterization` to be {words}, but got {law!r}.")
    return PARAMETERIZATIONS[law]


def law_state(law: WeightLaw) -> dict[str, Any]:
    """Describe a registered law for a file: its name, and its options."""
    name = next((name for name, registered in PARAMETERIZATIONS.items() if type(registered) is type(law)), None)
    if name is None:
        raise ConfigError(
            "A guard with a parameterization of your own cannot be saved: a file holds no code. Make it a subclass of "
            "`WeightLaw` with an instance in `offmap.posterior.parameterization.PARAMETERIZATIONS`, also where it is loaded."
        )
    return {"name": name, "config": asdict(law)}  # pyright: ignore[reportArgumentType, reportCallIssue]


def product(x: Tensor, matrix: Tensor) -> Tensor:
    """Multiply draws by their members' matrices, each by itself lest it depends on others: (M, P, a), (M, a, b) -> (M, P, b)."""
    if x.requires_grad or matrix.requires_grad:
        return x @ matrix  # a step of a fit, always with the same draws
    return torch.stack([torch.stack([row @ m for row in rows]) for rows, m in zip(x, matrix, strict=True)])


def orthonormal(sources: Tensors, find: Callable[[Tensor], Tensor]) -> Weights:
    """Find orthonormal rows for all parameters together: {name: (M, T, ...)}, (M, T, d) -> (M, k, d), to {name: (M, k, ...)}."""
    flat = [t.flatten(2).to(torch.promote_types(t.dtype, torch.float32)) for t in sources.values()]
    parts = find(torch.cat(flat, 2)).split([t.shape[2] for t in flat], 2)
    shaped = ((n, p.reshape(*p.shape[:2], *t.shape[2:])) for (n, t), p in zip(sources.items(), parts, strict=True))
    return {n: p.clone(memory_format=torch.contiguous_format) for n, p in shaped}


def expand(coordinates: Tensor, directions: Tensors) -> Weights:
    """Return S·y for the coordinates y of every draw: (M, P, k), {name: (M, k, ...)} -> {name: (M, P, ...)}."""
    return {name: product(coordinates, s.flatten(2)).unflatten(2, s.shape[2:]) for name, s in directions.items()}


def with_draw_axis(weights: Tensors) -> Weights:
    """Return tensors with an axis of one draw: {name: (M, ...)} -> {name: (M, 1, ...)}."""
    return {name: tensor.unsqueeze(1) for name, tensor in weights.items()}
