"""MC-dropout (Gal and Ghahramani, 2016) on what the last matrix meets: all draws cost one pass of the rest."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from offmap.random import generator
from offmap.scores.uncertainty import predictive_entropy
from offmap_bench.classifiers.training import Moment, TrainConfig, TrainingMethod, body_and_head


@dataclass(frozen=True)
class Config(TrainConfig):
    """The rate of dropping, and how many thinned nets are asked."""

    dropout: float = 0.5
    draws: int = 50


class Thinned(nn.Module):
    """Features and head; without masks the plain net, whose prediction is the mean one."""

    def __init__(self, net: nn.Sequential) -> None:
        super().__init__()
        self.body, self.head = body_and_head(net)

    def forward(self, x: Tensor) -> Tensor:
        """(B, ...) -> (B, C)."""
        return self.head(self.body(x))


def masks(shape: tuple[int, ...], lr: float, random: torch.Generator) -> Tensor:
    """Zeros by `rate`, else 1 / (1 − rate)."""
    return (torch.rand(shape, generator=random, device="cpu") >= lr).float() / (1 - lr)


def loss(net: Thinned, x: Tensor, y: Tensor, config: Config, moment: Moment) -> Tensor:
    """The cross-entropy with a mask for every row."""
    features = net.body(x)
    return F.cross_entropy(net.head(features * masks(tuple(features.shape), config.dropout, moment.random).to(x)), y)


@torch.no_grad()
def score(net: Thinned, x: Tensor, config: Config) -> Tensor:
    """The entropy of the mean prediction of P thinned nets, each with one mask for all rows, (B,)."""
    features = net.body(x)
    thin = masks((config.draws, 1, features.shape[1]), config.dropout, generator(0, "dropout")).to(features)
    return predictive_entropy(net.head(features * thin).softmax(2))


WAY = TrainingMethod(Config, loss, score, lambda net, config: Thinned(net))
