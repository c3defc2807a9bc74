"""φ without gradients: c times the geometry of the training activations, with the largest c whose risk stays at or below τ.

With s the amplitude of a matrix' inputs along each direction, b its fan-in, and r_j the amplitude of its pre-activation j:

    φ_kj = c·r_j / (√b·a_k),  a_k = max(s_k, ε·max s)        bias: φ_j = c·r_j / √b        anything else: φ = c·rms(w̄)

so that every pre-activation gets noise of c times its own size, whatever the layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from offmap.maxwent.risk import Validation
from offmap.posterior.basis import Basis
from offmap.posterior.distribution import WeightDistribution

FLOOR = 1e-3
"""Pre-activations and weights smaller than this share of their layer's size count as that share: dead units get no φ = 0."""

Evaluate: TypeAlias = Callable[[Tensor], Sequence[Tensor]]
"""Factors, (M,), NaN for members that need not be evaluated -> risk and uncertainty, (M,) each, and anything else."""


def unit_scale(mean: Mapping[str, Tensor], bases: Mapping[str, Basis], *, eps: float | Tensor) -> Callable[[str], Tensor]:
    """Return φ at c = 1 of a parameter by name, (M, ...); `eps` is ε, one or (M,)."""
    biases = {b.bias: b for b in bases.values() if b.bias is not None}

    def unit(name: str) -> Tensor:
        weight, basis = mean[name], bases.get(name) or biases.get(name)
        dtype = torch.promote_types(weight.dtype, torch.float32)
        if basis is None or (name not in bases and basis.output_rms.numel() != weight.numel()):
            rms = weight.double().flatten(1).square().mean(1).sqrt().clamp_min(FLOOR)
            return rms.view(-1, *[1] * (weight.ndim - 1)).expand_as(weight).to(dtype)
        typical, root = basis.output_rms.square().mean(1, keepdim=True).sqrt(), basis.view.fan_in**0.5
        output = torch.maximum(basis.output_rms, FLOOR * torch.where(typical > 0, typical, torch.ones_like(typical)))
        if name not in bases:
            return (output / root).reshape(weight.shape).to(dtype)
        s, largest = basis.input_rms, basis.input_rms.amax(-1, keepdim=True)
        least = eps.view(-1, *[1] * (s.ndim - 1)).to(s) if isinstance(eps, Tensor) else eps
        # a block whose inputs are all zero has no scale to go by
        a = torch.maximum(s, least * torch.where(largest > 0, largest, torch.ones_like(largest)))
        ratio = output.to(dtype).unsqueeze(2) / basis.view.per_row((root * a).to(dtype))  # (M, out, D)
        return basis.view.back(ratio, weight.shape[1:])

    return unit


class Factor(NamedTuple):
    """The factor of every member, (M,), and what was evaluated there, NaN for members that were not."""

    factor: Tensor
    values: tuple[Tensor, ...]


def next_point(below: int, above: int, points: Mapping[int, float], target: float, slope: float, *, halve: bool) -> int:
    """Return the point between two others to evaluate next: the middle, or where a line through `points` reaches the target.

    These are log (risk − base risk) and log (τ − base risk), NaN if unknown: the risk above the base model's is close to a power
    of the factor. `slope` is that of the line while there is but one point.
    """
    guess, near = math.nan, sorted(points, key=lambda p: abs(points[p] - target))[:2]
    if near and not math.isnan(target):
        slope = slope if len(near) == 1 else (points[near[0]] - points[near[1]]) / (near[0] - near[1])
        guess = near[0] + (target - points[near[0]]) / slope if slope > 0 else math.nan
    if halve or math.isnan(guess):
        return (below + above) // 2
    return min(max(math.floor(min(max(guess, below), above)), below + 1), above - 1)


def find_largest_factor(
    evaluate: Evaluate, max_risk: Tensor, base_risk: Tensor, *, start: tuple[Tensor, ...] | None = None,
    among: Tensor | None = None, low: float = 1e-5, high: float = 1e2, halvings: int = 10,
) -> Factor:  # fmt: skip
    """Find the largest factor c per member with risk(c) ≤ τ, on the grid from `halvings` of log [low, high]; `low` if none is.

    `base_risk` is the risk at c = 0, (M,), `start` the values at `low`, if known; members that are not `among` get any number.

    >>> result = find_largest_factor(lambda c: (c.square(),), torch.tensor([4.0]), torch.zeros(1), halvings=24)
    >>> result.factor, result.values
    (tensor([2.0000]), (tensor([4.0000]),))
    """
    slope = 4 * math.log(high / low) / 2**halvings  # the risk rises with about the fourth power of the factor
    targets = [math.log(s) if 0 < s < math.inf else math.nan for s in (max_risk - base_risk).tolist()]
    above = [2**halvings if sought else 1 for sought in (torch.ones_like(max_risk) if among is None else among).tolist()]
    below, values, rounds = [0] * len(above), start, 0
    excess = [math.nan] * len(above) if start is None else (start[0] - base_risk).tolist()
    points = [{0: math.log(e)} if 0 < e < math.inf else {} for e in excess]
    while any(active := [last - first > 1 for first, last in zip(below, above, strict=True)]):
        halve = rounds > 0 and rounds % 3 == 0  # lines may be poor: every third evaluation halves what is left
        brackets = zip(below, above, points, targets, active, strict=True)
        index = [next_point(a, b, p, t, slope, halve=halve) if on else a for a, b, p, t, on in brackets]
        searched, rounds = torch.tensor(active, device=max_risk.device), rounds + 1
        now = evaluate(_grid_point(index, max_risk, low, high, halvings).masked_fill(~searched, math.nan))[:2]
        passed = searched & (now[0] <= max_risk)
        for m, (e, fits) in enumerate(zip((now[0] - base_risk).tolist(), passed.tolist(), strict=True)):
            if active[m]:
                (below if fits else above)[m] = index[m]
                points[m] |= {index[m]: math.log(e)} if 0 < e < math.inf else {}
        before = values or tuple(torch.full_like(value, math.nan) for value in now)
        values = tuple(torch.where(passed, new, old) for new, old in zip(now, before, strict=True))
    return Factor(_grid_point(below, max_risk, low, high, halvings), values or ())


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


def shrink_to_feasible(q: WeightDistribution, validation: Validation, max_risk: Tensor) -> Sequence[Tensor] | None:
    """Shrink the members whose risk is above τ until it is not; if there are none, return what was evaluated."""
    values = validation.evaluate(q)
    passed = values[0] <= max_risk
    if bool(passed.all()):
        return values
    result = find_largest_factor(validation.evaluator(q), max_risk, validation.base_risk(q), among=~passed, low=1e-6, high=1.0)
    q.scale_by(torch.where(passed, torch.ones_like(max_risk), result.factor))
    return None
