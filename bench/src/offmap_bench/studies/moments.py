"""The way of one pass that was not taken: moments of the weight distribution, propagated through a stack of Linear and ReLU.

For a layer with weights w̄ + V·(φ ⊙ z) that meets independent units of mean m and variance s:

    mean     w̄·m + b̄
    variance Σ_k φ_k² (V_kᵀm)² + Σ_i (Σ_k φ_k² V_ik² + w̄_i²) s_i + φ_b²

and a ReLU takes the moments of a normal variable. What units have in common beside m is left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

import offmap
from offmap.model.dense import plan
from offmap.posterior.predictive import Stochastic

Moments = tuple[Tensor, Tensor]


def disagreement(guard: offmap.Guard) -> Callable[[Tensor], Tensor]:
    """Log variance of the mean (regression) or of the logits, weighted by their probabilities: (B, D) -> (B,), in one pass."""
    assert isinstance(guard.predictive, Stochastic)
    layers = [_layer(guard.predictive, prefix, layer) for prefix, layer in plan(guard.predictive.model.net) or []]

    @torch.no_grad()
    def score(x: Tensor) -> Tensor:
        moments = x, torch.zeros_like(x)
        for layer in layers:
            moments = layer(*moments)
        mean, variance = moments
        told = variance[:, 0] if isinstance(guard.likelihood, offmap.Gaussian) else (mean.softmax(1) * variance).sum(1)
        return told.clamp_min(1e-30).log()

    return score


def _layer(predictive: Stochastic, prefix: str, layer: nn.Module) -> Callable[[Tensor, Tensor], Moments]:
    if isinstance(layer, nn.ReLU):
        return relu
    if not isinstance(layer, nn.Linear):
        return lambda mean, variance: (layer(mean), variance)
    q, name, bias = predictive.q, f"{prefix}weight", f"{prefix}bias"
    scale, law = q.scale(), q.noise.variance()  # pyright: ignore[reportAttributeAccessIssue]
    weight, wide, basis = q.mean[name][0], scale[name][0].square() * law, q.rotation[name][0, 0, 0]
    own = (wide @ basis.mT.square() + weight.square()).mT.contiguous().detach()
    wide, turned = wide.mT.contiguous().detach(), basis.contiguous()
    centre, spread = q.mean[bias][0].detach(), (scale[bias][0].square() * law).detach()
    weight = weight.mT.contiguous().detach()

    def linear(mean: Tensor, variance: Tensor) -> Moments:
        return mean @ weight + centre, (mean @ turned).square() @ wide + variance @ own + spread

    return linear


def relu(mean: Tensor, variance: Tensor) -> Moments:
    """Moments of max(0, v) for a normal v."""
    deviation = variance.clamp_min(1e-30).sqrt()
    ratio = (mean / deviation).clamp(-10, 10)  # beyond, exp leaves what float32 does quickly
    below = 0.5 * (1 + torch.erf(ratio / math.sqrt(2)))
    density = torch.exp(-0.5 * ratio.square()) / math.sqrt(2 * math.pi)
    first = mean * below + deviation * density
    second = (mean.square() + variance) * below + mean * deviation * density
    return first, (second - first.square()).clamp_min(0)
