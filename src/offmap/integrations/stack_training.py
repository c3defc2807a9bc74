"""Nets trained in one stack: the members of an ensemble, and of every setting of a grid, on the same batches."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from offmap._types import Inputs, Weights
from offmap.data import Batch, Batches, Rows
from offmap.data.inputs import take_rows
from offmap.errors import ConfigError
from offmap.likelihoods import Likelihood
from offmap.maxwent.monitors import BestValidation
from offmap.maxwent.train import adam, minimize
from offmap.model.forward import BatchedModel
from offmap.model.select import stack_models
from offmap.posterior.predictive import Sampled
from offmap.posterior.protocol import Runtime
from offmap.progress import bar

logger = logging.getLogger("offmap")

Losses: TypeAlias = Callable[[int, Batch], Tensor]
"""(step, batch) -> the loss of every setting, (G,), summed over its members."""


@dataclass(frozen=True)
class Training:
    """The paper's training of plain nets; the state of lowest validation NLL is kept."""

    steps: int = 10_000
    lr: float = 1e-3
    adam_epsilon: float = 1e-7
    check_every: int = 100


@dataclass(frozen=True)
class Stack:
    """G settings of M members each, setting-major, as one stack of weights: {name: (G·M, ...)}."""

    model: BatchedModel
    weights: Weights  # these are trained
    fixed: Weights
    members: int

    @staticmethod
    def of(model: BatchedModel, mean: Weights, fixed: Weights, *, settings: int = 1) -> Stack:
        """The members `mean`, {name: (M, ...)}, as the start of every setting; `fixed` is what else differs between them."""

        def repeated(tensors: Weights) -> Weights:
            return {n: w.clone() if settings == 1 else w.repeat(settings, *[1] * (w.ndim - 1)) for n, w in tensors.items()}

        members = next(iter(mean.values())).shape[0]
        return Stack(model, {n: w.requires_grad_() for n, w in repeated(mean).items()}, repeated(fixed), members)

    @staticmethod
    def build(nets: nn.Module | Sequence[nn.Module], inputs: Inputs, runtime: Runtime, *, settings: int = 1) -> Stack:
        """Private copies of the members, once for every setting of a grid, ready to be trained together."""
        at = stack_models(nets)
        return Stack.of(runtime.model(at.net, at.mean | at.fixed, inputs), at.mean, at.fixed, settings=settings)

    @property
    def settings(self) -> int:
        """G."""
        return next(iter(self.weights.values())).shape[0] // self.members

    def __call__(self, x: Inputs) -> Tensor:
        """Outputs of all, (G·M, B, ...)."""
        return self.model(self.weights | self.fixed, x)

    def apart(self, stacked: Tensor) -> Tensor:
        """(G·M, ...) -> (G, M, ...)."""
        return stacked.unflatten(0, (self.settings, self.members))

    def trained(self) -> list[Weights]:
        """All weights of every setting, {name: (M, ...)} each."""
        whole = {n: self.apart(w.detach()) for n, w in (self.weights | self.fixed).items()}
        return [{n: w[setting] for n, w in whole.items()} for setting in range(self.settings)]

    def sampled(self) -> list[Sampled]:
        """The trained members of every setting, nothing random."""
        return [Sampled(self.model, weights) for weights in self.trained()]


def member_risks(stack: Stack, likelihood: Likelihood, batch: Batch) -> tuple[Tensor, Tensor]:
    """Outputs, (G·M, B, ...), and the mean NLL of every member, (G, M)."""
    outputs = stack(batch[0])
    return outputs, stack.apart(likelihood.nll(outputs, batch[1]).mean(1))


def maximum_likelihood(stack: Stack, likelihood: Likelihood) -> Losses:
    """Maximum likelihood: Σ_i NLL_i."""
    return lambda step, batch: member_risks(stack, likelihood, batch)[1].sum(1)


@torch.no_grad()
def member_losses(model: BatchedModel, weights: Weights, likelihood: Likelihood, valid: Rows) -> Tensor:
    """NLL of every member on every row, (M, n)."""
    members = next(iter(weights.values())).shape[0]
    parts = [
        likelihood.nll(
            model.outputs(lambda span: weights, 1, take_rows(valid.inputs, rows), members=members), valid.targets[rows]
        )
        for rows in model.blocks(valid.inputs, members)
    ]
    return torch.cat(parts, 1)


def mean_nll(model: BatchedModel, weights: Weights, likelihood: Likelihood, valid: Rows) -> Tensor:
    """NLL of every member on its own, (M,)."""
    return member_losses(model, weights, likelihood, valid).mean(1)


def alone(stack: Stack, likelihood: Likelihood, valid: Rows) -> Tensor:
    """How good every member is by itself: its NLL, (G·M,)."""
    return mean_nll(stack.model, stack.weights | stack.fixed, likelihood, valid)


@torch.no_grad()
def together(stack: Stack, likelihood: Likelihood, valid: Rows) -> Tensor:
    """How good every member's ensemble is: the NLL of what its setting predicts, the same for its M members, (G·M,)."""
    size, parts = stack.settings * stack.members, list[Tensor]()
    for rows in stack.model.blocks(valid.inputs, size):
        x, y = take_rows(valid.inputs, rows), valid.targets[rows]
        outputs = stack.apart(stack.model.outputs(lambda span: stack.weights | stack.fixed, 1, x, members=size))
        parts.append(torch.stack([likelihood.predictive_nll(ensemble, y) for ensemble in outputs]))
    return torch.cat(parts, 1).mean(1).repeat_interleave(stack.members)


Judge: TypeAlias = Callable[[Stack, Likelihood, Rows], Tensor]
"""The validation loss by which every member keeps its best state, (G·M,): `alone` or `together`."""


def train_stack(
    stack: Stack,
    losses: Losses,
    data: Batches,
    valid: Rows,
    *,
    likelihood: Likelihood,
    config: Training,
    judge: Judge = alone,
    ceiling: Tensor | None = None,
    seed: int = 0,
    progress: bool | None = None,
) -> str:
    """Minimise the losses of all settings at once; every member ends with its best state on the validation data.

    Returns why the training stopped: "finished" or "diverged".

    That is the state of lowest loss by `judge` or, with a `ceiling` (G·M,), the last one at or below it. Settings do not disturb
    each other: one whose loss is no longer finite is judged as it stands and left out, and the others go on.
    """
    alive = torch.ones(stack.settings, dtype=torch.bool, device=valid.targets.device)

    with bar("Training", config.steps, show=progress) as advance:
        monitor = BestValidation(
            stack.weights, lambda: judge(stack, likelihood, valid), every=config.check_every, ceiling=ceiling,
            report=lambda step: advance(step, ""),
        )  # fmt: skip

        def objective(step: int, batch: Batch) -> Tensor:
            each = losses(step, batch)
            lost = alive & ~each.detach().isfinite()
            if bool(lost.any()):
                if not bool((alive & ~lost).any()):
                    return each[lost].sum()
                monitor.check(lost.repeat_interleave(stack.members))
                alive.logical_and_(~lost)
            return torch.where(alive, each, 0.0).sum()

        optimizer = adam(stack.weights.values(), lr=config.lr, epsilon=config.adam_epsilon)
        stop_reason = minimize(objective, optimizer, data, steps=config.steps, monitors=[monitor], seed=seed)
    if stop_reason == "diverged":
        logger.warning("Training diverged (the loss is not finite); every member keeps its best state so far. Lower `lr`.")
    elif not bool(alive.all()):
        logger.warning(
            "Training diverged (the loss is not finite) in %d of %d settings; their members keep their best states so far.",
            int((~alive).sum()), stack.settings,
        )  # fmt: skip
    monitor.restore()
    return stop_reason


def shared(configs: Sequence[Training]) -> Training:
    """How all settings of a grid are trained; refused if they differ in it, as they take the same steps."""
    if not configs:
        raise ConfigError("Expected at least one setting of a grid, but got none.")
    for name in (f.name for f in fields(Training)):
        values = list(dict.fromkeys(getattr(config, name) for config in configs))
        if len(values) > 1:
            raise ConfigError(f"Expected the settings of a grid to share `{name}`, but got {values}. Fit them one by one.")
    return configs[0]


def not_negative(configs: Sequence[Any], *names: str) -> None:
    """Refuse fields that are not numbers from 0 on."""
    for name in names:
        for value in (getattr(config, name) for config in configs):
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
                raise ConfigError(f"Expected `{name}` to be a number of at least 0, but got {value!r}.")


def per_setting(configs: Sequence[Any], name: str, stack: Stack) -> Tensor:
    """One field of every setting, (G,), where the weights are and in their dtype."""
    values = [float(getattr(config, name)) for config in configs]
    return next(iter(stack.weights.values())).new_tensor(values)
