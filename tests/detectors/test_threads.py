"""Threads that share a detector get the scores of one thread."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn

import offmap

THREADS, CALLS = 8, 40


class Slow(nn.Module):
    """Gives other threads a chance between any two layers."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(20):
            x = x + 0
        return x


@pytest.mark.parametrize(("method", "features", "options"), [("knn", "3", {"k": 3}), ("mds", "3", {}), ("gram", None, {})])
def test_eight_threads_share_a_detector(method: str, features: str | None, options: dict[str, int]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(3, 16), Slow(), nn.ReLU(), nn.Linear(16, 8), Slow(), nn.ReLU(), nn.Linear(8, 8), Slow(), nn.Linear(8, 2)
    )
    x = torch.randn(200, 3)
    with torch.no_grad():
        model[-1].bias -= model(x).mean(0)
        y = model(x).argmax(1)
    detector = offmap.detect(model, (x, y), (x, y), method=method, features=features, **options)
    inputs = [i * torch.ones(4, 3) + torch.randn(4, 3) for i in range(CALLS)]
    alone = [detector.score(rows) for rows in inputs]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(THREADS) as pool:
            together = list(pool.map(detector.score, inputs * THREADS))
    finally:
        sys.setswitchinterval(before)
    for scores, expected in zip(together, alone * THREADS, strict=True):
        torch.testing.assert_close(scores, expected, rtol=0, atol=0)
