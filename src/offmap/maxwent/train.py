"""The only training loop of the library."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor

from offmap.data import Batch, Batches, Stream
from offmap.distributed.group import SINGLE_PROCESS, Group
from offmap.errors import DataError
from offmap.maxwent.objective import Objective

Monitor: TypeAlias = Callable[[int, Tensor], bool]
"""Called after every step with (step, loss); returns True to stop."""


@torch.enable_grad()
def minimize(
    objective: Objective,
    optimizer: torch.optim.Optimizer,
    data: Batches | Cycle,
    *,
    steps: int,
    monitors: Sequence[Monitor] = (),
    seed: int = 0,
    schedule: Callable[[int], float] | None = None,
    start: int = 0,
    group: Group = SINGLE_PROCESS,
) -> str:
    """Take `steps` gradient steps and say how it ended: "finished", "stopped", or "diverged" before a non-finite step.

    `schedule(step)` multiplies the learning rate; `init_fraction` steps are taken already. Every process of a `group` brings rows of its
    own to each step, and all take the same.
    """
    rates = [group["lr"] for group in optimizer.param_groups]
    source = data if isinstance(data, Cycle) else Cycle(data, seed)
    for step, batch in zip(range(start, steps), source, strict=False):
        loss = objective(step, batch)
        if group.size == 1 and not bool(loss.isfinite()):
            return "diverged"
        optimizer.zero_grad()
        loss.backward()
        if group.size > 1:
            loss = _averaged(loss.detach(), len(batch[1]), optimizer, group)
            if not bool(loss.isfinite()):
                return "diverged"
        if schedule is not None:
            for each, lr in zip(optimizer.param_groups, rates, strict=True):
                each["lr"] = lr * schedule(step)
        optimizer.step()
        verdicts = [monitor(step, loss.detach()) for monitor in monitors]  # all are asked, also after one says stop
        if any(verdicts):
            return "stopped"
    return "finished"


def _averaged(loss: Tensor, rows: int, optimizer: torch.optim.Optimizer, group: Group) -> Tensor:
    """Loss and, in place, gradients over the rows of all processes, Σ n·g / Σ n, from the mean over each one's own."""
    gradients = [p.grad for each in optimizer.param_groups for p in each["params"] if p.grad is not None]
    own = torch.stack([loss * rows, loss.new_tensor(float(rows))])
    for gradient in gradients:
        gradient.mul_(rows)
    group.all_reduce(own, *gradients)
    for gradient in gradients:
        gradient.div_(own[1].to(gradient))
    return own[0] / own[1]


@dataclass
class Cycle:
    """Batches without end, in a new order every epoch. It knows where it stands, and another can go on from there.

    A DataLoader shuffles by generators of its own: how those stood when the epoch began is in `order`.
    """

    data: Batches
    seed: int
    epoch: int = 0
    taken: int = 0  # batches of this epoch
    order: list[Tensor] = field(default_factory=list[Tensor])

    def __iter__(self) -> Iterator[Batch]:
        passed, generators = self.taken, generators_of(self.data)
        for generator, state in zip(generators, self.order, strict=False):
            generator.set_state(state)
        while True:
            self.order = [generator.get_state() for generator in generators]
            empty, self.taken = True, 0
            for batch in self.data.shuffled(self.seed, self.epoch):
                empty, self.taken = False, self.taken + 1
                if self.taken > passed:
                    yield batch
            if empty:
                raise DataError(f"Expected at least one batch in `{self.data.name}`, but it is empty.")
            self.epoch, passed = self.epoch + 1, 0


def generators_of(data: Batches) -> list[torch.Generator]:
    """Those that a user's DataLoader may shuffle by, the global one first."""
    if not isinstance(data, Stream):
        return []
    own = [getattr(data.source, "generator", None), getattr(data.source.sampler, "generator", None)]
    return [torch.default_generator, *{id(each): each for each in own if each is not None}.values()]


def cycle(data: Batches, seed: int) -> Iterator[Batch]:
    """Batches without end, in a new order every epoch."""
    return iter(Cycle(data, seed))


def adam(parameters: Iterable[Tensor], *, lr: float, epsilon: float = 1e-8) -> torch.optim.Optimizer:
    """Adam, as everywhere in the paper."""
    return torch.optim.Adam(list(parameters), lr=lr, eps=epsilon, fused=True)
