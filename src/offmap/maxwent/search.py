"""Searches on validation data: the largest factor of φ whose risk stays at or below τ, and the clip of lowest risk."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from offmap.maxwent.risk import Validation
from offmap.posterior.distribution import WeightDistribution

Evaluate: TypeAlias = Callable[[Tensor], tuple[Tensor, ...]]
"""Factors, (M,), NaN for members that need not be evaluated -> (M,) each: the risk first, then anything else."""

CLIPS: tuple[float, ...] = (math.inf, 10.0, 5.0, 2.0, 1.0, 0.5, 0.2, 0.1, 0.0)
"""The paper's grid of clips."""

POWER = 4.0
"""How fast the risk rises above the base model's with the factor, before two points tell better."""


class Factor(NamedTuple):
    """The factor of every member, (M,), and what was evaluated there, NaN for members for which it was not."""

    factor: Tensor
    values: tuple[Tensor, ...]

    def fill_values(self, evaluate: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """Return the values, evaluating now for members that the search did not evaluate at their factor."""
        missing = self.values[0].isnan()
        if not bool(missing.any()):
            return self.values
        return tuple(torch.where(missing, now, then) for now, then in zip(evaluate(), self.values, strict=True))


@dataclass
class Bracket:
    """One member's search: the answer is `below`, or a point between it and `above`.

    Bisection takes the middle. Where the base model's risk is finite, the risk above it is close to a power of the factor: a line
    through the logarithms at two points, or through one, shows where τ is reached, mostly within a point.
    """

    below: int
    above: int
    slope: float  # of log (risk − base) from point to point, before two points tell better
    target: float  # log (τ − base); NaN: unknown
    evaluations: int = 0
    points: dict[int, float] = field(default_factory=dict)  # log (risk − base), where it is a number

    @property
    def open(self) -> bool:
        """Whether points are left."""
        return self.above - self.below > 1

    def next(self) -> int:
        """Return the point to evaluate."""
        guess = self._crossing()
        # lines may be poor: every third evaluation halves what is left
        if math.isnan(guess) or (self.evaluations and self.evaluations % 3 == 0):
            return (self.below + self.above) // 2
        return min(max(math.floor(min(max(guess, self.below), self.above)), self.below + 1), self.above - 1)

    def update(self, point: int, excess: float, *, passed: bool) -> None:
        """Narrow the bracket by an evaluation: risk − base, and whether it is at most τ − base."""
        self.evaluations += 1
        self.below, self.above = (point, self.above) if passed else (self.below, point)
        self.add_point(point, excess)

    def add_point(self, point: int, excess: float) -> None:
        """Let lines go through a point."""
        if 0 < excess < math.inf:
            self.points[point] = math.log(excess)

    def _crossing(self) -> float:
        """Return where the line reaches the target."""
        near = sorted(self.points, key=lambda p: abs(self.points[p] - self.target))[:2]
        if not near or math.isnan(self.target):
            return math.nan
        slope = self.slope if len(near) == 1 else (self.points[near[0]] - self.points[near[1]]) / (near[0] - near[1])
        return near[0] + (self.target - self.points[near[0]]) / slope if slope > 0 else math.nan


def find_largest_factor(
    evaluate: Evaluate, max_risk: Tensor, base_risk: Tensor, *, start: tuple[Tensor, ...] | None = None,
    among: Tensor | None = None, low: float = 1e-5, high: float = 1e2, halvings: int = 10,
) -> Factor:  # fmt: skip
    """Find the largest factor c per member with risk(c) ≤ τ, on the grid from `halvings` of log [low, high]; `low` if none is.

    `base_risk` is the risk at c = 0, (M,), `start` the results at `low`, if they are known; members that are not `among` those to
    search for, (M,) bool, get any number.

    >>> result = find_largest_factor(lambda c: (c.square(),), torch.tensor([4.0]), torch.zeros(1), halvings=24)
    >>> result.factor, result.values
    (tensor([2.0000]), (tensor([4.0000]),))
    """
    slope = POWER * math.log(high / low) / 2**halvings
    ends = [2**halvings if sought else 1 for sought in (torch.ones_like(max_risk) if among is None else among).tolist()]
    targets = [math.log(s) if 0 < s < math.inf else math.nan for s in (max_risk - base_risk).tolist()]
    brackets = [Bracket(0, end, slope, target) for end, target in zip(ends, targets, strict=True)]
    values = start
    if start is not None:
        for bracket, excess in zip(brackets, (start[0] - base_risk).tolist(), strict=True):
            bracket.add_point(0, excess)
    while any(b.open for b in brackets):
        points = [b.next() if b.open else b.below for b in brackets]
        active = torch.tensor([b.open for b in brackets], device=max_risk.device)
        now = evaluate(_grid_point(points, max_risk, low, high, halvings).masked_fill(~active, math.nan))
        passed = active & (now[0] <= max_risk)
        for bracket, point, excess, fits in zip(brackets, points, (now[0] - base_risk).tolist(), passed.tolist(), strict=True):
            if bracket.open:
                bracket.update(point, excess, passed=fits)
        before = values or tuple(torch.full_like(value, math.nan) for value in now)
        values = tuple(torch.where(passed, new, old) for new, old in zip(now, before, strict=True))
    return Factor(_grid_point([b.below for b in brackets], max_risk, low, high, halvings), values or ())


def _grid_point(index: list[int], like: Tensor, low: float, high: float, halvings: int) -> Tensor:
    """Return the factors at points of the grid, (M,): those that bisection would come to."""
    points = torch.tensor(index, device=like.device)
    below, above = torch.full_like(like, low).log(), torch.full_like(like, high).log()
    for bit in reversed(range(halvings)):
        middle, upper = (below + above) / 2, (points >> bit & 1).bool()
        below, above = torch.where(upper, middle, below), torch.where(upper, above, middle)
    return below.exp()


def find_largest_factor_near(
    guess: Tensor, evaluate: Evaluate, max_risk: Tensor, base_risk: Tensor, *, reach: float = 1.4, halvings: int = 5
) -> Factor:
    """Find the largest factor within `reach` times of a guess, (M,), and elsewhere for members for which it is not there.

    >>> guess, max_risk = torch.tensor([1.7]), torch.tensor([4.0])
    >>> find_largest_factor_near(guess, lambda c: (c.square(),), max_risk, torch.zeros(1), halvings=24).factor
    tensor([2.0000])
    """
    ratio, values = find_largest_factor(
        lambda c: evaluate(guess * c), max_risk, base_risk, low=1 / reach, high=reach, halvings=halvings
    )
    edge = reach ** (1 - 2 ** (1 - halvings))  # what the last step leaves of the ends
    inside = (ratio * reach > 1 + 1e-6) & (ratio < edge * (1 - 1e-6))
    if bool(inside.all()):
        return Factor(guess * ratio, values)
    wide = find_largest_factor(evaluate, max_risk, base_risk, among=~inside)
    both = zip(values, wide.values, strict=True)
    return Factor(torch.where(inside, guess * ratio, wide.factor), tuple(torch.where(inside, near, far) for near, far in both))


def shrink_to_feasible(q: WeightDistribution, validation: Validation, max_risk: Tensor) -> tuple[Tensor, Tensor] | None:
    """Shrink the members whose risk is above τ until it is not; if there are none, return risk and uncertainty, (M,) each."""
    values = validation.evaluate(q)
    passed = values[0] <= max_risk
    if bool(passed.all()):
        return values
    result = find_largest_factor(validation.evaluator(q), max_risk, validation.base_risk(q), among=~passed, low=1e-6, high=1.0)
    q.scale_by(torch.where(passed, torch.ones_like(max_risk), result.factor))
    return None


def find_lowest(risks: Mapping[float, float]) -> float:
    """Return the candidate of lowest risk, the first of equals; NaN never wins.

    >>> find_lowest({3.0: 9.0, 1.0: 1.0, -1.0: 1.0})
    1.0
    """
    return min(risks, key=lambda candidate: math.inf if math.isnan(risks[candidate]) else risks[candidate])
