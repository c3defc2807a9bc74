"""Deep anti-regularized ensembles (DARE): weights grow as long as the training loss stays below a threshold.

The loss is that of de Mathelin et al. (2023): the mean of log w² is maximised while the batch's NLL is at most τ. Here it goes on
from trained nets, τ is what MaxWEnt allows (their validation NLL plus twice its standard error), and every member ends with its
last state whose validation NLL is at most τ. Nets that are not trained yet need a `max_risk`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from offmap.data import Batch, Rows
from offmap.integrations.nets import Losses, Stack, Training, member_risks, row_nll, train_stack
from offmap.likelihoods import Likelihood
from offmap.posterior.distribution import sum_per_member
from offmap.posterior.predictive import Sampled
from offmap_bench.methods.base import Nets, Problem, check_fields, fitter, per_setting

TINY = torch.finfo(torch.float32).eps
"""Added to squared weights under a logarithm."""


@dataclass(frozen=True)
class Config(Training):
    """Every member keeps its last state at or below τ."""

    tradeoff: float = 1.0  # λ on the mean of log w²
    max_risk: float | None = None  # τ; None: from the nets as they are given


@fitter(Config)
def fit(nets: Nets, problem: Problem, config: Config) -> Sampled:
    """Let copies of trained nets grow."""
    check_fields(config)
    valid, likelihood, runtime = problem.valid, problem.likelihood, problem.runtime
    stack = Stack.build(nets, valid.inputs, runtime)
    max_risk = member_max_risks(stack, likelihood, valid, config.max_risk)
    losses = anti_regularised(stack, likelihood, per_setting([config], "tradeoff", stack), max_risk)
    train_stack(
        stack, losses, problem.train, valid, likelihood=likelihood, config=config, ceiling=max_risk, seed=problem.seed,
        progress=runtime.progress,
    )  # fmt: skip
    return stack.predictives()[0]


def anti_regularised(stack: Stack, likelihood: Likelihood, tradeoff: Tensor, max_risk: Tensor) -> Losses:
    """Σ_i [NLL_i − λ·1[NLL_i ≤ τ_i]·(1/d) Σ_k log(w_ik² + ε)]. λ is (G,), τ (G·M,)."""
    dimension = sum(w[0].numel() for w in stack.weights.values())

    def losses(step: int, batch: Batch) -> Tensor:
        nll = member_risks(stack, likelihood, batch)[1]
        size = stack.by_setting(sum_per_member({n: (w.square() + TINY).log() for n, w in stack.weights.items()}))
        growing = (nll.detach() <= stack.by_setting(max_risk)).to(nll)
        return (nll - tradeoff[:, None] / dimension * growing * size).sum(1)

    return losses


def member_max_risks(stack: Stack, likelihood: Likelihood, valid: Rows, max_risk: float | None) -> Tensor:
    """τ of every member, (M,): the mean of its validation losses plus 2·std/√n, or the same number for all."""
    losses = row_nll(stack.model, stack.weights | stack.fixed, likelihood, valid)
    risk = losses.mean(1) + 2 * losses.std(1, correction=0) / math.sqrt(losses.shape[1])
    return risk if max_risk is None else torch.full_like(risk, max_risk)
