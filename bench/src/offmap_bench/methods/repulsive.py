"""Repulsive deep ensemble (RDE): members push each other apart in weight space, the nearest most.

D'Angelo and Fortuin (2021), which the paper cites, as in the authors' code: Σ_j k / stopgrad(Σ_j k) with the median heuristic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from offmap.data import Batches, Rows
from offmap.errors import ConfigError
from offmap.integrations.stack_training import Stack, Training, together, train_stack
from offmap.likelihoods import Likelihood
from offmap.posterior.predictive import Sampled
from offmap.posterior.protocol import Runtime
from offmap_bench.methods import ensemble_losses as ensembles


@dataclass(frozen=True)
class Config(Training):
    """The state whose ensemble has the lowest validation NLL is kept."""

    bandwidth: float | None = None  # h of exp(−‖w_i − w_j‖²/h²); None: the median heuristic
    fixed_median: bool = False  # True: no gradient through the median, as in D'Angelo and Fortuin's own code


def fit(
    nets: Sequence[nn.Module],
    train: Batches,
    valid: Rows,
    *,
    likelihood: Likelihood,
    config: Config = Config(),
    seed: int = 0,
    runtime: Runtime = Runtime(),
) -> Sampled:
    """Train copies of the nets by maximum likelihood while they repel each other."""
    if config.bandwidth is not None and not config.bandwidth > 0:
        raise ConfigError(f"Expected `bandwidth` to be above 0, or None for the median heuristic, but got {config.bandwidth!r}.")
    stack = Stack.build(nets, valid.inputs, runtime)
    if stack.members < 2:
        raise ConfigError("Expected at least two nets, which can repel each other, but got one.")
    losses = ensembles.repulsive(stack, likelihood, bandwidth=config.bandwidth, fixed_median=config.fixed_median)
    train_stack(
        stack, losses, train, valid, likelihood=likelihood, config=config, judge=together, seed=seed, progress=runtime.progress
    )
    return stack.sampled()[0]
