"""Regression tables that are in no benchmark of the paper: what recipes are chosen on, so that UCI can tell whether they hold."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.random import RandomState
from numpy.typing import NDArray
from sklearn import datasets

Array = NDArray[np.float64]
Pair = tuple[Array, Array]


def arm(n: int = 4_000) -> Pair:
    """How far the hand of an arm with six joints is from a point."""
    rng = RandomState(7)
    angles = rng.uniform(-np.pi / 2, np.pi / 2, (n, 6))
    reach, sums = np.linspace(1, 0.4, 6), np.cumsum(angles, 1)
    x, y = (reach * np.cos(sums)).sum(1), (reach * np.sin(sums)).sum(1)
    return angles, np.hypot(x - 1, y - 0.5) + 0.05 * rng.randn(n)


def turbine(n: int = 5_000) -> Pair:
    """Sensors that all follow one slowly changing load."""
    rng = RandomState(7)
    state = np.sin(np.arange(n) / 50) + 0.3 * rng.randn(n)
    load = np.tanh(state) + 0.1 * rng.randn(n)
    columns = [state, load, load**2 + 0.05 * rng.randn(n), np.exp(0.5 * load) + 0.02 * rng.randn(n),
               state * load + 0.1 * rng.randn(n), rng.randn(n), 0.9 * state + 0.1 * rng.randn(n)]  # fmt: skip
    x = np.stack(columns, 1)
    return x, np.sin(2 * load) + 0.3 * x[:, 4] * x[:, 5] + 0.1 * rng.randn(n)


def grid(n: int = 600) -> Pair:
    """Settings that take few values, as in designed experiments."""
    rng = RandomState(7)
    choices = ([1, 2, 3, 4, 5], [0, 0.1, 0.25, 0.4], np.linspace(0, 1, 12), [2, 3, 4])
    x = np.stack([*(rng.choice(np.asarray(c, float), n) for c in choices), rng.randn(n).round(1)], 1)
    return x, x[:, 0] * x[:, 1] + np.sin(5 * x[:, 2]) * x[:, 3] + 0.1 * x[:, 4] + 0.05 * rng.randn(n)


def skew(n: int = 2_500) -> Pair:
    """Correlated inputs with long tails."""
    rng = RandomState(7)
    z = rng.randn(n, 9) @ rng.randn(9, 9)
    x = np.exp(0.6 * z / z.std(0))
    return x, np.log(x).sum(1) + np.sin(z[:, 0]) + 0.3 * rng.randn(n)


def clusters(n: int = 3_000) -> Pair:
    """Eight clouds of different width in twelve dimensions."""
    rng = RandomState(7)
    centres, which, widths = 2 * rng.randn(8, 12), rng.randint(0, 8, n), rng.uniform(0.2, 1, 8)
    x = centres[which] + rng.randn(n, 12) * widths[which][:, None]
    return x, np.tanh(x @ rng.randn(12, 20) / 4) @ rng.randn(20) + 0.2 * rng.randn(n)


def noisy(n: int = 2_000) -> Pair:
    """Grades: whole numbers, and more noise than signal."""
    rng = RandomState(7)
    x = rng.randn(n, 10) @ np.diag(np.linspace(1, 0.2, 10)) @ rng.randn(10, 10) + 0.3 * rng.randn(n, 10)
    return x, np.round(0.5 * x[:, 0] + 0.3 * x[:, 1] ** 2 + rng.randn(n))


def cancer() -> Pair:
    """The logarithm of a cell's area from other measurements of it."""
    values = datasets.load_breast_cancer().data  # pyright: ignore[reportAttributeAccessIssue]
    return np.delete(values, 3, 1)[:, :20], np.log(values[:, 3])


def strokes() -> Pair:
    """The first principal component of handwritten digits from the next sixteen."""
    values = datasets.load_digits().data  # pyright: ignore[reportAttributeAccessIssue]
    centred = values - values.mean(0)
    parts = centred @ np.linalg.svd(centred, full_matrices=False)[2][:17].T
    return parts[:, 1:], parts[:, 0]


TABLES: dict[str, Callable[[], Pair]] = {
    "friedman1": lambda: datasets.make_friedman1(1_500, n_features=8, noise=1.0, random_state=1),
    "friedman2": lambda: datasets.make_friedman2(800, noise=50.0, random_state=1),
    "friedman3": lambda: datasets.make_friedman3(800, noise=0.1, random_state=1),
    "diabetes": lambda: datasets.load_diabetes(return_X_y=True),
    "cancer": cancer,
    "strokes": strokes,
    "arm": arm,
    "turbine": turbine,
    "grid": grid,
    "skew": skew,
    "clusters": clusters,
    "noisy": noisy,
}  # pyright: ignore[reportAssignmentType]
