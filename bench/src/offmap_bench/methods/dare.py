"""Deep anti-regularized ensembles (DARE): weights grow as long as the training loss stays below a threshold.

The loss is that of de Mathelin et al. (2023): the mean of log w² is maximised while the batch's NLL is at most τ. Here it goes on
from trained nets, τ is what MaxWEnt allows (their validation NLL plus twice its standard error), and every member ends with its
last state whose validation NLL is at most τ. Nets that are not trained yet need a `max_risk`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from offmap.data import Batches, Rows
from offmap.integrations.stack_training import Stack, Training, member_losses, not_negative, per_setting, train_stack
from offmap.likelihoods import Likelihood
from offmap.posterior.predictive import Sampled
from offmap.posterior.protocol import Runtime
from offmap_bench.methods import ensemble_losses as ensembles


@dataclass(frozen=True)
class Config(Training):
    """Every member keeps its last state at or below τ."""

    tradeoff: float = 1.0  # λ on the mean of log w²
    max_risk: float | None = None  # τ; None: from the nets as they are given


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
    """Let copies of trained nets grow."""
    check(config)
    stack = Stack.build(nets, valid.inputs, runtime)
    threshold = thresholds(stack, likelihood, valid, config.max_risk)
    losses = ensembles.anti_regularised(stack, likelihood, per_setting([config], "tradeoff", stack), threshold)
    train_stack(
        stack, losses, train, valid, likelihood=likelihood, config=config, ceiling=threshold, seed=seed,
        progress=runtime.progress,
    )  # fmt: skip
    return stack.sampled()[0]


def thresholds(stack: Stack, likelihood: Likelihood, valid: Rows, given: float | None) -> Tensor:
    """τ of every member, (M,): the mean of its validation losses plus 2·std/√n, or the same given number for all."""
    each = member_losses(stack.model, stack.weights | stack.fixed, likelihood, valid)
    own = each.mean(1) + 2 * each.std(1, correction=0) / math.sqrt(each.shape[1])
    return own if given is None else torch.full_like(own, given)


def check(config: Config) -> None:
    """Refuse impossible settings before any work."""
    not_negative([config], "tradeoff")
