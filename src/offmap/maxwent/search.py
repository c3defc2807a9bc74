"""The largest number by which φ may be multiplied: the last point of a grid whose validation risk stays at or below τ."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from offmap.maxwent.risk import Validation
from offmap.posterior.distribution import WeightDistribution

Look: TypeAlias = Callable[[Tensor], tuple[Tensor, ...]]
"""Factors, (M,), NaN for members that are not asked -> (M,) each: the risk first, then whatever else is seen."""

POWER = 4.0
"""How fast the risk rises above the base model's with the factor, before two looks tell better."""


class Found(NamedTuple):
    """The factor of every member, (M,), and what was seen there, NaN for members without a look at it."""

    factor: Tensor
    seen: tuple[Tensor, ...]


@dataclass
class Bracket:
    """One member's search: the answer is `below`, or a point between it and `above`.

    Bisection takes the middle. Where the base model's risk is known, the risk above it is close to a power of the factor: a line
    through the logarithms of two looks, or through one, tells where τ is reached, and mostly it is within a point of there.
    """

    below: int
    above: int
    slope: float  # of log (risk − plain) from point to point, before two looks tell better
    target: float  # log (τ − plain); NaN: not known
    looks: int = 0
    known: dict[int, float] = field(default_factory=dict)  # log (risk − plain) at points, where it is a number

    @property
    def open(self) -> bool:
        """Whether points are left."""
        return self.above - self.below > 1

    def next(self) -> int:
        """The point to look at."""
        guess = self._crossing()
        # lines may be poor: every third look halves what is left
        if math.isnan(guess) or (self.looks and self.looks % 3 == 0):
            return (self.below + self.above) // 2
        return min(max(math.floor(min(max(guess, self.below), self.above)), self.below + 1), self.above - 1)

    def saw(self, point: int, excess: float, *, passed: bool) -> None:
        """Note a look: risk − plain, and whether it is at most τ − plain."""
        self.looks += 1
        self.below, self.above = (point, self.above) if passed else (self.below, point)
        self.know(point, excess)

    def know(self, point: int, excess: float) -> None:
        """Let lines go through a point."""
        if 0 < excess < math.inf:
            self.known[point] = math.log(excess)

    def _crossing(self) -> float:
        """Where the line reaches the target."""
        near = sorted(self.known, key=lambda p: abs(self.known[p] - self.target))[:2]
        if not near or math.isnan(self.target):
            return math.nan
        slope = self.slope if len(near) == 1 else (self.known[near[0]] - self.known[near[1]]) / (near[0] - near[1])
        return near[0] + (self.target - self.known[near[0]]) / slope if slope > 0 else math.nan


def find_largest_factor(
    look: Look, max_risk: Tensor, plain: Tensor, *, start: tuple[Tensor, ...] | None = None, among: Tensor | None = None,
    low: float = 1e-5, high: float = 1e2, halvings: int = 10,
) -> Found:  # fmt: skip
    """The largest c per member among the points that so many halvings of log [low, high] come to, with risk(c) ≤ τ; `low` where
    none is. `plain` is the risk at c = 0, (M,), `init_fraction` what is seen at `low`, if it is known; members that are not `among` those
    sought for, (M,), get any number.

    >>> found = find_largest_factor(lambda c: (c.square(),), torch.tensor([4.0]), torch.zeros(1), halvings=24)
    >>> found.factor, found.seen
    (tensor([2.0000]), (tensor([4.0000]),))
    """
    slope = POWER * math.log(high / low) / 2**halvings
    ends = [2**halvings if sought else 1 for sought in (torch.ones_like(max_risk) if among is None else among).tolist()]
    targets = [math.log(s) if 0 < s < math.inf else math.nan for s in (max_risk - plain).tolist()]
    brackets = [Bracket(0, end, slope, target) for end, target in zip(ends, targets, strict=True)]
    seen = start
    if start is not None:
        for bracket, excess in zip(brackets, (start[0] - plain).tolist(), strict=True):
            bracket.know(0, excess)
    while any(b.open for b in brackets):
        points = [b.next() if b.open else b.below for b in brackets]
        asked = torch.tensor([b.open for b in brackets], device=max_risk.device)
        now = look(_point(points, max_risk, low, high, halvings).masked_fill(~asked, math.nan))
        passed = asked & (now[0] <= max_risk)
        for bracket, point, excess, fits in zip(brackets, points, (now[0] - plain).tolist(), passed.tolist(), strict=True):
            if bracket.open:
                bracket.saw(point, excess, passed=fits)
        before = seen or tuple(torch.full_like(each, math.nan) for each in now)
        seen = tuple(torch.where(passed, new, old) for new, old in zip(now, before, strict=True))
    return Found(_point([b.below for b in brackets], max_risk, low, high, halvings), seen or ())


def _point(index: list[int], like: Tensor, low: float, high: float, halvings: int) -> Tensor:
    """The factors at points of the grid, (M,): where bisection would come to."""
    points = torch.tensor(index, device=like.device)
    below, above = torch.full_like(like, low).log(), torch.full_like(like, high).log()
    for bit in reversed(range(halvings)):
        middle, upper = (below + above) / 2, (points >> bit & 1).bool()
        below, above = torch.where(upper, middle, below), torch.where(upper, above, middle)
    return below.exp()


def find_largest_factor_near(
    about: Tensor, look: Look, max_risk: Tensor, plain: Tensor, *, reach: float = 1.4, halvings: int = 5
) -> Found:
    """The same where a rough answer is known: sought within `reach` times of it, elsewhere for members without it.

    >>> find_largest_factor_near(torch.tensor([1.7]), lambda c: (c.square(),), torch.tensor([4.0]), torch.zeros(1), halvings=24).factor
    tensor([2.0000])
    """
    share, seen = find_largest_factor(lambda c: look(about * c), max_risk, plain, low=1 / reach, high=reach, halvings=halvings)
    edge = reach ** (1 - 2 ** (1 - halvings))  # what the last step leaves of the ends
    inside = (share * reach > 1 + 1e-6) & (share < edge * (1 - 1e-6))
    if bool(inside.all()):
        return Found(about * share, seen)
    wide = find_largest_factor(look, max_risk, plain, among=~inside)
    both = zip(seen, wide.seen, strict=True)
    return Found(torch.where(inside, about * share, wide.factor), tuple(torch.where(inside, near, far) for near, far in both))


def seen_of(found: Found, look: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """What the search saw at its answer; a look at φ as it is now, for members it did not look at there."""
    missing = found.seen[0].isnan()
    if not bool(missing.any()):
        return found.seen
    return tuple(torch.where(missing, now, then) for now, then in zip(look(), found.seen, strict=True))


def shrink_to_feasible(q: WeightDistribution, validation: Validation, max_risk: Tensor) -> tuple[Tensor, Tensor] | None:
    """Shrink the members whose risk is above τ until it is not; if there are none, what a look at them shows."""
    seen = validation.look(q)
    passed = seen[0] <= max_risk
    if bool(passed.all()):
        return seen
    found = find_largest_factor(validation.along(q), max_risk, validation.plain(q), among=~passed, low=1e-6, high=1.0)
    q.scale_by(torch.where(passed, torch.ones_like(max_risk), found.factor))
    return None
