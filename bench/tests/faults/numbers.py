"""Generated calls of pure functions: metrics, conformal quantiles and p-values."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from faults.making import WRONG, Maker
from offmap import conformal, metrics

VALUES = ("id_scores", "ood_scores", "scores", "losses", "mean", "y", "a", "b", "calibration", "lower")
"""Arguments that are vectors of any numbers."""


def _vector(n: int) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(n))


MADE: dict[str, Callable[[int], Any]] = {
    **dict.fromkeys(VALUES, _vector),
    "std": lambda n: _vector(n).abs() + 0.1,
    "variance": lambda n: _vector(n).square() + 0.1,
    "upper": lambda n: _vector(n) + 1,
    "labels": lambda n: torch.arange(n) % 3,
    "probs": lambda n: torch.stack([_vector(n), -_vector(n), _vector(n) / 2], 1).softmax(1),
    "table": lambda n: torch.stack([_vector(n), -_vector(n)], 1),
    "weights": lambda n: torch.full((n,), 1 / (n + 1)),
    "level": lambda n: 0.9,
    "rate": lambda n: 0.9,
    "bins": lambda n: 3,
    "levels": lambda n: 5,
    "positive": lambda n: "id",
}

UNIT = ("auroc", "aupr_in", "aupr_out", "fpr_at", "coverage", "expected_calibration_error")
"""Numbers between 0 and 1."""

FUNCTIONS: list[Callable[..., Any]] = [
    *(f for name, f in inspect.getmembers(metrics, inspect.isfunction) if f.__module__ == metrics.__name__ and name[0] != "_"),
    conformal.quantile,
]  # fmt: skip


def numbers(make: Maker, folder: Path) -> None:
    """One function; the answer has no NaN, and lies where it should."""
    function, n = make.pick(FUNCTIONS), make.rng.choice([1, 2, 7, 30])
    given: dict[str, Any] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.default is not parameter.empty and make.rng.random() < 0.5:
            continue
        given[name] = MADE[name](n)
        if make.now():
            tensor = isinstance(given[name], Tensor) and make.rng.random() < 0.7
            given[name] = make.spoiled(given[name]) if tensor else make.pick(WRONG)
    made = function(**given)
    for part in made if isinstance(made, tuple) else (made,):
        assert isinstance(part, Tensor)
        # of equal numbers there is no correlation
        assert function is metrics.rank_correlation or not part.isnan().any(), f"{function.__name__} is NaN"
        if function.__name__ in UNIT:
            assert ((part >= 0) & (part <= 1)).all(), f"{function.__name__} is {part}"
