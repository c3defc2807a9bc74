"""Deep SVDD (Ruff et al., 2018): all in-distribution images are drawn towards one point; classes are not looked at."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from offmap_bench.classifiers.training import BLOCK, Moment, TrainConfig, TrainingMethod, body_and_head

LEAST = 0.1
"""Coordinates of the centre are kept this far from 0, which a net without biases reaches too easily."""


@dataclass(frozen=True)
class Config(TrainConfig):
    """Numbers that the net gives."""

    width: int = 32


class Drawn(nn.Module):
    """The net without biases, with another last matrix, and the centre, (width,)."""

    def __init__(self, net: nn.Sequential, width: int) -> None:
        super().__init__()
        body, head = body_and_head(net)
        for module in body.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                module.register_parameter("bias", None)
        self.body = nn.Sequential(*body, nn.Linear(head.in_features, width, bias=False))
        self.centre: Tensor
        self.register_buffer("centre", torch.zeros(width, device=head.weight.device))

    def forward(self, x: Tensor) -> Tensor:
        """‖φ(x) − c‖²: (B, ...) -> (B,)."""
        return (self.body(x) - self.centre).square().sum(1)


@torch.no_grad()
def begin(net: Drawn, x: Tensor, y: Tensor, config: Config) -> None:
    """The centre is the mean of what the untrained net gives."""
    centre = torch.stack([net.body(part).sum(0) for part in x.split(BLOCK)]).sum(0) / len(x)
    away = centre.abs().clamp_min(LEAST)
    net.centre.copy_(torch.where(centre < 0, -away, away))


def loss(net: Drawn, x: Tensor, y: Tensor, config: Config, moment: Moment) -> Tensor:
    """The mean of ‖φ(x) − c‖²."""
    return net(x).mean()


@torch.no_grad()
def score(net: Drawn, x: Tensor, config: Config) -> Tensor:
    """‖φ(x) − c‖², (B,)."""
    return net(x)


TRAINING = TrainingMethod(Config, loss, score, lambda net, config: Drawn(net, config.width), begin=begin, classes=False)
