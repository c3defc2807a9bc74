"""Threads that share detectors get the scores of one thread, from the first call on."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn

import offmap
from offmap.detectors import DETECTORS

THREADS, BATCHES = 8, 25


class Slow(nn.Module):
    """Gives other threads a chance between any two layers."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(20):
            x = x + 0
        return x


@pytest.mark.parametrize("cache", [False, True])
@pytest.mark.parametrize("features", [None, "3"])
def test_eight_threads_share_all_detectors(features: str | None, cache: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(3, 16), Slow(), nn.ReLU(), nn.Linear(16, 8), Slow(), nn.ReLU(), nn.Linear(8, 8), Slow(), nn.Linear(8, 2)
    )
    x = torch.randn(200, 3)
    with torch.no_grad():
        model[-1].bias -= model(x).mean(0)
        y = model(x).argmax(1)
    methods = [name for name, method in DETECTORS.items() if features is None or method.needs != "head"]
    alone, shared = (offmap.detect_all(model, (x, y), (x, y), methods=methods, features=features, cache=cache) for _ in range(2))
    inputs = [i * torch.ones(4, 3) + torch.randn(4, 3) for i in range(BATCHES)]  # equal in shape, not in content
    calls = [(name, rows) for name in methods for rows in inputs for _ in range(2)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(THREADS) as pool:
            together = list(pool.map(lambda call: shared[call[0]].score(call[1]), calls))
    finally:
        sys.setswitchinterval(before)
    wrong = [name for (name, rows), scores in zip(calls, together, strict=True) if not scores.equal(alone[name].score(rows))]
    assert not wrong
