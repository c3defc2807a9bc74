"""scikit-learn's handwritten digits, 8 × 8 pixels: 0–4 are in-distribution, 5–9 unknown."""

from __future__ import annotations

import numpy as np

from offmap.extras import require
from offmap_bench.tasks.task import Task, pair, tensor

FAMILIAR = 5
SHARES = (0.6, 0.8)
"""Where training data end and where validation data end; the rest is for testing."""


def digits(*, seed: int = 0) -> Task:
    """901 images of 0–4, split 60/20/20 at random by `seed`; the 896 images of 5–9 are OOD. Pixels from 0 to 1."""
    bunch = require("sklearn.datasets", "sklearn").load_digits()
    x, y = bunch.data / 16.0, bunch.target
    rows = np.random.RandomState(seed).permutation(np.flatnonzero(y < FAMILIAR))
    first, second = (round(share * len(rows)) for share in SHARES)
    train, valid, test = (pair(x[part], y[part]) for part in np.split(rows, [first, second]))
    return Task(
        name="digits",
        train=train,
        valid=valid,
        test=test,
        ood={"digits 5–9": tensor(x[y >= FAMILIAR])},
        likelihood="categorical",
        outputs=FAMILIAR,
    )
