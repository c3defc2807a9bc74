"""Deep ensemble: plain nets trained from different starts by maximum likelihood, in one stack. One net is the plain baseline."""

from __future__ import annotations

from dataclasses import dataclass

from offmap.integrations.nets import Training, maximum_likelihood
from offmap_bench.methods.base import ensemble_fitters


@dataclass(frozen=True)
class Config(Training):
    """The paper's training of plain nets; the state of lowest validation NLL is kept."""


fit, fit_grid = ensemble_fitters(Config, lambda stack, likelihood, configs, seed: maximum_likelihood(stack, likelihood))
