"""Mixup (Zhang et al., 2018; Thulasidasan et al., 2019): between two images, the answer lies between their classes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from offmap_bench.classifiers.training import Moment, TrainConfig, TrainingMethod


@dataclass(frozen=True)
class Config(TrainConfig):
    """Shares are drawn from Beta(α, α)."""

    alpha: float = 0.2


def mixed(x: Tensor, order: Tensor, share: float) -> Tensor:
    """Share·x + (1 − share)·x[order].

    >>> mixed(torch.tensor([[0.0], [4.0]]), torch.tensor([1, 0]), 0.75).flatten()
    tensor([1., 3.])
    """
    return share * x + (1 - share) * x[order]


def shared_loss(logits: Tensor, y: Tensor, order: Tensor, share: float) -> Tensor:
    """share·CE(z, y) + (1 − share)·CE(z, y[order])."""
    return share * F.cross_entropy(logits, y) + (1 - share) * F.cross_entropy(logits, y[order])


def beta(alpha: float, random: torch.Generator) -> float:
    """A draw of Beta(α, α): of uniform pairs, the first with U^(1/α) + V^(1/α) ≤ 1 (Jöhnk, 1964)."""
    while True:
        first, second = torch.rand(2, dtype=torch.float64, generator=random, device="cpu").pow(1 / alpha).tolist()
        if 0 < first + second <= 1:
            return first / (first + second)


def loss(net: nn.Module, x: Tensor, y: Tensor, config: Config, moment: Moment) -> Tensor:
    """Every image is mixed with another one of the batch, all by the same share."""
    order, share = torch.randperm(len(x), generator=moment.random, device="cpu").to(x.device), beta(config.alpha, moment.random)
    return shared_loss(net(mixed(x, order, share)), y, order, share)


TRAINING = TrainingMethod(Config, loss)
