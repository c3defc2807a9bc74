"""How settings of the fit were chosen: ε, the solver and the risk, on tables that are in no benchmark of the paper."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.random import RandomState
from numpy.typing import NDArray
from sklearn import datasets
from torch import nn

import offmap
from offmap.metrics import auroc
from offmap.posterior.predictive import Stochastic
from offmap.scores.terms import log_uncertainty
from offmap_bench.methods import deep_ensemble
from offmap_bench.runner.base_models import Recipe, models
from offmap_bench.runner.table import format_table
from offmap_bench.studies.study import Runs, Study, mean_over
from offmap_bench.tasks.task import Task
from offmap_bench.tasks.uci import MODES, cut

RECIPE = Recipe(training=deep_ensemble.Config(steps=4_000))
SOLVERS: dict[str, dict[str, Any]] = {"refine": {}, "closed form": {"solver": "closed-form"}}
EPSILONS: dict[str, dict[str, Any]] = {f"ε = 1e-{k}": {"eps": 10.0**-k} for k in (4, 3, 2)} | {"the rule": {}}
AUTHORS = "refine, authors' risk"
FITS = {f"{solver}, {eps}": options | more for solver, options in SOLVERS.items() for eps, more in EPSILONS.items()}
FITS |= {AUTHORS: {"risk": "averaged-nll"}}
SCORED = 2_000  # OOD rows that are scored
Pair = tuple[NDArray[np.float64], NDArray[np.float64]]


def arm(rng: RandomState, n: int = 4_000) -> Pair:
    """How far the hand of an arm with six joints is from a point."""
    angles = rng.uniform(-np.pi / 2, np.pi / 2, (n, 6))
    reach, sums = np.linspace(1, 0.4, 6), np.cumsum(angles, 1)
    x, y = (reach * np.cos(sums)).sum(1), (reach * np.sin(sums)).sum(1)
    return angles, np.hypot(x - 1, y - 0.5) + 0.05 * rng.randn(n)


def turbine(rng: RandomState, n: int = 5_000) -> Pair:
    """Sensors that all follow one slowly changing load."""
    state = np.sin(np.arange(n) / 50) + 0.3 * rng.randn(n)
    load = np.tanh(state) + 0.1 * rng.randn(n)
    columns = [state, load, load**2 + 0.05 * rng.randn(n), np.exp(0.5 * load) + 0.02 * rng.randn(n),
               state * load + 0.1 * rng.randn(n), rng.randn(n), 0.9 * state + 0.1 * rng.randn(n)]  # fmt: skip
    x = np.stack(columns, 1)
    return x, np.sin(2 * load) + 0.3 * x[:, 4] * x[:, 5] + 0.1 * rng.randn(n)


def grid(rng: RandomState, n: int = 600) -> Pair:
    """Settings that take few values, as in designed experiments."""
    choices = ([1, 2, 3, 4, 5], [0, 0.1, 0.25, 0.4], np.linspace(0, 1, 12), [2, 3, 4])
    x = np.stack([*(rng.choice(np.asarray(c, float), n) for c in choices), rng.randn(n).round(1)], 1)
    return x, x[:, 0] * x[:, 1] + np.sin(5 * x[:, 2]) * x[:, 3] + 0.1 * x[:, 4] + 0.05 * rng.randn(n)


def skew(rng: RandomState, n: int = 2_500) -> Pair:
    """Correlated inputs with long tails."""
    z = rng.randn(n, 9) @ rng.randn(9, 9)
    x = np.exp(0.6 * z / z.std(0))
    return x, np.log(x).sum(1) + np.sin(z[:, 0]) + 0.3 * rng.randn(n)


def clusters(rng: RandomState, n: int = 3_000) -> Pair:
    """Eight clouds of different width in twelve dimensions."""
    centres, which, widths = 2 * rng.randn(8, 12), rng.randint(0, 8, n), rng.uniform(0.2, 1, 8)
    x = centres[which] + rng.randn(n, 12) * widths[which][:, None]
    return x, np.tanh(x @ rng.randn(12, 20) / 4) @ rng.randn(20) + 0.2 * rng.randn(n)


def noisy(rng: RandomState, n: int = 2_000) -> Pair:
    """Grades: whole numbers, and more noise than signal."""
    x = rng.randn(n, 10) @ np.diag(np.linspace(1, 0.2, 10)) @ rng.randn(10, 10) + 0.3 * rng.randn(n, 10)
    return x, np.round(0.5 * x[:, 0] + 0.3 * x[:, 1] ** 2 + rng.randn(n))


def cancer(_: RandomState) -> Pair:
    """The logarithm of a cell's area from other measurements of it."""
    values = datasets.load_breast_cancer().data  # pyright: ignore[reportAttributeAccessIssue]
    return np.delete(values, 3, 1)[:, :20], np.log(values[:, 3])


def strokes(_: RandomState) -> Pair:
    """The first principal component of handwritten digits from the next sixteen."""
    values = datasets.load_digits().data  # pyright: ignore[reportAttributeAccessIssue]
    centred = values - values.mean(0)
    parts = centred @ np.linalg.svd(centred, full_matrices=False)[2][:17].T
    return parts[:, 1:], parts[:, 0]


TABLES: dict[str, Callable[[RandomState], Pair]] = {
    "friedman1": lambda _: datasets.make_friedman1(1_500, n_features=8, noise=1.0, random_state=1),
    "friedman2": lambda _: datasets.make_friedman2(800, noise=50.0, random_state=1),
    "friedman3": lambda _: datasets.make_friedman3(800, noise=0.1, random_state=1),
    "diabetes": lambda _: datasets.load_diabetes(return_X_y=True),
    "cancer": cancer, "strokes": strokes, "arm": arm, "turbine": turbine, "grid": grid, "skew": skew, "clusters": clusters,
    "noisy": noisy,
}  # pyright: ignore[reportAssignmentType]  # fmt: skip


def measure(name: str, mode: str) -> dict[str, dict[str, float]]:
    """AUROC of what the draws alone say, and the entropy, for each fit."""
    task = cut(f"{name}/{mode}", *TABLES[name](RandomState(7)), mode, 0)
    nets = models(task, 0, RECIPE)
    return {label: measure_fit(nets, task, mode, options) for label, options in FITS.items()}


def measure_fit(nets: Sequence[nn.Module], task: Task, mode: str, options: dict[str, Any]) -> dict[str, float]:
    """AUROC of the paper's score and of u, without any distance, and the entropy."""
    guard = offmap.fit(nets, task.train, task.valid, score="paper", progress=False, **options)
    outputs = guard.samples(task.test[0]), guard.samples(task.ood[mode][:SCORED])
    u = [log_uncertainty(guard.likelihood, o, guard.predictive.members) for o in outputs]
    paper = [guard.likelihood.score(o) for o in outputs]
    assert isinstance(guard.predictive, Stochastic)
    entropy = float(guard.predictive.q.mean_log_square().mean())
    return {"the paper's score": float(auroc(*paper)), "u": float(auroc(*u)), "entropy": round(entropy, 3)}


def fields(runs: Runs) -> dict[str, Any]:
    """Means over the tables: what each ε gives with each solver, and each risk."""

    def table(columns: Sequence[str], rows: dict[str, tuple[str, str, float]]) -> str:
        pairs = [(column, mode) for column in columns for mode in MODES]
        body = [
            [label, *(f"{factor * mean_over(runs, mode, column + suffix, key):.1f}" for column, mode in pairs)]
            for label, (suffix, key, factor) in rows.items()
        ]
        return format_table(["", *(f"{column}, {mode}" for column, mode in pairs)], body)

    scales = {"the paper's score": 100, "u": 100, "entropy": 1}
    by_eps = {f"{key}, {eps}": (f", {eps}", key, scale) for key, scale in scales.items() for eps in EPSILONS}
    by_risk = {key: ("", key, 100) for key in ("the paper's score", "u")}
    return {
        "epsilons": table(list(SOLVERS), by_eps),
        "risks": table(("refine, the rule", AUTHORS), by_risk),
        "count": len(runs) // 2,
    }


STUDY = Study("choice", lambda: {f"{name}/{mode}": partial(measure, name, mode) for mode in MODES for name in TABLES}, fields)
