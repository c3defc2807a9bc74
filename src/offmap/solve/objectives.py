"""What is minimised: closures (step, batch) -> scalar, summed over members so that stacked hosts do not disturb each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from torch import Tensor

from offmap.batches import Batch
from offmap.core.distribution import WeightDistribution, sum_per_member
from offmap.core.forward import Host
from offmap.errors import ConfigError, nearest
from offmap.likelihoods import Likelihood

Objective: TypeAlias = Callable[[int, Batch], Tensor]
Growth: TypeAlias = Callable[[Tensor], Tensor]
"""A growing function g of φ (eq. 14 of the paper writes it of φ²)."""

GROWTHS: dict[str, Growth] = {"abs": lambda scale: scale, "log": lambda scale: 2 * scale.log()}
"""g(φ²) = √φ² = |φ|, the paper's proxy, and g(φ²) = log φ², the entropy itself up to constants."""


def as_growth(growth: str | Growth) -> Growth:
    """The growth of that name; a function of the user's is g of φ²."""
    if callable(growth):
        return lambda scale: growth(scale.square())
    if not isinstance(growth, str) or growth not in GROWTHS:
        raise ConfigError(f"Expected `entropy` to be {nearest(str(growth), GROWTHS)} or a function of φ², but got {growth!r}.")
    return GROWTHS[growth]


def maxwent(
    q: WeightDistribution,
    host: Host,
    likelihood: Likelihood,
    *,
    tradeoff: float,
    growth: Growth = GROWTHS["abs"],
    draws: int = 1,
    seed: int = 0,
) -> Objective:
    """Algorithm 1: E_q[NLL] − λ·(1/d) Σ g(φ²), the expectation over `draws` draws per step.

    For a user's own ω the entropy itself, sampled with the same draws, takes the place of Σ g.
    """

    def objective(step: int, batch: Batch) -> Tensor:
        x, y = batch
        index = range(step * draws, (step + 1) * draws)
        scale = q.scale()
        outputs = host(q.draw(index, seed=seed, stream="fit", scale=scale), x)
        risk = likelihood.nll(outputs, y).mean(1).unflatten(0, (q.members, draws)).mean(1)
        if q.parameterization is not None:
            spread = q.sampled_entropy(index, seed=seed, stream="fit")
        else:
            spread = sum_per_member({name: growth(s) for name, s in scale.items()})
        return (risk - tradeoff / q.dimension * spread).sum()

    return objective
