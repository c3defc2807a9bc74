"""Scorers over scikit-learn's estimators, as its users have them: a Gaussian process and an isolation forest."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from offmap.checks import integer, require
from offmap.data import check_finite
from offmap.detectors.input_distance import check_rows, check_training_rows
from offmap.errors import DataError
from offmap.random import permutation

logger = logging.getLogger("offmap")

STEP = 4096
"""Rows that are scored together: each costs a kernel with all that a process knows."""


@dataclass(frozen=True)
class EstimatorScorer:
    """A Scorer over a fitted estimator; `score_rows` maps rows of numbers to scores, (B, D) -> (B, ...), averaged.

    Inputs less `shift` and divided by `scale`, if given, are what the estimator was fitted on.
    """

    estimator: Any
    score_rows: Callable[[Any], Any]
    shift: Tensor
    scale: Tensor

    def rows(self, x: Tensor) -> Any:
        """Inputs as the estimator knows them."""
        return ((x.detach().to(self.shift) - self.shift) / self.scale).flatten(1).double().cpu().numpy()

    def score(self, x: Tensor) -> Tensor:
        """(B, ...) -> (B,), higher = more OOD."""
        check_rows(x, self.shift)
        check_finite(x, None, "the inputs")
        parts = [torch.from_numpy(self.score_rows(self.rows(part))) for part in x.split(STEP)]
        return torch.cat(parts).reshape(len(x), -1).mean(1).to(x.device)


def gaussian_process(inputs: Tensor, targets: Tensor, *, rows: int = 1000, seed: int = 0) -> EstimatorScorer:
    """Score by the predictive standard deviation, averaged over targets: a distance that the targets tune.

    The process knows at most `rows` training rows, drawn by `seed`, with the kernel a²·exp(−|x − x'|²/2l²) + s² by evidence; its
    cost grows with their cube. Inputs (n, ...) and targets (n,) or (n, K) are standardised.
    """
    integer("rows", rows, 2)
    if len(inputs) < 2 or len(targets) != len(inputs):
        raise DataError(f"Expected two training rows or more, each with a target, but got {len(inputs)} and {len(targets)}.")
    check_finite(inputs, targets, "the training data")
    module, kernels = require("sklearn.gaussian_process", "sklearn"), require("sklearn.gaussian_process.kernels", "sklearn")
    chosen = permutation(len(inputs), seed, "gaussian process")[:rows].to(inputs.device)
    shift, spread = inputs.mean(0), inputs.std(0, correction=0)
    kernel = kernels.ConstantKernel(1.0, (1e-3, 1e4)) * kernels.RBF(1.0, (1e-2, 1e3)) + kernels.WhiteKernel(0.1, (1e-8, 1e1))
    process = module.GaussianProcessRegressor(kernel, normalize_y=True, random_state=seed)
    scale = torch.where(spread > 0, spread, torch.ones_like(spread))
    scorer = EstimatorScorer(process, lambda x: process.predict(x, return_std=True)[1], shift, scale)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        process.fit(scorer.rows(inputs[chosen]), targets[chosen].detach().double().cpu().numpy())
    for warning in caught:
        logger.warning("The Gaussian process: %s", " ".join(str(warning.message).split()))
    return scorer


def isolation_forest(inputs: Tensor, *, trees: int = 100, seed: int = 0) -> EstimatorScorer:
    """Score by how soon random cuts part a row from the training rows, (n, ...); units do not matter, only order."""
    integer("trees", trees, above=0)
    check_training_rows(inputs, 2)
    forest = require("sklearn.ensemble", "sklearn").IsolationForest(n_estimators=trees, random_state=seed)
    zero, one = torch.zeros_like(inputs[0]), torch.ones_like(inputs[0])
    scorer = EstimatorScorer(forest, lambda x: -forest.score_samples(x), zero, one)  # scikit-learn's is higher for inliers
    forest.fit(scorer.rows(inputs))
    return scorer
