"""A branch for confidence (DeVries and Taylor, 2018): the net may ask for hints, and pays for them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from offmap_bench.classifiers.training import BodyAndHead, Moment, TrainConfig, TrainingMethod


@dataclass(frozen=True)
class Config(TrainConfig):
    """The mean of −log c is held near `budget` by a price that starts at `price`."""

    budget: float = 0.3
    price: float = 0.1


class Branched(BodyAndHead):
    """Features with two heads: logits, and the logit of the confidence c."""

    def __init__(self, net: nn.Sequential, price: float) -> None:
        super().__init__(net)
        self.branch = nn.Linear(self.head.in_features, 1)
        self.price: Tensor
        self.register_buffer("price", torch.tensor(price, device=self.head.weight.device))

    def both(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Logits (B, C), and those of the confidence, (B,)."""
        features = self.body(x)
        return self.head(features), self.branch(features)[:, 0]


def hinted_loss(logits: Tensor, confidence: Tensor, y: Tensor, hinted: Tensor, price: Tensor) -> tuple[Tensor, Tensor]:
    """−log p′_y + price·(−log c), p′ = c·p + (1 − c)·onehot(y) for rows that are `hinted`, else p; and the mean of −log c."""
    c, p = confidence.sigmoid(), logits.softmax(1).gather(1, y[:, None])[:, 0]
    asked = F.softplus(-confidence).mean()
    given = torch.where(hinted, c * p + (1 - c), p)
    return -given.clamp_min(1e-12).log().mean() + price * asked, asked


def loss(net: Branched, x: Tensor, y: Tensor, config: Config, moment: Moment) -> Tensor:
    """Half of the rows may ask for hints; the price rises by a hundredth where they cost more than the budget, else it falls."""
    hinted = (torch.rand(len(x), generator=moment.random, device="cpu") < 0.5).to(x.device)
    total, asked = hinted_loss(*net.both(x), y, hinted, net.price.clone())
    net.price.mul_(1 / 1.01 if float(asked.detach()) < config.budget else 1 / 0.99)
    return total


@torch.no_grad()
def score(net: Branched, x: Tensor, config: Config) -> Tensor:
    """The logit of 1 − c, (B,)."""
    return -net.both(x)[1]


TRAINING = TrainingMethod(Config, loss, score, lambda net, config: Branched(net, config.price))
