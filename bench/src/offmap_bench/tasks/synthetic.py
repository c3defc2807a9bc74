"""Small tasks: the paper's 1-D regression and two moons (section 7.1), number for number, and scikit-learn's digits."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from offmap.checks import require
from offmap_bench.tasks.task import Task, pair, tensor

Array = NDArray[np.float64]

SQUARE = 3.0
"""Half the side of the square around the moons."""


def truth(x: Array) -> Array:
    """f*(x) = 0.3·(x + sin 2πx + sin 4πx).

    >>> truth(np.array([0.0, 0.125, 0.5])).round(4)
    array([0.    , 0.5496, 0.15  ])
    """
    return 0.3 * (x + np.sin(2 * np.pi * x) + np.sin(4 * np.pi * x))


def regression(*, test: int = 200, ood_points: int = 200) -> Task:
    """100 + 20 points around −0.5 and 0.75 with noise 0.02; OOD: beside the data ("outside") and between ("gap").

    Training and validation points are those of the authors' code. `test` in-distribution points follow from the same generator.
    """
    rng = np.random.RandomState(123)

    def sample(n: int) -> tuple[Array, Array]:
        x = np.concatenate([rng.randn(n // 2) * 0.1 + centre for centre in (-0.5, 0.75)])
        return x[:, None], truth(x) + 0.02 * rng.randn(len(x))

    train, valid, held_out = sample(100), sample(20), sample(test)
    outside = np.concatenate([np.linspace(low, high, ood_points // 2) for low, high in ((-1.5, -1.1), (1.1, 1.5))])
    gap = np.linspace(-0.1, 0.4, ood_points)
    ood = {"outside": tensor(outside[:, None]), "gap": tensor(gap[:, None])}
    return Task("regression", pair(*train), pair(*valid), pair(*held_out), ood, likelihood="gaussian", outputs=2)


def moons(*, test: int = 400, ood_points: int = 1000, distance: float = 0.5) -> Task:
    """200 + 50 points on two moons; OOD: uniform on [−3, 3]², more than `distance` from every training point.

    Training and validation points are those of the authors' code. `test` in-distribution points follow from the same generator.
    """
    make_moons = require("sklearn.datasets", "sklearn").make_moons
    rng = np.random.RandomState(0)

    def sample(n: int) -> tuple[Array, NDArray[np.int64]]:
        x, y = make_moons(n_samples=n, noise=0.1, random_state=rng)
        return x - np.array([0.5, 0.25]), y

    train, valid, held_out = sample(200), sample(50), sample(test)
    around = rng.uniform(-SQUARE, SQUARE, (4 * ood_points, 2))
    nearest = np.linalg.norm(around[:, None] - train[0][None], axis=2).min(1)
    ood = {"off the moons": tensor(around[nearest > distance][:ood_points])}
    return Task("moons", pair(*train), pair(*valid), pair(*held_out), ood, likelihood="bernoulli", outputs=1)


def digits(*, seed: int = 0) -> Task:
    """901 images of 0–4, split 60/20/20 at random by `seed`; the 896 images of 5–9 are OOD. Pixels from 0 to 1."""
    bunch = require("sklearn.datasets", "sklearn").load_digits()
    x, y = bunch.data / 16.0, bunch.target
    rows = np.random.RandomState(seed).permutation(np.flatnonzero(y < 5))
    ends = [round(share * len(rows)) for share in (0.6, 0.8)]
    train, valid, test = (pair(x[part], y[part]) for part in np.split(rows, ends))
    ood = {"digits 5–9": tensor(x[y >= 5])}
    return Task("digits", train, valid, test, ood, likelihood="categorical", outputs=5)
