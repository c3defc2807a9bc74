"""Kinds of Predictive: `Stochastic` over a WeightDistribution, `Sampled` over any function that draws weights;
a `Member` of one, and one `CachedPredictive`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torch import Tensor, nn

from offmap._types import Inputs, Weights
from offmap.errors import ConfigError
from offmap.maxwent.monitors import History
from offmap.model.forward import BatchedModel
from offmap.model.params import at, copy_model
from offmap.posterior.distribution import CACHE_BYTES, WeightDistribution
from offmap.posterior.protocol import Predictive

Drawn: TypeAlias = dict[tuple[int, int, float | None, tuple[int, ...]], dict[range, Weights]]
"""Draws by their number, seed, clip and the version of q, in spans; the number counts weights."""


@dataclass(frozen=True)
class Stochastic:
    """A model whose weights follow q."""

    model: BatchedModel
    q: WeightDistribution
    history: History = field(default_factory=History)
    _drawn: Drawn = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def members(self) -> int:
        """M."""
        return self.q.members

    def plain(self, member: int = 0) -> Weights:
        """The weights of one model as it was trained."""
        return at(dict(self.q.mean.items()), member) | at(dict(self.q.fixed.items()), member)

    def outputs(self, x: Inputs, draws: int, *, clip: float | None, seed: int) -> Tensor:
        """(M·P, B, ...), member-major."""
        if clip == 0:  # all draws are the model itself
            plain = self.model.outputs(lambda span: self.q.draw(span, clip=0), 1, x, members=self.members)
            return plain.repeat_interleave(draws, 0)
        return self.model.outputs(lambda span: self._draw(span, draws, seed, clip), draws, x, members=self.members)

    def _draw(self, span: range, draws: int, seed: int, clip: float | None) -> Weights:
        """Some of `draws` draws of q, the latest remembered if all are small: for a few rows, drawing is most of the work."""
        numbers = draws * self.members * self.q.dimension
        if numbers > CACHE_BYTES:
            return self.q.draw(span, seed=seed, clip=clip)
        spans = self._drawn.setdefault((numbers, seed, clip, self.q.version()), {})
        drawn = spans.get(span)
        if drawn is None:
            drawn = spans[span] = self.q.draw(span, seed=seed, clip=clip)
            total = sum(key[0] for key in list(self._drawn))
            for oldest in list(self._drawn):
                if total > CACHE_BYTES:
                    self._drawn.pop(oldest, None)
                    total -= oldest[0]
        return drawn


@dataclass(frozen=True)
class Sampled:
    """A model whose weights come from `draw(span, seed)`, {name: (M·p, ...)}; without it nothing is random and P is 1.

    `weights` are the members' trained weights, {name: (M, ...)}. There is nothing to clip.
    """

    model: BatchedModel
    weights: Weights
    draw: Callable[[range, int], Weights] | None = None

    @property
    def members(self) -> int:
        """M."""
        return next(iter(self.weights.values())).shape[0]

    def plain(self, member: int = 0) -> Weights:
        """The weights of one model as it was trained."""
        return at(self.weights, member)

    def outputs(self, x: Inputs, draws: int, *, clip: float | None = None, seed: int = 0) -> Tensor:
        """(M·P, B, ...), member-major; P = 1 when nothing is random."""
        draw = self.draw
        if draw is None:
            return self.model.outputs(lambda span: self.weights, 1, x, members=self.members)
        return self.model.outputs(lambda span: draw(span, seed), draws, x, members=self.members)

    def nets(self) -> list[nn.Module]:
        """The trained members as plain modules."""
        result: list[nn.Module] = []
        for member in range(self.members):
            net = copy_model(self.model.net)
            net.load_state_dict(at(self.weights, member), strict=False)
            result.append(net)
        return result


@dataclass(frozen=True)
class Member:
    """One member of any Predictive, seen alone.

    Members do not disturb each other: it is what a fit on that net by itself gives, with the noise of its number.
    """

    whole: Predictive
    index: int

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.whole.members:
            raise ConfigError(f"Expected `index` from 0 to {self.whole.members - 1}, one of the members, but got {self.index}.")

    @property
    def members(self) -> int:
        """1."""
        return 1

    @property
    def model(self) -> BatchedModel | None:
        """The model that runs it, if there is one."""
        return getattr(self.whole, "model", None)

    @property
    def plain(self) -> Callable[..., Weights] | None:
        """Gives the weights of its model as it was trained, if that is known."""
        whole = getattr(self.whole, "plain", None)
        return None if whole is None else lambda member=0: whole(self.index)

    def outputs(self, x: Inputs, draws: int, *, clip: float | None = None, seed: int = 0) -> Tensor:
        """(P, B, ...); all members run, and the others' outputs are left out."""
        stacked = self.whole.outputs(x, draws, clip=clip, seed=seed)
        return stacked.unflatten(0, (self.whole.members, -1))[self.index]


@dataclass(frozen=True)
class CachedPredictive:
    """A Predictive that runs once for the same rows, draws, clip and seed: members, clips and scores then share its outputs.

    It remembers outputs of tables, at most `most` numbers of them in all.
    """

    whole: Predictive
    most: float = math.inf
    _known: dict[tuple[Any, ...], tuple[Tensor, Tensor]] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def members(self) -> int:
        """M."""
        return self.whole.members

    @property
    def model(self) -> BatchedModel | None:
        """The model that runs it, if there is one."""
        return getattr(self.whole, "model", None)

    @property
    def plain(self) -> Callable[..., Weights] | None:
        """Gives the weights of a member as it was trained, if they are known."""
        return getattr(self.whole, "plain", None)

    def outputs(self, x: Inputs, draws: int, *, clip: float | None, seed: int) -> Tensor:
        """(M·P, B, ...), member-major."""
        if not isinstance(x, Tensor):
            return self.whole.outputs(x, draws, clip=clip, seed=seed)
        key = x.data_ptr(), x.shape, x.stride(), draws, None if clip == math.inf else clip, seed
        if key not in self._known:
            made = self.whole.outputs(x, draws, clip=clip, seed=seed)
            if made.numel() + sum(known.numel() for _, known in self._known.values()) > self.most:
                return made
            # the inputs are kept too: while they live, no other rows can have their address
            self._known[key] = x, made
        return self._known[key][1]
