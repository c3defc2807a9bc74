"""What is minimised: closures (step, batch) -> scalar, summed over members so that stacked models do not disturb each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

from torch import Tensor

from offmap import checks
from offmap.data import Batch
from offmap.errors import ConfigError, nearest
from offmap.likelihoods import Likelihood
from offmap.model.forward import BatchedModel
from offmap.posterior.distribution import WeightDistribution, sum_per_member

Objective: TypeAlias = Callable[[int, Batch], Tensor]
Growth: TypeAlias = Callable[[Tensor], Tensor]
"""A growing function g of φ (eq. 14 of the paper writes it of φ²)."""

GROWTHS: dict[str, Growth] = {"abs": lambda scale: scale, "log": lambda scale: 2 * scale.log()}
"""g(φ²) = √φ² = |φ|, the paper's proxy, and g(φ²) = log φ², the entropy itself up to constants."""


def as_growth(growth: str | Growth) -> Growth:
    """Return the growth of that name; a function of the user's is g of φ²."""
    if callable(growth):
        checks.function("regularizer", growth, ["φ²"])
        return lambda scale: growth(scale.square())
    if not isinstance(growth, str) or growth not in GROWTHS:
        raise ConfigError(
            f"Expected `regularizer` to be {nearest(str(growth), GROWTHS)} or a function of φ², but got {growth!r}."
        )
    return GROWTHS[growth]


def maxwent(
    q: WeightDistribution, model: BatchedModel, likelihood: Likelihood, *, entropy_weight: float, growth: Growth = GROWTHS["abs"],
    draws: int = 1, seed: int = 0,
) -> Objective:  # fmt: skip
    """Return the objective of algorithm 1: E_q[NLL] − λ·(1/d) Σ g(φ²), the expectation over `draws` draws per step.

    For a user's own ω the entropy itself, sampled with the same draws, takes the place of Σ g.
    """

    def objective(step: int, batch: Batch) -> Tensor:
        index = range(step * draws, (step + 1) * draws)
        scale = q.scale()
        risk = expected_nll(q, model, likelihood, batch, index, scale, seed)
        if q.parameterization is not None:
            entropy = q.sampled_entropy(index, seed=seed, stream="fit")
        else:
            entropy = sum_per_member({name: growth(s) for name, s in scale.items()})
        return (risk - entropy_weight / q.dimension * entropy).sum()

    return objective


def expected_nll(
    q: WeightDistribution, model: BatchedModel, likelihood: Likelihood, batch: Batch, index: range, scale: Mapping[str, Tensor],
    seed: int,
) -> Tensor:  # fmt: skip
    """Return E_q[NLL] per member, (M,), over the draws in `index`."""
    x, y = batch
    outputs = model(q.draw(index, seed=seed, stream="fit", scale=scale), x)
    return likelihood.nll(outputs, y).mean(1).unflatten(0, (q.members, len(index))).mean(1)
