"""Calibration on in-distribution data: each measure against a slow count over the rows, clipped and not."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.stats import norm
from torch import Tensor

import offmap
from offmap.guard import Guard
from offmap_bench.methods import deep_ensemble
from offmap_bench.runner.base_models import Recipe, models
from offmap_bench.runner.run import regression_measures
from offmap_bench.tasks.catalog import task
from offmap_bench.tasks.task import Task


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Guard, Task]:
    data = replace(task("regression"), unit=3.0)
    recipe = Recipe(hidden=(20,), members=2, training=deep_ensemble.Config(steps=300, check_every=50))
    nets = models(data, recipe=recipe, folder=tmp_path_factory.mktemp("cache"))
    return offmap.fit(nets, data.train, data.valid, steps=50, draws=10, progress=False), data


def rows(guard: Guard, pair: tuple[Tensor, Tensor], clip: float | None) -> list[tuple[float, float, float]]:
    """(mean, standard deviation, target) of every row."""
    found = guard.predict(pair[0], clip=clip)
    assert found.mean is not None
    assert found.std is not None
    return list(zip(found.mean.tolist(), found.std.tolist(), pair[1].tolist(), strict=True))


@pytest.mark.parametrize("prefix", ["", "wide_"])
def test_every_measure_is_what_a_count_over_the_rows_gives(prefix: str, made: tuple[Guard, Task]) -> None:
    guard, data = made
    clip = guard.clip if prefix == "" else None
    test, valid = rows(guard, data.test, clip), rows(guard, data.valid, clip)
    residuals = sorted(abs(y - m) / s for m, s, y in valid)
    radii = {"conformal": residuals[math.ceil(0.95 * 21) - 1], "calibrated": float(np.quantile(residuals, 0.95))}
    found = regression_measures(guard, data)
    for name, radius in radii.items():
        inside = np.mean([abs(y - m) <= radius * s for m, s, y in test])
        assert found[f"{prefix}{name}_coverage"] == pytest.approx(inside, abs=1.5 / len(test))
        assert found[f"{prefix}{name}_width"] == pytest.approx(np.mean([2 * radius * s for _, s, _ in test]), rel=1e-4)
    levels = [k / 11 for k in range(1, 11)]
    gaps = [abs(p - np.mean([abs(y - m) <= norm.ppf((1 + p) / 2) * s**2 for m, s, y in test])) for p in levels]
    assert found[f"{prefix}reference_ece"] == pytest.approx(np.mean(gaps), abs=1e-3)
    raw = [((m - y) * data.unit, (s * data.unit) ** 2) for m, s, y in test]
    assert found[f"{prefix}raw_nll"] == pytest.approx(np.mean([(math.log(v) + e**2 / v) / 2 for e, v in raw]), rel=1e-4)
    assert found[f"{prefix}raw_coverage"] == pytest.approx(np.mean([abs(e) <= 2.5758 * v for e, v in raw]), abs=1.5 / len(test))
    gaps = [abs(p - np.mean([abs(e) <= norm.ppf((1 + p) / 2) * v for e, v in raw])) for p in levels]
    assert found[f"{prefix}raw_ece"] == pytest.approx(np.mean(gaps), abs=1e-3)
    groups = np.array_split(sorted(test, key=lambda row: row[1]), 10)
    errors = [abs(1 - math.sqrt(np.mean((g[:, 2] - g[:, 0]) ** 2) / np.mean(g[:, 1] ** 2))) for g in groups]
    assert found[f"{prefix}ence"] == pytest.approx(np.mean(errors), rel=1e-3)


def test_clipped_and_wide_draws_are_told_apart(made: tuple[Guard, Task]) -> None:
    guard, data = made
    tight = regression_measures(replace(guard, clip=0.0), data)
    assert tight["calibrated_width"] != pytest.approx(tight["wide_calibrated_width"], rel=1e-3)
    assert tight.keys() == {f"{p}{n}" for p in ("", "wide_") for n in (
        "ence", "reference_ece", "raw_nll", "raw_ece", "raw_coverage", "conformal_coverage", "conformal_width",
        "calibrated_coverage", "calibrated_width")}  # fmt: skip


def test_too_few_validation_rows_leave_no_conformal_interval_but_a_calibrated_one(made: tuple[Guard, Task]) -> None:
    guard, data = made
    found = regression_measures(guard, replace(data, valid=(data.valid[0][:18], data.valid[1][:18])))
    assert math.isnan(found["conformal_coverage"])
    assert math.isnan(found["wide_conformal_width"])
    assert math.isfinite(found["calibrated_width"])


def test_draws_that_overflow_have_no_calibration(made: tuple[Guard, Task]) -> None:
    guard, data = made
    far = replace(data, test=(torch.full_like(data.test[0], 1e30), data.test[1]))
    found = regression_measures(guard, far)
    assert math.isnan(found["wide_ence"])
    assert math.isnan(found["wide_calibrated_width"])
