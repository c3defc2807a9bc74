"""Generalised ODIN (Hsu et al., 2020): logits are a quotient, z_c = h_c(x) / g(x), and g learns how far the domain reaches."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from offmap_bench.classifiers.training import BLOCK, Moment, TrainConfig, TrainingMethod, body_and_head

STEPS = (0.0, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08)
"""Steps of the input that are tried, for pixels from 0 to 1."""


class Quotient(nn.Module):
    """h is the cosine between features and a direction for every class, g a sigmoid of one number, standardised."""

    def __init__(self, net: nn.Sequential) -> None:
        super().__init__()
        self.body, head = body_and_head(net)
        self.direction = nn.Parameter(head.weight.detach().clone())
        self.domain = nn.Sequential(nn.Linear(head.in_features, 1), nn.BatchNorm1d(1), nn.Sigmoid())
        self.step: Tensor
        self.register_buffer("step", torch.zeros((), device=head.weight.device))

    def forward(self, x: Tensor) -> Tensor:
        """(B, ...) -> (B, C)."""
        features = self.body(x)
        return cosine(features, self.direction) / self.domain(features)

    def nearest(self, x: Tensor) -> Tensor:
        """max_c h_c(x), (B,)."""
        return cosine(self.body(x), self.direction).amax(1)


def cosine(features: Tensor, direction: Tensor) -> Tensor:
    """(B, D), (C, D) -> (B, C)."""
    return F.normalize(features, dim=1) @ F.normalize(direction, dim=1).mT


def moved(net: Quotient, x: Tensor, step: float) -> Tensor:
    """max_c h_c at x + step·sign ∇_x max_c h_c, (B,)."""
    with torch.inference_mode(False), torch.enable_grad():
        near = x.clone().requires_grad_(True)
        best = net.nearest(near)
        (slope,) = torch.autograd.grad(best.sum(), near)
    with torch.no_grad():
        return net.nearest(near.detach() + step * slope.sign()) if step else best.detach()


def settle(net: Quotient, x: Tensor, y: Tensor, config: TrainConfig) -> None:
    """The step that makes validation images most in-distribution, as the authors choose it without OOD ones."""
    gains = [torch.cat([moved(net, part, step) for part in x.split(BLOCK)]).mean() for step in STEPS]
    net.step.fill_(STEPS[int(torch.stack(gains).argmax())])


def loss(net: Quotient, x: Tensor, y: Tensor, config: TrainConfig, moment: Moment) -> Tensor:
    """The cross-entropy of the quotients."""
    return F.cross_entropy(net(x), y)


def score(net: Quotient, x: Tensor, config: TrainConfig) -> Tensor:
    """−max_c h_c after the step, (B,)."""
    return -moved(net, x, float(net.step))


TRAINING = TrainingMethod(loss=loss, score=score, build=lambda net, config: Quotient(net), settle=settle)
