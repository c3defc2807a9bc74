"""Small nets for tables of any units: they standardise rows inside, and are trained in a second or two."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from offmap.data import Place, as_batches, load_rows
from offmap.integrations.mlp import mlp
from offmap.integrations.stack_training import Stack, Training, maximum_likelihood, train_stack
from offmap.likelihoods import Gaussian, Likelihood
from offmap.posterior.protocol import Runtime

Pair = tuple[Tensor, Tensor]

EPOCHS = 100
STEPS = (200, 5000)
"""At least and at most, where the user does not say how many."""


class Standardize(nn.Module):
    """Every column around its mean, in standard deviations; a constant column is left at 0.

    >>> Standardize.of(torch.tensor([[1.0, 7.0], [3.0, 7.0]]))(torch.tensor([[4.0, 7.0]]))
    tensor([[2., 0.]])
    """

    centre: Tensor
    unit: Tensor

    def __init__(self, centre: Tensor, unit: Tensor) -> None:
        super().__init__()
        self.register_buffer("centre", centre)
        self.register_buffer("unit", unit)

    @staticmethod
    def of(rows: Tensor) -> Standardize:
        """By the columns of these rows, (N, D)."""
        # the mean of equal numbers is not always that number, so the standard deviation does not tell
        varies = rows.amax(0) > rows.amin(0)
        return Standardize(torch.where(varies, rows.mean(0), rows[0]), torch.where(varies, rows.std(0, correction=0), 1.0))

    def forward(self, x: Tensor) -> Tensor:
        """(x − centre) / unit."""
        return (x - self.centre) / self.unit


@dataclass(frozen=True)
class InUnits(Gaussian):
    """A Gaussian whose net speaks of standardised targets: moments are multiplied by `scale` (K,) and moved by `shift` (K,).

    Log-variances are clamped before that, so targets may have any units.
    """

    scale: Tensor = field(default_factory=lambda: torch.ones(1))
    shift: Tensor = field(default_factory=lambda: torch.zeros(1))

    def moments(self, output: Tensor) -> tuple[Tensor, Tensor]:
        """Means and variances in the targets' units."""
        mean, variance = super().moments(output)
        return mean * self.scale + self.shift, variance * self.scale.square()


def steps_for(rows: int, batch_size: int) -> int:
    """A hundred epochs, within bounds.

    >>> [steps_for(rows, 128) for rows in (20, 1000, 100_000)]
    [200, 800, 5000]
    """
    least, most = STEPS
    return min(max(least, EPOCHS * -(-rows // batch_size)), most)


def train(
    data: Pair,
    valid: Pair,
    *,
    outputs: int,
    likelihood: Likelihood,
    hidden: Sequence[int],
    members: int,
    steps: int | None,
    lr: float,
    batch_size: int,
    seed: int,
) -> list[nn.Module]:
    """Fully connected nets, (B, D) -> (B, outputs), trained by maximum likelihood; the state of lowest validation NLL is kept."""
    scaling = Standardize.of(data[0])
    starts = [mlp(data[0].shape[1], outputs, hidden=hidden, seed=seed + member).to(data[0]) for member in range(members)]
    place = Place.of(starts[0])
    rows, held = (
        as_batches((scaling(x), y), place, name=name, batch_size=batch_size)
        for (x, y), name in ((data, "train"), (valid, "valid"))
    )
    count = steps_for(len(data[0]), batch_size) if steps is None else steps
    config = Training(steps=count, lr=lr, check_every=max(1, min(100, count // 10)))
    runtime = Runtime(batch_size=batch_size, progress=False)
    held = load_rows(held)
    stack = Stack.build(starts, held.inputs, runtime)
    losses = maximum_likelihood(stack, likelihood)
    train_stack(stack, losses, rows, held, likelihood=likelihood, config=config, seed=seed, progress=False)
    return [nn.Sequential(scaling, *net.children()) for net in stack.sampled()[0].nets()]
