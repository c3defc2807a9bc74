"""How soon random cuts part a row from the training rows: scikit-learn's isolation forest, as its users have it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from offmap.data import check_finite
from offmap.errors import ConfigError, DataError, ShapeError
from offmap.extras import require


@dataclass(frozen=True)
class IsolationForest:
    """A Scorer over a fitted `sklearn.ensemble.IsolationForest`."""

    forest: Any
    shape: torch.Size

    def score(self, x: Tensor) -> Tensor:
        """−score_samples, scikit-learn's being higher for inliers: (B, ...) -> (B,), higher = more OOD."""
        check_finite(x, None, "the inputs")
        if not len(x):
            raise DataError("Expected at least one input, but got none.")
        if x.shape[1:] != self.shape:
            raise ShapeError(f"Expected rows of shape {tuple(self.shape)}, but got {tuple(x.shape[1:])}.")
        scores = -self.forest.score_samples(x.detach().flatten(1).double().cpu().numpy())
        return torch.from_numpy(scores).to(x.device)


def isolation_forest(inputs: Tensor, *, trees: int = 100, seed: int = 0) -> IsolationForest:
    """A forest of the training inputs (n, ...); units do not matter, only the order of the values in a column."""
    if not (isinstance(trees, int) and trees > 0):
        raise ConfigError(f"Expected `trees` to be a whole number above 0, but got {trees!r}.")
    if len(inputs) < 2:
        raise DataError(f"Expected at least two training rows, but got {len(inputs)}.")
    check_finite(inputs, None, "the training inputs")
    ensemble = require("sklearn.ensemble", "sklearn")
    forest = ensemble.IsolationForest(n_estimators=trees, random_state=seed)
    return IsolationForest(forest.fit(inputs.detach().flatten(1).double().cpu().numpy()), inputs.shape[1:])
