"""Small fully connected nets for tables, and their training, all members in one stack."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import pairwise

import torch
from torch import Tensor, nn

from offmap.data import Batch, Place, as_batches, load_rows
from offmap.data.batch import take_rows
from offmap.likelihoods import Likelihood
from offmap.maxwent.config import Runtime
from offmap.maxwent.train import BestValidation, adam, minimize
from offmap.model.params import stack_models
from offmap.posterior.predictive import Sampled
from offmap.progress import Advance, Status, bar, print_status
from offmap.random import generator

logger: logging.Logger = logging.getLogger("offmap")

QUIET_SECONDS = 2.0
"""Before progress is shown: a search fits many times."""


def mlp(
    inputs: int, outputs: int, *, hidden: Sequence[int] = (100, 100, 100), dropout: float = 0.0, seed: int = 0
) -> nn.Sequential:
    """Build a fully connected ReLU net, (B, inputs) -> (B, outputs), by default the paper's, with Dropout layers if asked.

    Weights are Glorot-uniform and depend on `seed` alone; biases are 0.

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

    With `allow_nan` a missing value (NaN) becomes 0, the mean, and a column more for each says where: (B, D) -> (B, 2D).

    >>> Standardize(torch.tensor([[1.0, 7.0], [3.0, 7.0]]))(torch.tensor([[4.0, 7.0]]))
    tensor([[2., 0.]])
    """

    mean: Tensor
    std: Tensor

    def __init__(self, rows: Tensor, *, allow_nan: bool = False) -> None:
        super().__init__()
        self.allow_nan: bool = allow_nan
        if allow_nan:  # the mean stands in, so that it stays the mean; 0 where no row has a value
            rows = torch.where(rows.isnan(), rows.nanmean(0).nan_to_num(0.0), rows)
        # the mean of equal numbers is not always that number, so a standard deviation of 0 does not show constant columns
        varies = rows.amax(0) > rows.amin(0)
        self.register_buffer("mean", torch.where(varies, rows.mean(0), rows[0]))
        self.register_buffer("std", torch.where(varies, rows.std(0, correction=0), 1.0))

    def forward(self, x: Tensor) -> Tensor:
        """Standardise rows."""
        scaled = (x - self.mean) / self.std
        return torch.cat([torch.nan_to_num(scaled, nan=0.0), x.isnan().to(x)], 1) if self.allow_nan else scaled


def train_mlps(
    train: tuple[Tensor, Tensor], valid: tuple[Tensor, Tensor], *, outputs: int, likelihood: Likelihood, hidden: Sequence[int],
    members: int, steps: int, lr: float, batch_size: int, seed: int, row_weights: tuple[Tensor, Tensor] | None = None,
    progress: bool | None = False, allow_nan: bool = False,
) -> list[nn.Module]:  # fmt: skip
    """Train dense nets, (B, D) -> (B, outputs), that standardise their inputs; keep each at its lowest validation NLL.

    `row_weights` are those of training and validation rows in the loss. `progress` is shown from the third second on.
    """
    scaling = Standardize(train[0], allow_nan=allow_nan)
    x = scaling(train[0])
    nets = [mlp(x.shape[1], outputs, hidden=hidden, seed=seed + member).to(x) for member in range(members)]
    train_weights, valid_weights = (None, None) if row_weights is None else (w / w.mean() for w in row_weights)
    rows = as_batches(
        (x if train_weights is None else (x, train_weights), train[1]), Place.of(nets[0]), name="train", batch_size=batch_size
    )
    held_out = load_rows(as_batches((scaling(valid[0]), valid[1]), Place.of(nets[0]), name="valid", batch_size=batch_size))
    stack = stack_models(nets)
    model = Runtime(batch_size=batch_size, progress=False).model(stack.module, stack.mean, held_out.inputs)
    weights = {name: w.clone().requires_grad_() for name, w in stack.mean.items()}

    def loss(step: int, batch: Batch) -> Tensor:
        inputs, y = batch
        x, row_weight = inputs if isinstance(inputs, tuple) else (inputs, None)
        nll = likelihood.nll(model(weights, x), y)
        return (nll if row_weight is None else nll * row_weight).mean(1).sum()

    def validation_nll() -> Tensor:
        blocks = [(take_rows(held_out.inputs, part), held_out.targets[part]) for part in model.blocks(held_out.inputs, members)]
        outputs = [(model.outputs(lambda span: weights, 1, x, members=members), y) for x, y in blocks]
        nll = torch.cat([likelihood.nll(each, y) for each, y in outputs], 1)
        return (nll if valid_weights is None else nll * valid_weights).mean(1)

    monitor = BestValidation(weights, validation_nll, every=max(1, min(100, steps // 10)))
    optimizer = adam(weights.values(), lr=lr, epsilon=1e-7)
    start, started, status = time.monotonic(), list[Advance](), Status()
    with ExitStack() as shown:

        def show_later(step: int, loss: Tensor) -> bool:
            """Show the progress once two seconds have passed; a monitor that never stops the training."""
            if not started and progress is not False and time.monotonic() - start > QUIET_SECONDS:
                shown.enter_context(print_status(status))
                started.append(shown.enter_context(bar("Training nets", steps, show=progress, status=status)))
            for advance in started:
                advance(step + 1)
            return False

        reason = minimize(loss, optimizer, rows, steps=steps, monitors=[monitor, show_later], seed=seed)
    if reason == "diverged":
        logger.warning("Training diverged (the loss is not finite); every member keeps its best state so far. Lower `lr`.")
    monitor.restore()
    trained = Sampled(model, {name: w.detach() for name, w in weights.items()})
    return [nn.Sequential(scaling, *net.children()) for net in trained.nets()]
