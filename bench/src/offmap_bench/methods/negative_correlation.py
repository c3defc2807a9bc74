"""Negative correlation: members are pushed away from what the ensemble predicts, on the training data themselves.

The penalty is that of Liu and Yao (1999), which the paper cites, on the members' means. The authors' code lets it act on the
predicted log-variances as well, where it has no meaning; here it does not.
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
    """Train copies of the nets by maximum likelihood with a penalty on agreement."""
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
    losses = ensembles.negative_correlation(stack, likelihood, per_setting(configs, "tradeoff", stack))
    train_stack(
        stack, losses, train, valid, likelihood=likelihood, config=training, judge=together, seed=seed, progress=runtime.progress
    )
    return stack.sampled()
