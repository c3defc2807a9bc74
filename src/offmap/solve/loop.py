"""The only training loop of the library."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from offmap.batches import Batch, Batches
from offmap.errors import DataError
from offmap.solve.objectives import Objective

Monitor: TypeAlias = Callable[[int, Tensor], bool]
"""Called after every step with (step, loss); returns True to stop."""


@torch.enable_grad()
def minimize(
    objective: Objective,
    optimizer: torch.optim.Optimizer,
    data: Batches,
    *,
    steps: int,
    monitors: Sequence[Monitor] = (),
    seed: int = 0,
    schedule: Callable[[int], float] | None = None,
) -> str:
    """Take `steps` gradient steps and say how it ended: "finished", "stopped", or "diverged" before a non-finite step.

    `schedule(step)` multiplies the learning rate.
    """
    rates = [group["lr"] for group in optimizer.param_groups]
    for step, batch in zip(range(steps), cycle(data, seed), strict=False):
        loss = objective(step, batch)
        if not bool(loss.isfinite()):
            return "diverged"
        optimizer.zero_grad()
        loss.backward()
        if schedule is not None:
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * schedule(step)
        optimizer.step()
        verdicts = [monitor(step, loss.detach()) for monitor in monitors]  # all are asked, also after one says stop
        if any(verdicts):
            return "stopped"
    return "finished"


def cycle(data: Batches, seed: int) -> Iterator[Batch]:
    """Batches without end, in a new order every epoch."""
    for epoch in itertools.count():
        empty = True
        for batch in data.shuffled(seed, epoch):
            empty = False
            yield batch
        if empty:
            raise DataError(f"Expected at least one batch in `{data.name}`, but it is empty.")


def adam(parameters: Iterable[Tensor], *, rate: float, epsilon: float = 1e-8) -> torch.optim.Optimizer:
    """Adam, as everywhere in the paper."""
    return torch.optim.Adam(list(parameters), lr=rate, eps=epsilon, fused=True)
