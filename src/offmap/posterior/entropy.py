"""What clipping leaves of the entropy: a law with a density inside the clip, and two points at its ends.

A component y = clip(φ·z, c) of noise with density f lies inside with probability p = P(|z| < t), t = c/φ, and at −c and c with
m = (1 − p)/2 each. Its entropy, with respect to length inside and to counting at the ends, has two parts:

    continuous   −∫_{|y|<c} f_y log f_y dy = p·log φ − ∫_{|z|<t} f log f dz        points   −2·m·log m

Components are independent and V has unit determinant, so the parts of a member are sums over its weights.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from offmap.errors import ConfigError
from offmap.posterior.distribution import WeightDistribution


@dataclass(frozen=True)
class Clipped:
    """Both parts of the entropy per member in nats, (M,) each, and the mean probability that a weight sits at its clip, (M,)."""

    continuous: Tensor
    points: Tensor
    share: Tensor


@torch.no_grad()
def clipped_entropy(q: WeightDistribution, clip: float | None) -> Clipped:
    """The entropy of the draws as they are with this clip; without one there are no points.

    >>> q = WeightDistribution({"w": torch.zeros(1, 2)}, initial_scale=1.0)
    >>> clipped_entropy(q, 3**0.5 / 2)  # half of the noise is cut off
    Clipped(continuous=tensor([1.2425]), points=tensor([1.3863]), share=tensor([0.5000]))
    """
    if q.parameterization is not None or q.noise.truncated_entropy(torch.ones(1, device="cpu")) is None:
        raise ConfigError(
            "Expected noise with a `truncated_entropy`, such as uniform or normal, for the entropy of clipped draws, with the "
            f"library's own w = w̄ + Vφz, but got {type(q.noise if q.parameterization is None else q.parameterization).__name__}."
        )
    if clip == 0:  # both ends are one point
        none = torch.zeros(q.members, device=next(iter(q.mean.values())).device)
        return Clipped(none, none, none + 1)
    parts: list[tuple[Tensor, Tensor, Tensor]] = []
    for scale in q.scale().values():
        phi = scale.double().flatten(1)
        truncated = q.noise.truncated_entropy((math.inf if clip is None else clip) / phi)
        assert truncated is not None
        p, inside = truncated
        m = (1 - p) / 2
        parts.append(((p * phi.log() + inside).sum(1), -2 * torch.xlogy(m, m).sum(1), (1 - p).sum(1)))
    continuous, points, outside = (torch.stack(part).sum(0) for part in zip(*parts, strict=True))
    return Clipped(continuous.float(), points.float(), (outside / q.dimension).float())
