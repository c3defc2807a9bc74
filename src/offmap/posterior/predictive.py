"""What a guard asks of a random model, `Predictive`, and its kinds: around a WeightDistribution, a function, or another one."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

from offmap._types import Inputs, Weights
from offmap.errors import ConfigError
from offmap.model.forward import CACHE_NUMBERS, BatchedModel, LRUCache, content_key, copy_model, version_key
from offmap.model.params import at
from offmap.posterior.distribution import WeightDistribution


@runtime_checkable
class Scorer(Protocol):
    """Whatever tells OOD inputs from in-distribution ones."""

    def score(self, x: Inputs) -> Tensor:
        """Return the scores of `x`, (B,): higher = more OOD."""
        ...


@dataclass
class History:
    """How a fit went, one entry per check: lists over members inside."""

    max_risk: list[float] = field(default_factory=list)
    step: list[int] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)
    risk: list[list[float]] = field(default_factory=list)
    entropy: list[list[float]] = field(default_factory=list)  # the paper's (1/d) Σ log φ²
    uncertainty: list[list[float]] = field(default_factory=list)  # the mean score of the validation inputs
    kept: list[int] = field(default_factory=list)  # the step whose state each member ended with (0: the start)
    final_risk: list[float] = field(default_factory=list)  # of the states that the fit returned
    final_entropy: list[float] = field(default_factory=list)
    stop_reason: str = ""
    chosen: dict[str, Any] = field(default_factory=dict)

    def add(self, step: int, loss: float, risk: Tensor, entropy: Tensor, uncertainty: Tensor) -> None:
        """Note one check, (M,) each."""
        self.step.append(step)
        self.loss.append(loss)
        for values, new in ((self.risk, risk), (self.entropy, entropy), (self.uncertainty, uncertainty)):
            values.append(new.tolist())

    def describe(self) -> str:
        """Put the last check in words: mean over members."""
        if not self.step:
            return ""
        mean = [sum(v) / len(v) for v in (self.risk[-1], self.max_risk, self.entropy[-1])]
        return f"risk {mean[0]:.3f} (τ {mean[1]:.3f}), entropy {mean[2]:.2f}"

    def of_kept(self) -> tuple[list[float], list[float]]:
        """Return risk and uncertainty of the state that each member keeps, as they were measured."""
        rows = [self.step.index(step) for step in self.kept]
        risk, uncertainty = ([values[r][m] for m, r in enumerate(rows)] for values in (self.risk, self.uncertainty))
        return risk, uncertainty

    def finish(self, risk: Tensor, entropy: Tensor) -> None:
        """Note what was reached, (M,) each."""
        self.final_risk, self.final_entropy = risk.tolist(), entropy.tolist()


@runtime_checkable
class Outputs(Protocol):
    """The least that `offmap.guard` takes: a number of models and a stack of their outputs."""

    @property
    def members(self) -> int:
        """M, the number of models."""
        ...

    def outputs(self, x: Inputs, draws: int, *, clip: float | None, seed: int) -> Tensor:
        """Return the outputs for `x`, (M·P, B, ...), member-major: `draws` of each member, bounded by `clip`, set by `seed`."""
        ...


@runtime_checkable
class Predictive(Outputs, Protocol):
    """A random model: all that a guard, its file and its export ask of it. What a class does not have is None."""

    @property
    def model(self) -> BatchedModel | None:
        """The model and how it is run; a guard without it compares inputs, but no layers."""
        ...

    @property
    def history(self) -> History | None:
        """How it was fitted."""
        ...

    def mean_weights(self, member: int = 0) -> Weights | None:
        """Return the weights of one member as it was trained, {name: (...)}."""
        ...


@dataclass(frozen=True)
class OutputsOnly:
    """A Predictive around a class that has `members` and `outputs` alone: neither its layers nor its weights are known."""

    source: Outputs
    model: None = field(default=None, init=False)
    history: None = field(default=None, init=False)

    @property
    def members(self) -> int:
        """M."""
        return self.source.members

    def mean_weights(self, member: int = 0) -> None:
        """Return None: nothing is known of the weights."""

    def outputs(self, x: Inputs, draws: int, *, clip: float | None = None, seed: int = 0) -> Tensor:
        """Return the outputs of the class itself."""
        return self.source.outputs(x, draws, clip=clip, seed=seed)


def as_predictive(source: Outputs) -> Predictive:
    """Return `source` itself if it is a full Predictive; complete it if it has `members` and `outputs`; else raise."""
    if isinstance(source, type) or not isinstance(source, Outputs):
        raise ConfigError(f"Expected `predictive` to have `members` and `outputs`, but got {type(source).__name__}.")
    if isinstance(source, Predictive):
        return source
    named: type[OutputsOnly] = type(type(source).__name__, (OutputsOnly,), {})  # summaries and errors name the user's class
    return named(source)


@dataclass(frozen=True)
class Stochastic:
    """A model whose weights follow q."""

    model: BatchedModel
    q: WeightDistribution
    history: History = field(default_factory=History)
    _draws: LRUCache = field(default_factory=LRUCache, init=False, repr=False, compare=False)

    @property
    def members(self) -> int:
        """M."""
        return self.q.members

    def mean_weights(self, member: int = 0) -> Weights:
        """Return the weights of one model as it was trained."""
        return {n: w[member] for n, w in (*self.q.mean.items(), *self.q.fixed.items())}

    def outputs(self, x: Inputs, draws: int, *, clip: float | None, seed: int) -> Tensor:
        """Return (M·P, B, ...), member-major."""
        q, members = self.q, self.q.members
        if clip == 0:  # all draws are the model itself
            return self.model.outputs(lambda span: q.draw(span, clip=0), 1, x, members=members).repeat_interleave(draws, 0)
        if draws * members * q.size > CACHE_NUMBERS:
            return self.model.outputs(lambda span: q.draw(span, seed=seed, clip=clip), draws, x, members=members)
        # for a few rows, drawing is most of the work
        key = (draws, seed, clip, version_key([*q.parameters(), *q.mean.buffers()]))
        drawn = self._draws.get(key)
        if drawn is None:
            stacked = q.draw(range(draws), seed=seed, clip=clip)
            drawn = self._draws.put(key, {n: w.unflatten(0, (members, draws)) for n, w in stacked.items()})
        return self.model.outputs(
            lambda span: {n: w[:, span.start : span.stop].flatten(0, 1) for n, w in drawn.items()}, draws, x, members=members
        )


@dataclass(frozen=True)
class Sampled:
    """A model whose weights come from a function; there is nothing to clip."""

    model: BatchedModel
    weights: Weights  # the members' trained ones, {name: (M, ...)}
    draw: Callable[[range, int], Weights] | None = None  # (span, seed) -> {name: (M·p, ...)}; without it nothing is random, P = 1
    history: History | None = None

    @property
    def members(self) -> int:
        """M."""
        return next(iter(self.weights.values())).shape[0]

    def mean_weights(self, member: int = 0) -> Weights:
        """Return the weights of one model as it was trained."""
        return at(self.weights, member)

    def outputs(self, x: Inputs, draws: int, *, clip: float | None = None, seed: int = 0) -> Tensor:
        """Return (M·P, B, ...), member-major; P = 1 when nothing is random."""
        draw = self.draw
        if draw is None:
            return self.model.outputs(lambda span: self.weights, 1, x, members=self.members)
        return self.model.outputs(lambda span: draw(span, seed), draws, x, members=self.members)

    def nets(self) -> list[nn.Module]:
        """Return the trained members as plain modules."""
        nets = [copy_model(self.model.module) for _ in range(self.members)]
        for member, net in enumerate(nets):
            net.load_state_dict(at(self.weights, member), strict=False)
        return nets


@dataclass(frozen=True)
class Wrapper:
    """A Predictive around another, to which it passes on whatever it does not change."""

    source: Predictive

    @property
    def members(self) -> int:
        """M."""
        return self.source.members

    @property
    def model(self) -> BatchedModel | None:
        """The model that runs it."""
        return self.source.model

    @property
    def history(self) -> History | None:
        """How it was fitted."""
        return self.source.history

    def mean_weights(self, member: int = 0) -> Weights | None:
        """Return the weights of a member as it was trained."""
        return self.source.mean_weights(member)


@dataclass(frozen=True)
class CachedPredictive(Wrapper):
    """A Predictive that runs once for equal rows, draws, clip and seed: members, clips and scores then share its outputs."""

    cache: LRUCache = field(default_factory=LRUCache, repr=False, compare=False)

    def outputs(self, x: Inputs, draws: int, *, clip: float | None, seed: int) -> Tensor:
        """Return (M·P, B, ...), member-major."""
        key = content_key(x), draws, None if clip == math.inf else clip, seed
        outputs = self.cache.get(key)
        return self.cache.put(key, self.source.outputs(x, draws, clip=clip, seed=seed)) if outputs is None else outputs
