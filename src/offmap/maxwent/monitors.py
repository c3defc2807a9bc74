"""What watches a training loop: RiskThreshold keeps the last state below τ, BestValidation the best, History remembers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

import torch
from torch import Tensor

from offmap.posterior.distribution import WeightDistribution
from offmap.posterior.predictive import History

Look: TypeAlias = Callable[[WeightDistribution], tuple[Tensor, Tensor]]
"""Validation risk, and uncertainty on in-distribution data, of every member, (M,) each."""

Report: TypeAlias = Callable[[int, History], None]
"""Shown the history after every check: a progress bar."""


class RiskThreshold:
    """Every `every` steps, each member whose validation risk is at most τ keeps its state; `restore` brings it back.

    The state is φ, and the mean where it is trained.

    A member that has failed `patience` checks in a row is done, as it would be alone; when all are, the loop stops.
    """

    def __init__(
        self,
        q: WeightDistribution,
        look: Look,
        max_risk: Tensor,
        *,
        every: int,
        history: History,
        patience: int | None = None,
        report: Report | None = None,
    ) -> None:
        self.q, self.look, self.max_risk, self.every, self.patience = q, look, max_risk, every, patience
        self.failures = [0] * q.members
        self.history, self.report = history, report
        self.state = [*q.raw_scale.values(), *(mean for mean in q.mean.values() if mean.requires_grad)]
        self.best = [tensor.detach().clone() for tensor in self.state]
        history.max_risk = max_risk.tolist()
        history.kept = [0] * q.members

    def __call__(self, step: int, loss: Tensor) -> bool:
        """Check now and then; stop when every member is done."""
        if (step + 1) % self.every:
            return False
        passed = self.check(step + 1, float(loss)).tolist()
        self.failures = [0 if p else f + 1 for p, f in zip(passed, self.failures, strict=True)]
        return self.finished

    @property
    def finished(self) -> bool:
        """Whether every member is done."""
        return all(map(self._done, range(self.q.members)))

    def _done(self, member: int) -> bool:
        return self.patience is not None and self.failures[member] >= self.patience

    def check(self, step: int, loss: float, seen: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """Measure the risk, unless it was `seen`, keep the members that pass, and return which did, (M,)."""
        risk, uncertainty = self.look(self.q) if seen is None else seen
        with torch.no_grad():
            entropy = self.q.mean_log_square()
            done = torch.tensor([self._done(m) for m in range(self.q.members)], device=risk.device)
            passed = (risk <= self.max_risk.to(risk)) & entropy.isfinite() & ~done
            for tensor, best in zip(self.state, self.best, strict=True):
                best.copy_(torch.where(passed.view(-1, *[1] * (tensor.ndim - 1)), tensor, best))
        self.history.add(step, loss, risk, entropy, uncertainty)
        self.history.kept = [step if p else k for p, k in zip(passed.tolist(), self.history.kept, strict=True)]
        if self.report is not None:
            self.report(step, self.history)
        return passed

    @torch.no_grad()
    def restore(self) -> None:
        """Give every member the last state that passed."""
        for tensor, best in zip(self.state, self.best, strict=True):
            tensor.copy_(best)


class BestValidation:
    """Every `every` steps, each member keeps its weights if its validation loss is the lowest so far.

    With a `ceiling` (M,), it keeps them if the loss is not above it: the last such state stays.
    """

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        loss: Callable[[], Tensor],
        *,
        every: int,
        ceiling: Tensor | None = None,
        report: Callable[[int], None] | None = None,
    ) -> None:
        self.weights, self.loss, self.every, self.report = dict(weights), loss, every, report
        self.lowest: Tensor | None = None
        self.ceiling = ceiling
        self.best = {name: w.detach().clone() for name, w in weights.items()}

    def __call__(self, step: int, loss: Tensor) -> bool:
        """Check now and then; never stops the loop."""
        if (step + 1) % self.every == 0:
            self.check()
            if self.report is not None:
                self.report(step + 1)
        return False

    @torch.no_grad()
    def check(self, among: Tensor | None = None) -> None:
        """Measure the loss and keep the members, of those `among` (M,), that are better than ever."""
        now = self.loss().nan_to_num(nan=torch.inf)
        if among is not None:
            now = torch.where(among, now, torch.inf)
        if self.ceiling is not None:
            better = now <= self.ceiling
        else:
            better = now < (torch.full_like(now, torch.inf) if self.lowest is None else self.lowest)
            self.lowest = now if self.lowest is None else torch.minimum(now, self.lowest)
        for name, w in self.weights.items():
            self.best[name] = torch.where(better.view(-1, *[1] * (w.ndim - 1)), w, self.best[name])

    @torch.no_grad()
    def restore(self) -> None:
        """Give every member its best weights, those after the last step among them."""
        self.check()
        for name, w in self.weights.items():
            w.copy_(self.best[name])
