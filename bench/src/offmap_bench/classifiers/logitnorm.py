"""LogitNorm (Wei et al., 2022): the loss sees logits of one length, so that training cannot win by making them longer."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from offmap_bench.classifiers.training import Moment, TrainConfig, TrainingMethod


@dataclass(frozen=True)
class Config(TrainConfig):
    """The length that logits have in the loss is 1 / temperature."""

    temperature: float = 0.04


def normalize_logits(logits: Tensor, temperature: float) -> Tensor:
    """Logits of length 1/τ, z / (τ·‖z‖): (B, C) -> (B, C).

    >>> import torch
    >>> normalize_logits(torch.tensor([[3.0, 4.0]]), 0.5)
    tensor([[1.2000, 1.6000]])
    """
    return F.normalize(logits, dim=1, eps=1e-7) / temperature


def loss(net: nn.Module, x: Tensor, y: Tensor, config: Config, moment: Moment) -> Tensor:
    """The cross-entropy of normed logits. The score is of the plain ones, as the authors have it."""
    return F.cross_entropy(normalize_logits(net(x), config.temperature), y)


TRAINING = TrainingMethod(Config, loss)
