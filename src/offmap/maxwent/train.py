"""The objective, the only training loop of the library, and its monitors: RiskMonitor keeps the last state below τ."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from offmap import checks
from offmap._types import Weights
from offmap.data import Batch, Batches
from offmap.distributed.group import SINGLE_PROCESS, Group
from offmap.errors import DataError
from offmap.likelihoods import Likelihood
from offmap.model.forward import BatchedModel
from offmap.posterior.distribution import WeightDistribution, sum_per_member
from offmap.posterior.predictive import History

Objective: TypeAlias = Callable[[int, Batch], Tensor]
"""(step, batch) -> a scalar, summed over members so that stacked models do not disturb each other."""

Growth: TypeAlias = Callable[[Tensor], Tensor]
"""A growing function g of φ (eq. 14 of the paper writes it of φ²)."""

GROWTHS: dict[str, Growth] = {"abs": lambda scale: scale, "log": lambda scale: 2 * scale.log()}
"""g(φ²) = √φ² = |φ|, the paper's proxy, and g(φ²) = log φ², the entropy itself up to constants."""

Monitor: TypeAlias = Callable[[int, Tensor], bool]
"""Called after every step with (step, loss); returns True to stop."""


def as_growth(growth: str | Growth) -> Growth:
    """Return the growth of that name; a function of the user's is g of φ²."""
    if callable(growth):
        checks.function("regularizer", growth, ["φ²"])
        return lambda scale: growth(scale.square())
    return GROWTHS[checks.one_of("regularizer", growth, GROWTHS, " or a function of φ²")]


def maxwent(
    q: WeightDistribution, model: BatchedModel, likelihood: Likelihood, *, entropy_weight: float, growth: Growth = GROWTHS["abs"],
    draws: int = 1, seed: int = 0,
) -> Objective:  # fmt: skip
    """Return the objective of algorithm 1: E_q[NLL] − λ·(1/d) Σ g(φ²), the expectation over `draws` draws per step."""

    def objective(step: int, batch: Batch) -> Tensor:
        index, scale = range(step * draws, (step + 1) * draws), q.scale()
        risk = expected_nll(q, model, likelihood, batch, index, scale, seed)
        if q.parameterization is None or q.parameterization.diagonal:
            entropy = sum_per_member({name: growth(s) for name, s in scale.items()})
        else:  # any other law has its entropy, if need be sampled with the same draws
            entropy = q.sampled_entropy(index, seed=seed, stream="fit")
        return (risk - entropy_weight / q.dimension * entropy).sum()

    return objective


def expected_nll(
    q: WeightDistribution, model: BatchedModel, likelihood: Likelihood, batch: Batch, index: range, scale: Mapping[str, Tensor],
    seed: int,
) -> Tensor:  # fmt: skip
    """Return E_q[NLL] per member, (M,), over the draws in `index`."""
    x, y = batch
    outputs = model(q.draw(index, seed=seed, stream="fit", scale=scale), x)
    return likelihood.nll(outputs, y).mean(1).unflatten(0, (q.members, len(index))).mean(1)


@torch.enable_grad()
def minimize(
    objective: Objective, optimizer: torch.optim.Optimizer, data: Batches | Cycle, *, steps: int, start: int = 0, seed: int = 0,
    monitors: Sequence[Monitor] = (), schedule: Callable[[int], float] | None = None, group: Group = SINGLE_PROCESS,
) -> str:  # fmt: skip
    """Take gradient steps and return the stop reason: "finished", "stopped", or "diverged" before a non-finite step.

    `schedule(step)` multiplies the learning rate; `start` steps were taken before. Every process of a `group` brings rows of its
    own to each step, and all take the same.
    """
    rates = [params["lr"] for params in optimizer.param_groups]
    source = data if isinstance(data, Cycle) else Cycle(data, seed)
    for step, batch in zip(range(start, steps), source, strict=False):
        loss = objective(step, batch)
        if group.size > 1 or bool(loss.isfinite()):
            optimizer.zero_grad()
            loss.backward()
        loss = loss.detach() if group.size == 1 else _average_gradients(loss.detach(), len(batch[1]), optimizer, group)
        if not bool(loss.isfinite()):
            return "diverged"
        if schedule is not None:
            for params, lr in zip(optimizer.param_groups, rates, strict=True):
                params["lr"] = lr * schedule(step)
        optimizer.step()
        verdicts = [monitor(step, loss) for monitor in monitors]  # call all, also after one says stop
        if any(verdicts):
            return "stopped"
    return "finished"


def _average_gradients(loss: Tensor, rows: int, optimizer: torch.optim.Optimizer, group: Group) -> Tensor:
    """Average loss and, in place, gradients over the rows of all processes: Σ n·g / Σ n."""
    gradients = [p.grad for params in optimizer.param_groups for p in params["params"] if p.grad is not None]
    totals = torch.stack([loss * rows, loss.new_tensor(float(rows))])
    for gradient in gradients:
        gradient.mul_(rows)
    group.all_reduce(totals, *gradients)
    for gradient in gradients:
        gradient.div_(totals[1].to(gradient))
    return totals[0] / totals[1]


@dataclass
class Cycle:
    """Batches without end, in a new order every epoch; another Cycle can continue from its position."""

    data: Batches
    seed: int
    epoch: int = 0
    taken: int = 0  # batches of this epoch
    order: list[Tensor] = field(default_factory=list[Tensor])  # states of a DataLoader's own generators when the epoch began

    def __iter__(self) -> Iterator[Batch]:
        skip, generators = self.taken, self.data.generators()
        for generator, state in zip(generators, self.order, strict=False):
            generator.set_state(state)
        while True:
            self.order = [generator.get_state() for generator in generators]
            empty, self.taken = True, 0
            for batch in self.data.iter_shuffled(self.seed, self.epoch):
                empty, self.taken = False, self.taken + 1
                if self.taken > skip:
                    yield batch
            if empty:
                raise DataError(f"Expected at least one batch in `{self.data.name}`, but it is empty.")
            self.epoch, skip = self.epoch + 1, 0


def wander(
    model: BatchedModel, mean: Mapping[str, Tensor], fixed: Mapping[str, Tensor], likelihood: Likelihood, cycle: Cycle,
    steps: int, lr: float, every: int, *, group: Group = SINGLE_PROCESS,
) -> Weights:  # fmt: skip
    """Take Adam steps on the training NLL from w̄ and return w − w̄ after every so many of them, {name: (M, T, ...)}."""
    weights = {n: m.to(torch.promote_types(m.dtype, torch.float32)).clone().requires_grad_() for n, m in mean.items()}
    trace: dict[str, list[Tensor]] = {name: [] for name in mean}

    def objective(step: int, batch: Batch) -> Tensor:
        drawn = {n: w.to(mean[n].dtype) for n, w in weights.items()} | dict(fixed)
        return likelihood.nll(model(drawn, batch[0]), batch[1]).mean(1).sum()

    def keep(step: int, loss: Tensor) -> bool:
        if (step + 1) % every == 0:
            for name, w in weights.items():
                trace[name].append(w.detach() - mean[name])
        return False

    reason = minimize(objective, adam(weights.values(), lr=lr), cycle, steps=steps, monitors=[keep], group=group)
    if reason == "diverged":
        raise DataError("The training NLL became infinite while directions were sought: lower the rate of `Subspace(lr=...)`.")
    return {name: torch.stack(deltas, 1) for name, deltas in trace.items()}


def adam(parameters: ParamsT, *, lr: float, epsilon: float = 1e-8) -> torch.optim.Optimizer:
    """Return Adam, as everywhere in the paper."""
    return torch.optim.Adam(parameters, lr=lr, eps=epsilon, fused=True)


class RiskMonitor:
    """Every `every` steps, each member whose validation risk is at most τ keeps its state; `restore` brings it back.

    The state is all that is trained. A member that has failed `patience` checks in a row is done, as it would be
    alone; when all are, the loop stops.
    """

    def __init__(
        self, q: WeightDistribution, evaluate: Callable[[WeightDistribution], Sequence[Tensor]], max_risk: Tensor, *,
        every: int, history: History, patience: int | None = None, report: Callable[[int, str], None] | None = None,
    ) -> None:  # fmt: skip
        self._q, self._evaluate, self._max_risk, self._patience, self._report = q, evaluate, max_risk, patience, report
        self.every: int = every
        self.history: History = history
        self.failures: list[int] = [0] * q.members
        self.state: list[Tensor] = list(q.trained().values())
        self.best: list[Tensor] = [tensor.detach().clone() for tensor in self.state]
        history.max_risk, history.kept = max_risk.tolist(), [0] * q.members

    @property
    def done(self) -> list[bool]:
        """Which members are done."""
        return [self._patience is not None and failures >= self._patience for failures in self.failures]

    def __call__(self, step: int, loss: Tensor) -> bool:
        """Check now and then; stop when every member is done."""
        if (step + 1) % self.every:
            return False
        passed = self.check(step + 1, float(loss)).tolist()
        self.failures = [0 if p else f + 1 for p, f in zip(passed, self.failures, strict=True)]
        return all(self.done)

    @torch.no_grad()
    def check(self, step: int, loss: float, values: Sequence[Tensor] | None = None) -> Tensor:
        """Evaluate the members, unless their `values` are given, keep those that pass, and return which did, (M,)."""
        risk, uncertainty, *_ = self._evaluate(self._q) if values is None else values
        entropy = self._q.mean_log_square()
        passed = (risk <= self._max_risk.to(risk)) & entropy.isfinite() & ~torch.tensor(self.done, device=risk.device)
        for tensor, best in zip(self.state, self.best, strict=True):
            best.copy_(torch.where(passed.view(-1, *[1] * (tensor.ndim - 1)), tensor, best))
        self.history.add(step, loss, risk, entropy, uncertainty)
        self.history.kept = [step if p else k for p, k in zip(passed.tolist(), self.history.kept, strict=True)]
        if self._report is not None:
            self._report(step, self.history.describe())
        return passed

    @torch.no_grad()
    def restore(self) -> None:
        """Give every member the last state that passed."""
        for tensor, best in zip(self.state, self.best, strict=True):
            tensor.copy_(best)


class BestValidation:
    """Every `every` steps, each member keeps its weights if its validation loss is the lowest so far, or at most `ceiling`."""

    def __init__(
        self, weights: Mapping[str, Tensor], loss: Callable[[], Tensor], *, every: int, ceiling: Tensor | None = None
    ) -> None:
        self._weights, self._loss, self._every, self._ceiling = list(weights.values()), loss, every, ceiling
        self.best: list[Tensor] = [w.detach().clone() for w in self._weights]
        self.lowest: Tensor = torch.tensor(torch.inf, device="cpu")

    def __call__(self, step: int, loss: Tensor) -> bool:
        """Check now and then; never stop the loop."""
        if (step + 1) % self._every == 0:
            self.check()
        return False

    @torch.no_grad()
    def check(self, among: Tensor | None = None) -> None:
        """Evaluate the loss and keep the members, of those `among` (M,), that are better than before."""
        now = self._loss().nan_to_num(nan=torch.inf)
        now = now if among is None else torch.where(among, now, torch.inf)
        better = now < self.lowest.to(now) if self._ceiling is None else now <= self._ceiling
        self.lowest = torch.minimum(now, self.lowest.to(now))
        for w, best in zip(self._weights, self.best, strict=True):
            best.copy_(torch.where(better.view(-1, *[1] * (w.ndim - 1)), w, best))

    @torch.no_grad()
    def restore(self) -> None:
        """Give every member its best weights, those after the last step among them."""
        self.check()
        for w, best in zip(self._weights, self.best, strict=True):
            w.copy_(best)
