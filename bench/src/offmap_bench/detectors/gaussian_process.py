"""The standard deviation of scikit-learn's Gaussian process, as its users have it: a distance that the targets tune."""

from __future__ import annotations

import logging
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from offmap.data import check_finite
from offmap.errors import ConfigError, DataError, ShapeError
from offmap.extras import require
from offmap.random import permutation

logger = logging.getLogger("offmap")

STEP = 4096
"""Rows that are scored together: each costs a kernel with all that the process knows."""


@dataclass(frozen=True)
class GaussianProcess:
    """A Scorer over a fitted `sklearn.gaussian_process.GaussianProcessRegressor`; inputs are standardised first."""

    process: Any
    shift: Tensor
    scale: Tensor

    def rows(self, x: Tensor) -> Any:
        """Inputs as the process knows them."""
        return ((x.detach().to(self.shift) - self.shift) / self.scale).flatten(1).double().cpu().numpy()

    def score(self, x: Tensor) -> Tensor:
        """The predictive standard deviation, averaged over targets: (B, ...) -> (B,), higher = more OOD."""
        check_finite(x, None, "the inputs")
        if not len(x):
            raise DataError("Expected at least one input, but got none.")
        if x.shape[1:] != self.shift.shape:
            raise ShapeError(f"Expected rows of shape {tuple(self.shift.shape)}, but got {tuple(x.shape[1:])}.")
        parts = [torch.from_numpy(self.process.predict(self.rows(part), return_std=True)[1]) for part in x.split(STEP)]
        return torch.cat(parts).reshape(len(x), -1).mean(1).to(x.device)


def gaussian_process(inputs: Tensor, targets: Tensor, *, rows: int = 1000, seed: int = 0) -> GaussianProcess:
    """A process of at most `rows` training rows, drawn by `seed`, with the kernel a²·exp(−|x − x'|²/2l²) + s² by evidence.

    Its cost grows with the cube of the rows. Inputs (n, ...) and targets (n,) or (n, K) are standardised.
    """
    if not (isinstance(rows, int) and rows >= 2):
        raise ConfigError(f"Expected `rows` to be a whole number of at least 2, but got {rows!r}.")
    if len(inputs) < 2 or len(targets) != len(inputs):
        raise DataError(f"Expected two training rows or more, each with a target, but got {len(inputs)} and {len(targets)}.")
    check_finite(inputs, targets, "the training data")
    module, kernels = require("sklearn.gaussian_process", "sklearn"), require("sklearn.gaussian_process.kernels", "sklearn")
    chosen = permutation(len(inputs), seed, "gaussian process")[:rows].to(inputs.device)
    shift, spread = inputs.mean(0), inputs.std(0, correction=0)
    kernel = kernels.ConstantKernel(1.0, (1e-3, 1e4)) * kernels.RBF(1.0, (1e-2, 1e3)) + kernels.WhiteKernel(0.1, (1e-8, 1e1))
    process = module.GaussianProcessRegressor(kernel, normalize_y=True, random_state=seed)
    made = GaussianProcess(process, shift, torch.where(spread > 0, spread, torch.ones_like(spread)))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        process.fit(made.rows(inputs[chosen]), targets[chosen].detach().double().cpu().numpy())
    for warning in said:
        logger.warning("The Gaussian process: %s", " ".join(str(warning.message).split()))
    return made
