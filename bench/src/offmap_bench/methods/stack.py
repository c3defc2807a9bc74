"""The training of several nets in one stack: members of an ensemble, and of every setting of a grid, on the same batches."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from offmap._types import Inputs, Weights
from offmap.data import Batch, Batches, Rows
from offmap.data.batch import take_rows
from offmap.likelihoods import Likelihood
from offmap.maxwent.config import Runtime
from offmap.maxwent.train import BestValidation, adam, minimize
from offmap.model.forward import BatchedModel
from offmap.model.params import StackedModel, stack_models
from offmap.posterior.predictive import Sampled
from offmap.progress import bar

logger = logging.getLogger("offmap")


@dataclass(frozen=True)
class Problem:
    """What a method is fitted on: batches, validation rows, the likelihood of the outputs, and how to run.

    An epoch has every training row `repeats` times.
    """

    train: Batches
    valid: Rows
    likelihood: Likelihood
    seed: int = 0
    runtime: Runtime = Runtime()
    repeats: int = 1


@dataclass(frozen=True)
class Training:
    """The paper's training of deterministic nets; every member keeps its state of lowest validation NLL."""

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
    def build(
        nets: nn.Module | Sequence[nn.Module] | StackedModel, inputs: Inputs, runtime: Runtime, *, settings: int = 1
    ) -> Stack:
        """Copy the members once for every setting of a grid, ready to be trained together."""
        members = nets if isinstance(nets, StackedModel) else stack_models(nets)
        model = runtime.model(members.module, members.mean | members.fixed, inputs)
        parts = (members.mean, members.fixed)
        weights, fixed = ({n: w.repeat(settings, *[1] * (w.ndim - 1)) for n, w in part.items()} for part in parts)
        return Stack(model, {n: w.requires_grad_() for n, w in weights.items()}, fixed, members.members)

    @property
    def settings(self) -> int:
        """G."""
        return len(next(iter(self.weights.values()))) // self.members

    def __call__(self, x: Inputs) -> Tensor:
        """Return the outputs of all members, (G·M, B, ...)."""
        return run_columns(self.model, self.weights | self.fixed, x)

    @torch.no_grad()
    def on_rows(self, rows: Rows, function: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """Return `function(outputs, targets)` of all rows, (..., n), some rows at a time."""
        weights, size, parts = self.weights | self.fixed, self.settings * self.members, list[Tensor]()
        for block in self.model.blocks(rows.inputs, size):
            outputs = self.model.outputs(lambda span: weights, 1, take_rows(rows.inputs, block), members=size)
            parts.append(function(outputs, rows.targets[block]))
        return torch.cat(parts, 1)

    def by_setting(self, stacked: Tensor) -> Tensor:
        """(G·M, ...) -> (G, M, ...)."""
        return stacked.unflatten(0, (self.settings, self.members))

    def trained_weights(self) -> list[Weights]:
        """Return all weights of every setting, {name: (M, ...)} each."""
        weights = {n: self.by_setting(w.detach()) for n, w in (self.weights | self.fixed).items()}
        return [{n: w[setting] for n, w in weights.items()} for setting in range(self.settings)]

    def predictives(self) -> list[Sampled]:
        """Return the trained members of every setting, nothing random."""
        return [Sampled(self.model, weights) for weights in self.trained_weights()]


def run_columns(model: BatchedModel, weights: Weights, x: Inputs) -> Tensor:
    """Run a plain stack of layers on columns, (S, D, B): no copy of gradients is made. Run any other model as it runs itself."""
    layers = model.layers
    if not layers or not isinstance(x, Tensor) or x.ndim != 2:
        return model(weights, x)
    h = x.mT.expand(len(next(iter(weights.values()))), -1, -1)
    for prefix, layer in layers:
        if not isinstance(layer, nn.Linear):
            h = F.relu(h, inplace=h.requires_grad) if isinstance(layer, nn.ReLU) else layer(h)
        elif layer.bias is None:
            h = torch.bmm(weights[f"{prefix}weight"], h)
        else:
            h = torch.baddbmm(weights[f"{prefix}bias"].unsqueeze(2), weights[f"{prefix}weight"], h)
    return h.mT


# (step, batch) -> the loss of every setting, (G,), summed over its members
Losses: TypeAlias = Callable[[int, Batch], Tensor]
# the validation loss by which every member keeps its best state, (G·M,), such as `member_nll`
Judge: TypeAlias = Callable[[Stack, Problem], Tensor]


def member_risks(stack: Stack, likelihood: Likelihood, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return outputs, (G·M, B, ...), and the mean NLL of every member, (G, M)."""
    outputs = stack(batch[0])
    return outputs, stack.by_setting(likelihood.nll(outputs, batch[1]).mean(1))


def maximum_likelihood(stack: Stack, likelihood: Likelihood) -> Losses:
    """Return the losses Σ_i NLL_i."""
    return lambda step, batch: member_risks(stack, likelihood, batch)[1].sum(1)


def member_nll(stack: Stack, problem: Problem) -> Tensor:
    """Return the NLL of every member by itself, (G·M,)."""
    return stack.on_rows(problem.valid, problem.likelihood.nll).mean(1)


def ensemble_nll(stack: Stack, problem: Problem) -> Tensor:
    """Return the NLL of every member's ensemble, the same for the M members of a setting, (G·M,)."""

    def nll(outputs: Tensor, y: Tensor) -> Tensor:
        return torch.stack([problem.likelihood.predictive_nll(ensemble, y) for ensemble in stack.by_setting(outputs)])

    return stack.on_rows(problem.valid, nll).mean(1).repeat_interleave(stack.members)


def train_stack(
    stack: Stack, losses: Losses, problem: Problem, config: Training, *, judge: Judge = member_nll, ceiling: Tensor | None = None
) -> str:
    """Minimise the losses of all settings at once; return why it stopped: "finished" or "diverged".

    Every member ends with its state of lowest loss by `judge` or, with a `ceiling` (G·M,), the last one at or below it. Settings
    do not disturb each other: one whose loss is no longer finite is judged as it stands and left out, and the others go on.
    """
    alive = torch.ones(stack.settings, dtype=torch.bool, device=problem.valid.targets.device)
    with bar("Training", config.steps, show=problem.runtime.progress) as advance:
        monitor = BestValidation(stack.weights, lambda: judge(stack, problem), every=config.check_every, ceiling=ceiling)

        def report(step: int, loss: Tensor) -> bool:
            if (step + 1) % config.check_every == 0:
                advance(step + 1)
            return False

        def objective(step: int, batch: Batch) -> Tensor:
            values = losses(step, batch)
            diverged = alive & ~values.detach().isfinite()
            if bool(diverged.any()):
                if not bool((alive & ~diverged).any()):
                    return values[diverged].sum()
                monitor.check(diverged.repeat_interleave(stack.members))
                alive.logical_and_(~diverged)
            return torch.where(alive, values, 0.0).sum()

        optimizer = adam(stack.weights.values(), lr=config.lr, epsilon=config.adam_epsilon)
        monitors, seed = [monitor, report], problem.seed
        stop_reason = minimize(objective, optimizer, problem.train, steps=config.steps, monitors=monitors, seed=seed)
    if stop_reason == "diverged":
        logger.warning("Training diverged (the loss is not finite); every member keeps its best state so far. Lower `lr`.")
    elif not bool(alive.all()):
        logger.warning(
            "Training diverged (the loss is not finite) in %d of %d settings; their members keep their best states so far.",
            int((~alive).sum()), stack.settings,
        )  # fmt: skip
    monitor.restore()
    return stop_reason
