"""Inputs and targets in other units change nothing but the units of the answer."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path

from torch import Tensor, nn

import offmap
from checks.trust import Check
from trained import inputs, quick, regression, regressor

TOLERANCE = 1e-3


class InUnits(nn.Module):
    """A net for inputs that are `a` times, and targets that are `b` times as large."""

    def __init__(self, net: nn.Module, a: float, b: float) -> None:
        super().__init__()
        self.net, self.a, self.b = net, a, b

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x / self.a) * self.b


@cache
def _fit(a: float, b: float, score: str) -> offmap.Guard:
    (x, y), (v, w) = regression(80), regression(60, seed=1)
    return quick(InUnits(regressor(), a, b), (x * a, y * b), (v * a, w * b), score=score, progress=False)


def trial(seed: int, folder: Path) -> str:
    """Units between 1e-8 and 1e8 against units of one half."""
    rng = random.Random(seed)
    a, b = (10 ** rng.uniform(-8, 8) for _ in range(2))
    score = rng.choice(["default", "distance", "epistemic", "paper"])
    x, near = 2 * inputs(40, seed), _fit(0.5, 0.5, score)
    far = _fit.__wrapped__(a, b, score)
    power = 0 if score in ("default", "distance") else 2
    expected, found = near(x / 2), far(x * a)
    _alike(found.score.double() / b**power, expected.score.double() * 2**power, seed)
    assert found.mean is not None
    assert expected.mean is not None
    _alike(found.mean.double() / b, expected.mean.double() * 2, seed)
    width = [(i.upper - i.lower).double() for i in (far.interval(x * a), near.interval(x / 2))]
    _alike(width[0] / b, width[1] * 2, seed)
    close = (near.threshold - expected.score).abs() < TOLERANCE * (1 + abs(near.threshold))
    assert bool(((found.ood == expected.ood) | close).all()), f"seed {seed}: other verdicts"
    return f"{score}: alike"


def _alike(found: Tensor, expected: Tensor, seed: int) -> None:
    apart = ((found - expected).abs() / (expected.abs() + expected.abs().mean())).max()
    assert float(apart) < TOLERANCE, f"seed {seed}: {float(apart):.1e} apart"


CHECK = Check(
    "In units from 1e-8 to 1e8 a guard of a model of means says the same, to 0.1 %, and flags the same.", trial, 200, 30.0, 4
)
