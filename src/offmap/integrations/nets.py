"""Small fully connected nets for tables, and the training of several nets in one stack.

Members of an ensemble, and of every setting of a grid, train on the same batches at the cost of little more than one net.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypeAlias

import torch
from torch import Tensor, nn

from offmap._types import Inputs, Weights
from offmap.data import Batch, Batches, Place, Rows, as_batches, load_rows
from offmap.data.batch import take_rows
from offmap.likelihoods import Gaussian, Likelihood
from offmap.maxwent.config import Runtime
from offmap.maxwent.train import BestValidation, adam, minimize
from offmap.model.forward import BatchedModel
from offmap.model.params import StackedModel, stack_models
from offmap.posterior.predictive import Sampled
from offmap.progress import bar
from offmap.random import generator

logger = logging.getLogger("offmap")


def mlp(
    inputs: int, outputs: int, *, hidden: Sequence[int] = (100, 100, 100), dropout: float = 0.0, seed: int = 0
) -> nn.Sequential:
    """Build a fully connected ReLU net, by default the paper's: Glorot-uniform weights that depend on `seed` alone, zero biases.

    Args:
        inputs: Columns of a row.
        outputs: Numbers that the net returns.
        hidden: Widths of the hidden layers.
        dropout: Rate of a Dropout after every activation; 0 for none.
        seed: Address of the random weights.

    >>> [tuple(p.shape) for p in mlp(8, 2, hidden=[5]).parameters()]
    [(5, 8), (5,), (2, 5), (2,)]
    """
    layers: list[nn.Module] = []
    for before, width in pairwise([inputs, *hidden]):
        layers += [nn.Linear(before, width), nn.ReLU()] + ([nn.Dropout(dropout)] if dropout else [])
    net = nn.Sequential(*layers, nn.Linear([inputs, *hidden][-1], outputs))
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            bound = math.sqrt(6.0 / sum(parameter.shape)) if parameter.ndim == 2 else 0.0  # biases are 0
            parameter.uniform_(-bound, bound, generator=generator(seed, "init", name))
    return net


class Standardize(nn.Module):
    """(x − mean) / std for every column; a constant column becomes 0.

    >>> Standardize(torch.tensor([[1.0, 7.0], [3.0, 7.0]]))(torch.tensor([[4.0, 7.0]]))
    tensor([[2., 0.]])
    """

    mean: Tensor
    std: Tensor

    def __init__(self, rows: Tensor) -> None:
        super().__init__()
        # the mean of equal numbers is not always that number, so a standard deviation of 0 does not show constant columns
        varies = rows.amax(0) > rows.amin(0)
        self.register_buffer("mean", torch.where(varies, rows.mean(0), rows[0]))
        self.register_buffer("std", torch.where(varies, rows.std(0, correction=0), 1.0))

    def forward(self, x: Tensor) -> Tensor:
        """Standardise rows, (B, D) -> (B, D)."""
        return (x - self.mean) / self.std


@dataclass(frozen=True)
class ScaledGaussian(Gaussian):
    """A Gaussian of standardised targets: moments are multiplied by `scale` (K,) and moved by `shift` (K,).

    Log-variances are clamped before that, so targets may have any units.
    """

    scale: Tensor = field(default_factory=lambda: torch.ones(1))
    shift: Tensor = field(default_factory=lambda: torch.zeros(1))

    def moments(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return means and variances in the targets' units."""
        mean, variance = super().moments(outputs)
        return mean * self.scale + self.shift, variance * self.scale.square()


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
        return self.model(self.weights | self.fixed, x)

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


# (step, batch) -> the loss of every setting, (G,), summed over its members
Losses: TypeAlias = Callable[[int, Batch], Tensor]
# the validation loss by which every member keeps its best state, (G·M,), such as `member_nll`
Judge: TypeAlias = Callable[[Stack, Likelihood, Rows], Tensor]


def member_risks(stack: Stack, likelihood: Likelihood, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return outputs, (G·M, B, ...), and the mean NLL of every member, (G, M)."""
    outputs = stack(batch[0])
    return outputs, stack.by_setting(likelihood.nll(outputs, batch[1]).mean(1))


def maximum_likelihood(stack: Stack, likelihood: Likelihood) -> Losses:
    """Return the losses Σ_i NLL_i."""
    return lambda step, batch: member_risks(stack, likelihood, batch)[1].sum(1)


@torch.no_grad()
def row_nll(model: BatchedModel, weights: Weights, likelihood: Likelihood, valid: Rows) -> Tensor:
    """Return the NLL of every member on every row, (M, n)."""
    members, parts = len(next(iter(weights.values()))), list[Tensor]()
    for rows in model.blocks(valid.inputs, members):
        outputs = model.outputs(lambda span: weights, 1, take_rows(valid.inputs, rows), members=members)
        parts.append(likelihood.nll(outputs, valid.targets[rows]))
    return torch.cat(parts, 1)


def member_nll(stack: Stack, likelihood: Likelihood, valid: Rows) -> Tensor:
    """Return the NLL of every member by itself, (G·M,)."""
    return row_nll(stack.model, stack.weights | stack.fixed, likelihood, valid).mean(1)


def train_stack(
    stack: Stack, losses: Losses, data: Batches, valid: Rows, *, likelihood: Likelihood, config: Training,
    judge: Judge = member_nll, ceiling: Tensor | None = None, seed: int = 0, progress: bool | None = None,
) -> str:  # fmt: skip
    """Minimise the losses of all settings at once; return why it stopped: "finished" or "diverged".

    Every member ends with its state of lowest loss by `judge` or, with a `ceiling` (G·M,), the last one at or below it. Settings
    do not disturb each other: one whose loss is no longer finite is judged as it stands and left out, and the others go on.
    """
    alive = torch.ones(stack.settings, dtype=torch.bool, device=valid.targets.device)
    with bar("Training", config.steps, show=progress) as advance:
        monitor = BestValidation(
            stack.weights, lambda: judge(stack, likelihood, valid), every=config.check_every, ceiling=ceiling
        )

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
        stop_reason = minimize(objective, optimizer, data, steps=config.steps, monitors=[monitor, report], seed=seed)
    if stop_reason == "diverged":
        logger.warning("Training diverged (the loss is not finite); every member keeps its best state so far. Lower `lr`.")
    elif not bool(alive.all()):
        logger.warning(
            "Training diverged (the loss is not finite) in %d of %d settings; their members keep their best states so far.",
            int((~alive).sum()), stack.settings,
        )  # fmt: skip
    monitor.restore()
    return stop_reason


def train_mlps(
    train: tuple[Tensor, Tensor], valid: tuple[Tensor, Tensor], *, outputs: int, likelihood: Likelihood, hidden: Sequence[int],
    members: int, steps: int | None, lr: float, batch_size: int, seed: int,
) -> list[nn.Module]:  # fmt: skip
    """Train dense nets, (B, D) -> (B, outputs), that standardise their inputs; keep each at its lowest validation NLL.

    Without `steps`, they train for a hundred epochs, at least 200 and at most 5,000 steps.
    """
    scaling = Standardize(train[0])
    nets = [mlp(train[0].shape[1], outputs, hidden=hidden, seed=seed + member).to(train[0]) for member in range(members)]
    rows, valid_rows = (
        as_batches((scaling(x), y), Place.of(nets[0]), name=name, batch_size=batch_size)
        for (x, y), name in ((train, "train"), (valid, "valid"))
    )
    steps = min(max(200, 100 * -(-len(train[0]) // batch_size)), 5000) if steps is None else steps
    config, held_out = Training(steps=steps, lr=lr, check_every=max(1, min(100, steps // 10))), load_rows(valid_rows)
    stack = Stack.build(nets, held_out.inputs, Runtime(batch_size=batch_size, progress=False))
    losses = maximum_likelihood(stack, likelihood)
    train_stack(stack, losses, rows, held_out, likelihood=likelihood, config=config, seed=seed, progress=False)
    return [nn.Sequential(scaling, *net.children()) for net in stack.predictives()[0].nets()]
