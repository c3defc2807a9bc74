"""OpenGAN (Kong and Ramanan, 2021): a discriminator tells features of a trained classifier from generated ones.

The authors choose among its checkpoints by OOD images; nothing here may see any, so that the last one counts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from offmap_bench.classifiers.training import BLOCK, BodyAndHead, Moment, TrainConfig, TrainingMethod, train


@dataclass(frozen=True)
class Config(TrainConfig):
    """The classifier is trained as any other, at `classifier_lr`; then the two nets on its features, for as many epochs."""

    lr: float = 1e-4
    classifier_lr: float = 1e-3
    noise: int = 100
    width: int = 64


class Adversaries(BodyAndHead):
    """A classifier with a generator of its features, noise -> (B, D), and a discriminator, whose logit is high for real ones.

    Both see features in units of their root mean square over the training data, `unit`.
    """

    unit: Tensor

    def __init__(self, net: nn.Sequential, noise: int, width: int) -> None:
        super().__init__(net)
        features = self.head.in_features
        self.generator = nn.Sequential(
            nn.Linear(noise, 2 * width), nn.BatchNorm1d(2 * width), nn.ReLU(),
            nn.Linear(2 * width, 4 * width), nn.BatchNorm1d(4 * width), nn.ReLU(),
            nn.Linear(4 * width, features), nn.ReLU(),
        )  # fmt: skip
        self.discriminator = nn.Sequential(
            nn.Linear(features, 4 * width), nn.LeakyReLU(0.2), nn.Linear(4 * width, 2 * width), nn.LeakyReLU(0.2),
            nn.Linear(2 * width, 1),
        )  # fmt: skip
        self.register_buffer("unit", torch.ones((), device=self.head.weight.device))

    def features(self, x: Tensor) -> Tensor:
        """(B, ...) -> (B, D)."""
        return self.body(x) / self.unit


def train_classifier(net: Adversaries, x: Tensor, y: Tensor, config: Config, seed: int) -> None:
    """Train body and head by the cross-entropy, then freeze them and measure the features."""
    train(TrainingMethod(), net, (x, y), (x[:0], y[:0]), config=replace(config, lr=config.classifier_lr), seed=seed)
    for part in (net.body, net.head):
        part.requires_grad_(False)
    with torch.no_grad():
        net.unit.copy_(torch.stack([net.body(part).square().mean(1).sum() for part in x.split(BLOCK)]).sum().div(len(x)).sqrt())


def adversarial_loss(net: Adversaries, real: Tensor, noise: Tensor) -> Tensor:
    """−log D(h) − log(1 − D(G(z))), which teaches D alone, and −log D(G(z)), which teaches G alone; means over rows."""
    fake = net.generator(noise)
    teaches_d = F.softplus(-net.discriminator(real)).mean() + F.softplus(net.discriminator(fake.detach())).mean()
    frozen = {name: parameter.detach() for name, parameter in net.discriminator.named_parameters()}
    return teaches_d + F.softplus(-functional_call(net.discriminator, frozen, (fake,))).mean()


def opengan_loss(net: Adversaries, x: Tensor, y: Tensor, config: Config, moment: Moment) -> Tensor:
    """One step of both: the classes are not looked at any more."""
    net.body.eval()  # its batch norms keep their statistics
    noise = torch.randn(len(x), config.noise, generator=moment.random, device="cpu").to(x)
    return adversarial_loss(net, net.features(x).detach(), noise)


METHOD = TrainingMethod(
    Config, opengan_loss, lambda net, x, config: -net.discriminator(net.features(x))[:, 0],
    lambda net, config: Adversaries(net, config.noise, config.width), begin=train_classifier,
)  # fmt: skip
