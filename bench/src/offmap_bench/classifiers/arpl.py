"""Reciprocal points (ARPL, Chen et al., 2021): each class has a point for all that it is not, and lies far from it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from offmap_bench.classifiers.training import Moment, TrainConfig, TrainingMethod, body_and_head


@dataclass(frozen=True)
class Config(TrainConfig):
    """How much the bound on distances counts."""

    bound: float = 0.1


class Reciprocal(nn.Module):
    """Features, a point for every class, (C, D), and the radius that bounds them."""

    def __init__(self, net: nn.Sequential) -> None:
        super().__init__()
        self.body, head = body_and_head(net)
        self.points = nn.Parameter(0.1 * torch.randn_like(head.weight.detach()))
        self.radius = nn.Parameter(torch.zeros((), device=head.weight.device))

    def forward(self, x: Tensor) -> Tensor:
        """(B, ...) -> (B, C)."""
        features = self.body(x)
        return away(features, self.points) - features @ self.points.mT


def away(features: Tensor, points: Tensor) -> Tensor:
    """‖f − p_c‖² / D: (B, D), (C, D) -> (B, C).

    >>> away(torch.tensor([[1.0, 1.0]]), torch.tensor([[0.0, 1.0], [1.0, 3.0]]))
    tensor([[0.5000, 2.0000]])
    """
    return (features[:, None] - points).square().mean(2)


def bounded_loss(features: Tensor, points: Tensor, radius: Tensor, y: Tensor, bound: float) -> Tensor:
    """CE(d, y) + bound·mean max(d_e(f, p_y) − R, 0), d = d_e(f, p) − f·p, d_e the mean squared distance."""
    distance = away(features, points)
    own = distance.gather(1, y[:, None])[:, 0]
    return F.cross_entropy(distance - features @ points.mT, y) + bound * (own - radius).clamp_min(0).mean()


def loss(net: Reciprocal, x: Tensor, y: Tensor, config: Config, moment: Moment) -> Tensor:
    """The bounded loss of a batch."""
    return bounded_loss(net.body(x), net.points, net.radius, y, config.bound)


@torch.no_grad()
def score(net: Reciprocal, x: Tensor, config: Config) -> Tensor:
    """−max_c d_c: what is far from no reciprocal point belongs to no class, (B,)."""
    return -net(x).amax(1)


TRAINING = TrainingMethod(Config, loss, score, lambda net, config: Reciprocal(net))
