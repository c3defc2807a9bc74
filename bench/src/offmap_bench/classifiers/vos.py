"""Virtual outliers (VOS, Du et al., 2022): features beyond the Gaussian of every class teach the energy where to end."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from offmap_bench.classifiers.training import BodyAndHead, Moment, TrainConfig, TrainingMethod


@dataclass(frozen=True)
class Config(TrainConfig):
    """Outliers count by `weight` from a share `start` of all steps on: of `candidates` draws of each class, the furthest."""

    weight: float = 0.1
    start: float = 0.4
    queue: int = 200
    candidates: int = 1_000


class Energetic(BodyAndHead):
    """A net with its last features of each class, (C, Q, D), and a logistic rule on its energy, which weighs classes."""

    def __init__(self, net: nn.Sequential, length: int) -> None:
        super().__init__(net)
        classes, width, device = self.head.out_features, self.head.in_features, self.head.weight.device
        self.shares = nn.Parameter(torch.zeros(classes, device=device))  # the logarithm of what a class counts in the energy
        self.slope, self.shift = nn.Parameter(torch.ones((), device=device)), nn.Parameter(torch.zeros((), device=device))
        self.queue: Tensor
        self.count: Tensor
        self.register_buffer("queue", torch.zeros(classes, length, width, device=device))
        self.register_buffer("count", torch.zeros(classes, dtype=torch.long, device=device))

    def energy(self, features: Tensor) -> Tensor:
        """−log Σ_c w_c exp z_c: (B, D) -> (B,)."""
        return -(self.head(features) + self.shares).logsumexp(1)

    @torch.no_grad()
    def enqueue(self, features: Tensor, y: Tensor) -> None:
        """The newest features of each class take the places of the oldest."""
        for c in y.unique().tolist():
            new = features[y == c][-self.queue.shape[1] :]
            places = (int(self.count[c]) + torch.arange(len(new), device=y.device)) % self.queue.shape[1]
            self.queue[c, places] = new
            self.count[c] += len(new)


def outliers(queue: Tensor, noise: Tensor) -> Tensor:
    """The least likely of S draws of every class: (C, Q, D), (C, S, D) -> (C, D).

    Draws are μ_c + L·n with L·Lᵀ = Σ, the covariance of all features around the means of their classes; the least likely one has
    the longest n.
    """
    mean = queue.mean(1)
    centred = (queue - mean[:, None]).flatten(0, 1)
    covariance = centred.mT @ centred / len(centred)
    ridge = (1e-4 * covariance.diagonal().mean() + 1e-8) * torch.eye(len(covariance), device=queue.device, dtype=queue.dtype)
    furthest = noise.square().sum(2).argmax(1)
    longest = noise[torch.arange(len(noise), device=noise.device), furthest]
    return mean + longest @ torch.linalg.cholesky(covariance + ridge).mT


def logistic_loss(id_values: Tensor, ood_values: Tensor) -> Tensor:
    """The logistic loss of numbers that should be negative for ID rows and positive for OOD rows."""
    return F.softplus(id_values).mean() + F.softplus(-ood_values).mean()


def loss(net: Energetic, x: Tensor, y: Tensor, config: Config, moment: Moment) -> Tensor:
    """CE and, once every class has a full queue and the time has come, weight·(the logistic loss of energies)."""
    features = net.body(x)
    total = F.cross_entropy(net.head(features), y)
    net.enqueue(features.detach(), y)
    if moment.done < config.start or int(net.count.min()) < config.queue:
        return total
    shape = (net.queue.shape[0], config.candidates, net.queue.shape[2])
    virtual = outliers(net.queue, torch.randn(shape, generator=moment.random, device="cpu").to(x))
    rule = logistic_loss(net.slope * net.energy(features) + net.shift, net.slope * net.energy(virtual) + net.shift)
    return total + config.weight * rule


@torch.no_grad()
def score(net: Energetic, x: Tensor, config: Config) -> Tensor:
    """The energy, (B,)."""
    return net.energy(net.body(x))


TRAINING = TrainingMethod(Config, loss, score, lambda net, config: Energetic(net, config.queue))
