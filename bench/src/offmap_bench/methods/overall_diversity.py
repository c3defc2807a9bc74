"""Maximise overall diversity (MOD): members are rewarded for disagreeing on inputs drawn around the training data.

The reward is the variance of the members' means, after Jain et al. (2020), which the paper cites. As in the authors' code the
inputs are uniform in the box that the batch spans, one for every row of the batch, new at every step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from offmap.data import Batches, Rows
from offmap.integrations.stack_training import Stack, Training, not_negative, per_setting, shared, together, train_stack
from offmap.likelihoods import Likelihood
from offmap.posterior.predictive import Sampled
from offmap.posterior.protocol import Runtime
from offmap_bench.methods import ensemble_losses as ensembles


@dataclass(frozen=True)
class Config(Training):
    """The state whose ensemble has the lowest validation NLL is kept."""

    tradeoff: float = 0.1  # λ; the paper's grid: 1, 0.1, …, 1e-5


def fit(
    nets: nn.Module | Sequence[nn.Module],
    train: Batches,
    valid: Rows,
    *,
    likelihood: Likelihood,
    config: Config = Config(),
    seed: int = 0,
    runtime: Runtime = Runtime(),
) -> Sampled:
    """Train copies of the nets by maximum likelihood with a reward for diversity between the data."""
    return fit_grid(nets, train, valid, likelihood=likelihood, configs=[config], seed=seed, runtime=runtime)[0]


def fit_grid(
    nets: nn.Module | Sequence[nn.Module],
    train: Batches,
    valid: Rows,
    *,
    likelihood: Likelihood,
    configs: Sequence[Config],
    seed: int = 0,
    runtime: Runtime = Runtime(),
) -> list[Sampled]:
    """One ensemble for every setting, all in one stack; settings differ in `tradeoff`."""
    training = shared(configs)
    not_negative(configs, "tradeoff")
    stack = Stack.build(nets, valid.inputs, runtime, settings=len(configs))
    losses = ensembles.overall_diversity(stack, likelihood, per_setting(configs, "tradeoff", stack), seed=seed)
    train_stack(
        stack, losses, train, valid, likelihood=likelihood, config=training, judge=together, seed=seed, progress=runtime.progress
    )
    return stack.sampled()
