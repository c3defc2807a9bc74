"""The objective of variational Bayes, for the paper's Bayesian nets and mean-field competitors."""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import Tensor

from offmap.data import Batch
from offmap.errors import ConfigError
from offmap.likelihoods import Likelihood
from offmap.maxwent.objective import Objective, expected_nll
from offmap.model.forward import BatchedModel
from offmap.posterior.distribution import WeightDistribution, sum_per_member


def elbo(
    q: WeightDistribution,
    model: BatchedModel,
    likelihood: Likelihood,
    *,
    entropy_weight: float,
    prior_variance: float,
    prior_mean: Mapping[str, Tensor] | None = None,
    draws: int = 1,
    seed: int = 0,
) -> Objective:
    """The negative ELBO of variational Bayes, KL-weighted, per training row: E_q[NLL] + λ·(1/d)·KL(q ‖ N(m, σ²I)).

    The paper's appendix C maximises E_q[Σ log p] − 10·(n/d)·KL over the n training rows. Divided by n that is this with λ = 10,
    whatever n is; the Bayesian posterior itself is λ = d/n. `prior_mean` is m by name, (M, ...); None is 0.
    """

    def objective(step: int, batch: Batch) -> Tensor:
        scale = q.scale()
        risk = expected_nll(q, model, likelihood, batch, range(step * draws, (step + 1) * draws), scale, seed)
        return (risk + entropy_weight / q.dimension * kl(q, prior_variance, prior_mean, scale=scale)).sum()

    return objective


def kl(
    q: WeightDistribution,
    variance: float,
    mean: Mapping[str, Tensor] | None = None,
    *,
    scale: Mapping[str, Tensor] | None = None,
) -> Tensor:
    """KL(q ‖ N(m, σ²I)) per member in nats, (M,), in closed form for noise of entropy h and variance v per component:

        Σ_k [(v·φ_k² + (w̄_k − m_k)²) / 2σ² − log φ_k] + d·(½ log 2πσ² − h)

    V drops out: it turns neither the determinant nor the trace. For normal noise this is the KL of two Gaussians.

    >>> import torch
    >>> from offmap.posterior.noise import Normal
    >>> kl(WeightDistribution({"w": torch.ones(1, 2)}, initial_scale=1.0, noise=Normal()), 1.0)
    tensor([1.0000], grad_fn=<AddBackward0>)
    """
    entropy = q.noise.entropy()
    if entropy is None or q.parameterization is not None:
        raise ConfigError(
            "Expected noise with a density, such as uniform or normal, for a KL divergence in closed form, with the library's "
            "own w = w̄ + Vφz."
        )
    scale = q.scale() if scale is None else scale
    squares = {
        n: q.noise.variance() * s.square() + (q.mean[n] - (0.0 if mean is None else mean[n])).square() for n, s in scale.items()
    }
    logs = sum_per_member({n: s.log() for n, s in scale.items()})
    constant = q.dimension * (0.5 * math.log(2 * math.pi * variance) - entropy)
    return sum_per_member(squares) / (2 * variance) - logs + constant
