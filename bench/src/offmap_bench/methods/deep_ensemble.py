"""Deep ensemble: plain nets trained from different starts, stacked in one pass. One net is the plain baseline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from offmap.data import Batches, Rows
from offmap.integrations.stack_training import Stack, Training, maximum_likelihood, train_stack
from offmap.likelihoods import Likelihood
from offmap.posterior.predictive import Sampled
from offmap.posterior.protocol import Runtime


@dataclass(frozen=True)
class Config(Training):
    """The paper's training of plain nets; the state of lowest validation NLL is kept."""


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
    """Train copies of the nets by maximum likelihood, all on the same batches."""
    stack = Stack.build(nets, valid.inputs, runtime)
    losses = maximum_likelihood(stack, likelihood)
    train_stack(stack, losses, train, valid, likelihood=likelihood, config=config, seed=seed, progress=runtime.progress)
    return stack.sampled()[0]
