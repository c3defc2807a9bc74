"""What the options of `offmap.fit` do: basis, random parameters, solver, draws and clip, on UCI tables."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

import offmap
from offmap.data import as_batches, load_rows
from offmap.evaluation import measure_predictions
from offmap.guard import Guard
from offmap.metrics import auroc
from offmap.scores.score import EpistemicScore
from offmap_bench.runner.base_models import models
from offmap_bench.runner.images import time_work
from offmap_bench.runner.table import format_table, percent
from offmap_bench.studies.study import Runs, Study, mean_over
from offmap_bench.tasks.catalog import task
from offmap_bench.tasks.task import Task

TABLES = ("yacht", "energy", "concrete", "wine", "kin8nm")
MODES = ("extrapolation", "interpolation")
ROWS = 1000
DRAWS = (5, 10, 20, 50, 100, 200)
BASE = "defaults"
CHANGES = (("basis", "identity"), ("solver", "closed-form"), ("params", "matrices"), ("params", "last-layer"))
VARIANTS: dict[str, dict[str, Any]] = {BASE: {}, **{f"{key}={value!r}": {key: value} for key, value in CHANGES}}


def measure(name: str) -> dict[str, Any]:
    """Every variant on one task, and the defaults by draws and by clip."""
    data = task(name, 0)
    net, (ood,) = models(data, 0)[0], data.ood.values()
    sets = [x[torch.randperm(len(x), generator=torch.Generator().manual_seed(0))[:ROWS]] for x in (data.test[0], ood)]
    results: dict[str, Any] = {}
    for label, options in VARIANTS.items():
        guard, seconds = time_work(lambda o=options: offmap.fit(net, data.train, data.valid, progress=False, **o))
        results[label] = detection(guard, sets) | prediction_errors(guard, data) | {"seconds": round(seconds, 2)}
        if label == BASE:
            results["draws"] = {str(n): detection(replace(guard, draws=n), sets) for n in DRAWS}
            clips = {"chosen": guard.clip, "none": None, "0": 0.0}
            results["clip"] = {label: prediction_errors(replace(guard, clip=clip), data) for label, clip in clips.items()}
    return results


def detection(guard: Guard, sets: list[Tensor]) -> dict[str, float]:
    """AUROC by disagreement alone, and by the default score."""
    guards = {"disagreement": replace(guard, score_module=EpistemicScore()), "default": guard}
    return {name: round(float(auroc(*(g.score(x) for x in sets))), 4) for name, g in guards.items()}


def prediction_errors(guard: Guard, data: Task) -> dict[str, float]:
    """NLL and RMSE of predictions on test rows."""
    quality, _, _ = measure_predictions(guard, load_rows(as_batches(data.test, guard.place, name="test")))
    return {name: round(float(quality[name]), 4) for name in ("nll", "rmse")}


def fields(runs: Runs) -> dict[str, Any]:
    """Three tables: means over the tasks of each mode."""
    scores = [(score, mode) for score in ("disagreement", "default") for mode in MODES]
    columns = [f"{score}, {mode}" for score, mode in scores]

    def auroc_cells(*keys: str) -> list[str]:
        return [percent(mean_over(runs, mode, *keys, score)) for score, mode in scores]

    def error_cells(*keys: str) -> list[str]:
        return [f"{mean_over(runs, '', *keys, key):.3f}" for key in ("nll", "rmse")]

    names = {name: name if name == BASE else f"`{name}`" for name in VARIANTS}
    options = [[names[n], *auroc_cells(n), *error_cells(n), f"{mean_over(runs, '', n, 'seconds'):.1f}"] for n in names]
    clips = {"chosen": "chosen on validation data", "none": "none: the wide distribution", "0": "0: the net itself"}
    return {
        "tables": len(TABLES), "names": ", ".join(TABLES), "rows": f"{ROWS:,}",
        "options": format_table(["option", *columns, "NLL", "RMSE", "fit, s"], options),
        "by_draws": format_table(["draws", *columns], [[str(n), *auroc_cells("draws", str(n))] for n in DRAWS]),
        "clips": format_table(["clip", "NLL", "RMSE"], [[words, *error_cells("clip", c)] for c, words in clips.items()]),
    }  # fmt: skip


STUDY = Study("options", lambda: {n: partial(measure, n) for n in (f"uci/{t}/{m}" for t in TABLES for m in MODES)}, fields)
