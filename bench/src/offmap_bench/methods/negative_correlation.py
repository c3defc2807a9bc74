"""Negative correlation: members are pushed away from what the ensemble predicts, on the training data themselves.

The penalty is that of Liu and Yao (1999), which the paper cites, on the members' means. The authors' code lets it act on the
predicted log-variances as well, where it has no meaning; here it does not.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from offmap.data import Batch
from offmap.integrations.nets import Losses, Stack, Training, member_risks
from offmap.likelihoods import Likelihood
from offmap_bench.methods.base import ensemble_fitters, ensemble_nll, per_setting


@dataclass(frozen=True)
class Config(Training):
    """The state whose ensemble has the lowest validation NLL is kept."""

    tradeoff: float = 0.1  # λ; the paper's grid: 1, 0.1, …, 1e-5


def negative_correlation(stack: Stack, likelihood: Likelihood, tradeoff: Tensor) -> Losses:
    """Σ_i [NLL_i + λ·E_x p_i], p_i = (f_i − f̄)·Σ_{j≠i} (f_j − f̄) with f̄ and the f_j held fixed.

    Deviations from f̄ add up to 0, so that p_i = −(f_i − f̄)·[f_i − f̄], the bracket held fixed. λ is (G,).
    """

    def losses(step: int, batch: Batch) -> Tensor:
        outputs, nll = member_risks(stack, likelihood, batch)
        f = stack.by_setting(likelihood.point(outputs))
        centred = f - f.detach().mean(1, keepdim=True)
        penalty = -(centred * centred.detach()).flatten(2).mean(2)
        return (nll + tradeoff[:, None] * penalty).sum(1)

    return losses


fit, fit_grid = ensemble_fitters(
    Config,
    lambda stack, likelihood, configs, seed: negative_correlation(stack, likelihood, per_setting(configs, "tradeoff", stack)),
    judge=ensemble_nll,
)
