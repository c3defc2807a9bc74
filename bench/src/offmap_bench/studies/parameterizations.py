"""Does more entropy see more? Laws of weights, each as wide as the same validation rule allows, around the same nets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from statistics import fmean, median, mode
from typing import Any

import torch
from torch import Tensor

import offmap
from offmap.metrics import auroc
from offmap.posterior.parameterization import Flow, LowRank, Subspace
from offmap.random import sample
from offmap_bench.runner.base_models import Recipe, models
from offmap_bench.runner.images import time_work
from offmap_bench.runner.table import format_table, percent
from offmap_bench.studies.study import Runs, Study, format_signed, mean_over
from offmap_bench.tasks.catalog import task as named
from offmap_bench.tasks.uci import MODES

ROWS, SEEDS = 2000, 3  # test rows and OOD rows at most; seeds of the small tables
SMALL, LARGE = ("yacht", "energy", "concrete"), ("power",)
SYNTHETIC: dict[str, Any] = {"tolerance": "smoothed", "batch_size": 32}  # as in the plan `synthetic`
LAWS: dict[str, dict[str, Any]] = {
    "scaling": {"basis": "identity"},
    "SVD": {},
    "SVD, exact entropy": {"regularizer": "log"},
    "SVD, low-rank": {"parameterization": LowRank()},
    "subspace": {"parameterization": Subspace()},
    "random subspace": {"parameterization": Flow(layers=0)},
    "flow": {"parameterization": Flow()},
}
LOW_RANK = "SVD, low-rank"
STEPS = (("scaling", "SVD"), ("SVD", "SVD, exact entropy"), ("SVD, exact entropy", LOW_RANK), ("random subspace", "flow"))
"""Pairs of laws with as many coordinates, the second meant to be wider."""

WEIGHTS = (1.0, 3.0, 30.0)  # λ of every law; the fit of highest entropy within τ is kept
SCORES = {"paper": "score", "epistemic": "epistemic"}  # methods of the likelihood


def cells() -> Mapping[str, Callable[[], Any]]:
    """All tasks, after one unmeasured run: the first fit of a process imports half of torch."""
    measure("uci/yacht/extrapolation", 0)
    tables = {0: (*SMALL, *LARGE)} | dict.fromkeys(range(1, SEEDS), SMALL)
    uci = [(f"uci/{table}/{kind}", seed) for seed, names in tables.items() for kind in MODES for table in names]
    return {f"{seed} {name}": partial(measure, name, seed) for name, seed in [("regression", 0), ("moons", 0), *uci]}


def measure(name: str, seed: int) -> dict[str, dict[str, float]]:
    """All laws around the first net of a task: entropy, risk, AUROC and seconds."""
    task, synthetic = named(name, seed), "/" not in name
    net = models(task, seed, Recipe(batch_size=32) if synthetic else Recipe())[0]
    ood = torch.cat(list(task.ood.values()))
    sets = [x[sample(len(x), min(len(x), ROWS), "parameterizations", name)] for x in (task.test[0], ood)]
    results: dict[str, dict[str, float]] = {}
    for title, options in LAWS.items():
        settings: dict[str, Any] = {**options, **(SYNTHETIC if synthetic else {}), "noise": "normal", "seed": seed}
        settings["entropy_weight"] = WEIGHTS
        fit = partial(offmap.fit, net, task.train, task.valid, score="paper", progress=False, **settings)
        guard, seconds = time_work(fit)
        q, history = guard.predictive.q, guard.history  # pyright: ignore
        results[title] = {
            "d": q.dimension, "entropy": float(q.entropy()), "width": history.final_entropy[0],
            "beyond": q.dimension / 2 * history.final_entropy[0] - sum(float(s.log().sum()) for s in q.scale().values()),
            "weight": history.chosen["entropy_weight"],
            "risk": history.final_risk[0], "max_risk": history.max_risk[0], "seconds": seconds, **detect(guard, sets),
        }  # fmt: skip
    return results


def detect(guard: offmap.Guard, sets: list[Tensor]) -> dict[str, float]:
    """AUROC by score, and how many times larger the disagreement is on OOD rows: a ratio of medians of standard deviations."""
    outputs = [guard.predictive.outputs(x, guard.draws, clip=None, seed=guard.seed) for x in sets]
    scores = {name: [getattr(guard.likelihood, method)(out) for out in outputs] for name, method in SCORES.items()}
    known, unknown = (s.double().median().sqrt() for s in scores["epistemic"])
    return {name: float(auroc(*pair)) for name, pair in scores.items()} | {"ratio": float(unknown / known)}


def fields(runs: Runs) -> dict[str, Any]:
    """Means by law, every task, and how often the wider of two laws sees more."""
    groups = {"synthetic": ("regression", "moons"), **{name: (name,) for name in MODES}}

    def mean(title: str, key: str, ends: tuple[str, ...] = ("",)) -> float:
        return fmean(mean_over({c: r for c, r in runs.items() if c.endswith(end)}, "", title, key) for end in ends)

    header = ["law", "d", "width", "H/d", *(f"{score}, {group}" for group in groups for score in SCORES), "OOD/ID", "λ", "fit, s"]
    per_number = {title: fmean(run[title]["entropy"] / run[title]["d"] for run in runs.values()) for title in LAWS}
    rows = [
        [title, f"{mean(title, 'd'):,.0f}", format_signed(mean(title, "width")), format_signed(per_number[title]),
         *(percent(mean(title, score, ends)) for ends in groups.values() for score in SCORES),
         f"{median(run[title]['ratio'] for run in runs.values()):.1f}",
         f"{mode(run[title]['weight'] for run in runs.values()):g}",
         f"{mean(title, 'seconds'):.1f}"]
        for title in LAWS
    ]  # fmt: skip
    names = sorted({cell.split(" ")[1] for cell in runs})
    tasks = [
        [name.removeprefix("uci/"), *(f"{format_signed(mean(t, 'width', (f' {name}',)), 1)} · "
                                      f"{percent(mean(t, 'paper', (f' {name}',)))}" for t in LAWS)]
        for name in names
    ]  # fmt: skip
    within = fmean(run[t]["risk"] <= run[t]["max_risk"] for run in runs.values() for t in LAWS)
    beyond = mean(LOW_RANK, "beyond")
    return {
        "summary": format_table(header, rows), "tasks": format_table(["task", *LAWS], tasks), "within": percent(within),
        "steps": format_table(["step", "width", "wider", *(f"{w}, {s}" for s in SCORES for w in ("AUROC", "higher"))],
                          [compare(runs, *pair) for pair in STEPS]),
        "cells": len(runs), "names": ", ".join(name.removeprefix("uci/") for name in names),
        "seeds": ", ".join(sorted({cell.split(" ")[0] for cell in runs})),
        "beyond": f"{beyond:.0f}", "per": f"{beyond / mean(LOW_RANK, 'd'):.4f}", "weights": ", ".join(f"{w:g}" for w in WEIGHTS),
        "rows": ROWS, "rank": LowRank().rank, "k": Flow().dimensions, "walk": Subspace().steps,
        "layers": Flow().layers,
    }  # fmt: skip


def compare(runs: Runs, first: str, second: str) -> list[str]:
    """By how much the second law is wider than the first, and what it sees more: means, and on how many of the tasks."""
    pairs = [(run[first], run[second]) for run in runs.values()]
    row = [f"{first} → {second}"]
    for key, factor in (("width", 1), *((score, 100) for score in SCORES)):
        gains = [factor * (b[key] - a[key]) for a, b in pairs]
        row += [("+" if fmean(gains) > 0 else "") + format_signed(fmean(gains)), f"{sum(g > 0 for g in gains)} of {len(gains)}"]
    return row


STUDY = Study("parameterizations", cells, fields)
