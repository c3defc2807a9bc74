"""Calibration of predictions on in-distribution data, clipped and not: what the paper's table 3 prints, and its baselines."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from offmap import conformal
from offmap.guard import Guard
from offmap.metrics import coverage, ence, mean_width, quantile_ece
from offmap_bench.tasks.task import Task

LEVEL, BINS = 0.95, 10
CLIPS = (("", "chosen"), ("wide_", None))
"""Prefix of a measure, and the clip it is taken with."""


def regression_measures(guard: Guard, task: Task) -> dict[str, float]:
    """Calibration errors, coverages and widths at 95 % on the test data; those of unclipped draws with the prefix `wide_`.

    `ence` is Levi's; `reference_ece` takes the *variance* for the scale, as the paper's authors' code does; `conformal` intervals
    have the rank ⌈0.95·(n + 1)⌉ of the n validation rows, infinite below 19 rows; `calibrated` ones the empirical 95 %
    quantile, which exists for any n and promises nothing.
    """
    result: dict[str, float] = {}
    for prefix, clip in CLIPS:
        test, valid = (guard.predict(part[0], clip=clip) for part in (task.test, task.valid))  # pyright: ignore
        if test.mean is None or test.std is None:
            return {}
        residuals = guard.likelihood.residual(valid, task.valid[1]).flatten()
        radii = {"conformal": conformal.quantile(residuals, LEVEL) * test.std, "calibrated": residuals.quantile(LEVEL) * test.std}
        measures = calibration_errors(test.mean, test.std, task.test[1])
        for name, radius in radii.items():
            measures |= interval_measures(test.mean, radius, task.test[1], name)
        result |= {f"{prefix}{name}": value for name, value in measures.items()}
    return result


def calibration_errors(mean: Tensor, std: Tensor, y: Tensor) -> dict[str, float]:
    """Levi's calibration error and that of the authors' code; NaN where draws overflow or agree to the last digit."""
    mean, std, y = (t.flatten().double() for t in (mean, std, y))
    if not bool(mean.isfinite().all() and std.square().isfinite().all() and (std > 0).all()):
        return {"ence": math.nan, "reference_ece": math.nan}
    error = ence(mean, std, y, bins=min(BINS, len(y)))
    return {"ence": float(error), "reference_ece": float(reference_ece(mean, std.square(), y))}


def reference_ece(mean: Tensor, variance: Tensor, y: Tensor) -> Tensor:
    """The ECE of the paper's tables, as in its authors' code: `quantile_ece` with the *variance* as the scale, (B,) each -> ().

    It depends on the unit of y: it reproduces the paper, and does not judge calibration.
    """
    return quantile_ece(mean, variance, y)


def interval_measures(mean: Tensor, radius: Tensor, y: Tensor, name: str) -> dict[str, float]:
    """Coverage and width of mean ± radius; NaN where the radius is not finite."""
    if not bool(torch.isfinite(radius).all() and torch.isfinite(mean).all()):
        return {f"{name}_coverage": math.nan, f"{name}_width": math.nan}
    lower, upper = ((mean + side * radius).flatten() for side in (-1, 1))
    share = coverage(lower, upper, y.flatten().to(lower))
    return {f"{name}_coverage": float(share), f"{name}_width": float(mean_width(lower, upper))}
