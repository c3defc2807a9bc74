"""How well predictions on in-distribution data are calibrated, clipped and not: what the paper's table 3 prints, and its baselines."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from offmap import conformal
from offmap.guard import Guard
from offmap.likelihoods import Prediction
from offmap.metrics import coverage, ence, mean_width, reference_ece
from offmap_bench.tasks.task import Task

LEVEL, BINS = 0.95, 10
WAYS = (("", "chosen"), ("wide_", None))
"""Prefix of a measure, and the clip it is taken with."""


def regression_measures(guard: Guard, task: Task) -> dict[str, float]:
    """Calibration errors, coverages and widths at 95 % on the test data; those of unclipped draws with the prefix `wide_`.

    `ence` is Levi's; `reference_ece` takes the *variance* for the scale, as the paper's authors' code does; `conformal` intervals
    have the rank ⌈0.95·(n + 1)⌉ of the n validation rows, infinite below 19 rows; `calibrated` ones the empirical 95 %
    quantile, which exists for any n and promises nothing.
    """
    result: dict[str, float] = {}
    for prefix, clip in WAYS:
        test, valid = (guard.predict(part[0], clip=clip) for part in (task.test, task.valid))  # pyright: ignore
        if test.mean is None or test.std is None:
            return {}
        missed = guard.likelihood.residual(valid, task.valid[1]).flatten()
        measured = calibration(test, task.test[1]) | {
            **held(test, task.test[1], conformal.quantile(missed, LEVEL) * test.std, "conformal"),
            **held(test, task.test[1], missed.quantile(LEVEL) * test.std, "calibrated"),
        }
        result |= {f"{prefix}{name}": value for name, value in measured.items()}
    return result


def calibration(test: Prediction, y: Tensor) -> dict[str, float]:
    """Levi's calibration error and that of the authors' code; NaN where draws overflow or agree to the last digit."""
    assert test.mean is not None
    assert test.std is not None
    mean, std, y = test.mean.flatten().double(), test.std.flatten().double(), y.flatten().double()
    if not bool(mean.isfinite().all() and std.square().isfinite().all() and (std > 0).all()):
        return {"ence": math.nan, "reference_ece": math.nan}
    return {
        "ence": float(ence(mean, std, y, bins=min(BINS, len(y)))),
        "reference_ece": float(reference_ece(mean, std.square(), y)),
    }


def held(test: Prediction, y: Tensor, radius: Tensor, name: str) -> dict[str, float]:
    """Coverage and width of mean ± radius; NaN where the radius is not finite."""
    assert test.mean is not None
    if not bool(torch.isfinite(radius).all() and torch.isfinite(test.mean).all()):
        return {f"{name}_coverage": math.nan, f"{name}_width": math.nan}
    lower, upper = ((test.mean + side * radius).flatten() for side in (-1, 1))
    return {
        f"{name}_coverage": float(coverage(lower, upper, y.flatten().to(lower))),
        f"{name}_width": float(mean_width(lower, upper)),
    }
