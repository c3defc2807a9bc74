"""Gradient steps that an earlier run began: what is kept of them, and where the next one goes on."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

import trained
from offmap.data import Batch, Rows
from offmap.maxwent.checkpoint import Checkpoint, Descent
from offmap.maxwent.train import Cycle, RiskMonitor, adam, minimize
from offmap.posterior.distribution import WeightDistribution
from offmap.posterior.predictive import History


def begun(path: Path) -> Descent:
    """One member that passes every check, one after every third step."""
    q = WeightDistribution({"w": torch.zeros(1, 4)}, initial_scale=0.1)
    monitor = RiskMonitor(q, lambda _: (torch.zeros(1), torch.zeros(1)), torch.ones(1), every=3, history=History())
    cycle = Cycle(Rows(*trained.regression(10), 4, "train"), seed=0)
    return Descent(Checkpoint(path, {}), "steps", q, monitor, adam(q.raw_scale.parameters(), lr=0.1), cycle)


def walk(descent: Descent, steps: int) -> None:
    def objective(step: int, batch: Batch) -> Tensor:
        return (descent.q.scale()["w"] - batch[1].mean()).square().sum()

    monitors = [descent.monitor, descent]
    minimize(objective, descent.optimizer, descent.cycle, steps=steps, monitors=monitors, start=descent.step)


def test_steps_go_on_from_the_last_check_as_if_never_ended(tmp_path: Path):
    walk(whole := begun(tmp_path / "whole"), 8)
    walk(begun(tmp_path / "state"), 5)
    rest = begun(tmp_path / "state")
    assert rest.resume() is None
    assert rest.step == 3
    walk(rest, 8)
    assert torch.equal(rest.q.raw_scale["w"], whole.q.raw_scale["w"])
    assert rest.monitor.history == whole.monitor.history
    assert rest.monitor.history.step == [3, 6]
