"""φ without gradients: the geometry of the training activations, and one number c, found by `maxwent/search.py`.

With s the amplitude of a matrix' inputs along each direction, b its fan-in, and r_j the amplitude of its pre-activation j:

    φ_kj = c·r_j / (√b·a_k),  a_k = max(s_k, ε·max s)        bias: φ_j = c·r_j / √b        anything else: φ = c·rms(w̄)

so that every pre-activation gets noise of c times its own size, whatever the layer. c is the largest number whose validation
risk stays at or below τ.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from offmap.posterior.basis import Basis

FLOOR = 1e-3
"""Pre-activations and weights smaller than this share of their layer's size count as that share: dead units get no φ = 0."""


def unit_scale(mean: Mapping[str, Tensor], bases: Mapping[str, Basis], *, eps: float | Tensor) -> Callable[[str], Tensor]:
    """φ at c = 1 of a parameter by name, (M, ...); `eps` is ε, one or (M,)."""
    biases = {b.bias: b for b in bases.values() if b.bias is not None}

    def unit(name: str) -> Tensor:
        weight = mean[name]
        if name in bases:
            result = _matrix(weight, bases[name], eps)
        else:
            reach = _floored(biases[name].output_rms) / biases[name].view.fan_in ** 0.5 if name in biases else None
            fits = reach is not None and reach.numel() == weight.numel()
            result = reach.reshape(weight.shape) if fits and reach is not None else _plain(weight)
        return result.to(torch.promote_types(weight.dtype, torch.float32))

    return unit


def _matrix(weight: Tensor, basis: Basis, eps: float | Tensor) -> Tensor:
    """r_j / (√b·a_k) in the shape of the weight."""
    s = basis.input_rms
    largest = s.amax(-1, keepdim=True)
    # a block that met nothing but zeros has no scale to go by
    least = eps.view(-1, *[1] * (s.ndim - 1)).to(s) if isinstance(eps, Tensor) else eps
    a = torch.maximum(s, least * torch.where(largest > 0, largest, torch.ones_like(largest)))
    dtype = torch.promote_types(weight.dtype, torch.float32)
    spread = basis.view.per_row((basis.view.fan_in**0.5 * a).to(dtype))
    ratio = _floored(basis.output_rms).to(dtype).unsqueeze(2) / spread  # (M, out, D)
    return basis.view.back(ratio, weight.shape[1:])


def _plain(weight: Tensor) -> Tensor:
    size = weight.double().flatten(1).square().mean(1).sqrt().clamp_min(FLOOR)
    return size.view(-1, *[1] * (weight.ndim - 1)).expand_as(weight)


def _floored(reach: Tensor) -> Tensor:
    typical = reach.square().mean(1, keepdim=True).sqrt()
    return torch.maximum(reach, FLOOR * torch.where(typical > 0, typical, torch.ones_like(typical)))
