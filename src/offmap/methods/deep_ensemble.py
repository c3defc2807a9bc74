"""Deep ensemble: plain nets trained from different starts, stacked in one pass. One net is the plain baseline."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from offmap._types import Weights
from offmap.batches import Batch, Batches, Rows
from offmap.core.construct import centre
from offmap.core.forward import Host
from offmap.core.inputs import take_rows
from offmap.likelihoods import Likelihood
from offmap.methods.predictives import Sampled
from offmap.methods.protocol import Runtime
from offmap.solve.loop import adam, minimize
from offmap.solve.monitors import BestValidation
from offmap.solve.progress import bar

logger = logging.getLogger("offmap")


@dataclass(frozen=True)
class Config:
    """The paper's training of plain nets; the state of lowest validation NLL is kept."""

    steps: int = 10_000
    rate: float = 1e-3
    adam_epsilon: float = 1e-7
    check_every: int = 100


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
    at = centre(nets)
    host = runtime.host(at.net, at.mean | at.fixed, valid.inputs)
    weights = {n: w.clone().requires_grad_() for n, w in at.mean.items()}

    def objective(step: int, batch: Batch) -> Tensor:
        return likelihood.nll(host(weights | at.fixed, batch[0]), batch[1]).mean(1).sum()

    with bar("Training", config.steps, show=runtime.progress) as advance:
        monitor = BestValidation(
            weights, lambda: mean_nll(host, weights | at.fixed, likelihood, valid), every=config.check_every,
            report=lambda step: advance(step, ""),
        )  # fmt: skip
        optimizer = adam(weights.values(), rate=config.rate, epsilon=config.adam_epsilon)
        ending = minimize(objective, optimizer, train, steps=config.steps, monitors=[monitor], seed=seed)
    if ending == "diverged":
        logger.warning("Training diverged (the loss is not finite); every member keeps its best state so far. Lower `rate`.")
    monitor.restore()
    trained = {n: w.detach() for n, w in weights.items()}
    return Sampled(host, trained | at.fixed)


@torch.no_grad()
def mean_nll(host: Host, weights: Weights, likelihood: Likelihood, valid: Rows) -> Tensor:
    """NLL of every member on its own, (M,)."""
    members = next(iter(weights.values())).shape[0]
    parts = [
        likelihood.nll(host.outputs(lambda span: weights, 1, take_rows(valid.inputs, rows), members=members), valid.targets[rows])
        for rows in host.blocks(valid.inputs, members)
    ]
    return torch.cat(parts, 1).mean(1)
