"""MC-dropout (Gal and Ghahramani, 2016) on the input of the last matrix: all draws cost one pass of the rest."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from offmap.likelihoods.classification import predictive_entropy
from offmap.random import generator
from offmap_bench.classifiers.training import BodyAndHead, Moment, TrainConfig, TrainingMethod


@dataclass(frozen=True)
class Config(TrainConfig):
    """The rate of dropping, and the number of thinned nets."""

    dropout: float = 0.5
    draws: int = 50


def masks(shape: tuple[int, ...], rate: float, random: torch.Generator) -> Tensor:
    """Zeros by `rate`, else 1 / (1 − rate)."""
    return (torch.rand(shape, generator=random, device="cpu") >= rate).float() / (1 - rate)


def loss(net: BodyAndHead, x: Tensor, y: Tensor, config: Config, moment: Moment) -> Tensor:
    """The cross-entropy with a mask for every row."""
    features = net.body(x)
    return F.cross_entropy(net.head(features * masks(tuple(features.shape), config.dropout, moment.random).to(x)), y)


@torch.no_grad()
def score(net: BodyAndHead, x: Tensor, config: Config) -> Tensor:
    """The entropy of the mean prediction of P thinned nets, each with one mask for all rows, (B,)."""
    features = net.body(x)
    thin = masks((config.draws, 1, features.shape[1]), config.dropout, generator(0, "dropout")).to(features)
    return predictive_entropy(net.head(features * thin).softmax(2))


TRAINING = TrainingMethod(Config, loss, score, lambda net, config: BodyAndHead(net))
