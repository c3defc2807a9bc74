"""Anchored networks: every member is pulled towards random weights of its own, as if drawn from a prior.

Pearce et al. (2020), which the paper cites, as in the authors' code: anchors a ~ N(0, Σ²) and λ times the mean of (w − a)².
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from offmap._types import Weights
from offmap.data import Batches, Rows
from offmap.integrations.stack_training import Stack, Training, not_negative, per_setting, shared, train_stack
from offmap.likelihoods import Likelihood
from offmap.posterior.noise import NOISES, draw_noise
from offmap.posterior.predictive import Sampled
from offmap.posterior.protocol import Runtime
from offmap_bench.methods import ensemble_losses as ensembles


@dataclass(frozen=True)
class Config(Training):
    """Every member keeps its state of lowest validation NLL."""

    tradeoff: float = 1.0  # λ; the paper's grid: 0.1, 1, 10
    anchor_scale: float = 1.0  # Σ, the standard deviation of the anchors; the same grid


def fit(
    nets: nn.Module | Sequence[nn.Module],
    train: Batches,
    valid: Rows,
    *,
    likelihood: Likelihood,
    config: Config = Config(),
    seed: int = 0,
    runtime: Runtime = Runtime(),
) -> Sampled:
    """Train copies of the nets by maximum likelihood with a pull towards anchors."""
    return fit_grid(nets, train, valid, likelihood=likelihood, configs=[config], seed=seed, runtime=runtime)[0]


def fit_grid(
    nets: nn.Module | Sequence[nn.Module],
    train: Batches,
    valid: Rows,
    *,
    likelihood: Likelihood,
    configs: Sequence[Config],
    seed: int = 0,
    runtime: Runtime = Runtime(),
) -> list[Sampled]:
    """One ensemble for every setting, all in one stack; settings differ in `tradeoff` and `anchor_scale`."""
    training = shared(configs)
    not_negative(configs, "tradeoff", "anchor_scale")
    stack = Stack.build(nets, valid.inputs, runtime, settings=len(configs))
    losses = ensembles.anchored(stack, likelihood, per_setting(configs, "tradeoff", stack), anchors(stack, configs, seed))
    train_stack(stack, losses, train, valid, likelihood=likelihood, config=training, seed=seed, progress=runtime.progress)
    return stack.sampled()


def anchors(stack: Stack, configs: Sequence[Config], seed: int) -> Weights:
    """Σ·z for every setting, {name: (G·M, ...)}, the same normal z in all of them."""
    scale = per_setting(configs, "anchor_scale", stack).repeat_interleave(stack.members)
    first = {n: w.detach()[: stack.members] for n, w in stack.weights.items()}
    z = draw_noise(first, [0], seed=seed, stream="init", noise=NOISES["normal"])
    return {n: scale.view(-1, *[1] * (w.ndim - 2)) * w[:, 0].repeat(stack.settings, *[1] * (w.ndim - 2)) for n, w in z.items()}
