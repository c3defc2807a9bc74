"""What trainings of classifiers share: their config, the training loop, and the Scorer that results."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from offmap.data import Batch, Place, as_batches, check_finite
from offmap.data.batch import check_inputs
from offmap.detectors.msp import msp
from offmap.errors import ModelError
from offmap.likelihoods import Prediction
from offmap.likelihoods.classification import predictive_entropy
from offmap.maxwent.train import adam, minimize
from offmap.random import generator

BLOCK = 512
"""Images that are looked at together after training."""

Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class TrainConfig:
    """Adam over some epochs, its rate falling to 0 along a cosine; with `augment`, batches are mirrored and shifted."""

    epochs: int = 5
    lr: float = 1e-3
    batch_size: int = 128
    augment: bool = False


@dataclass(frozen=True)
class Moment:
    """One step of training: where randomness comes from, and the share of all steps that is done."""

    random: torch.Generator
    done: float = 0.0


Loss = Callable[[Any, Tensor, Tensor, Any, Moment], Tensor]
"""(net, images, classes, config, moment) -> scalar."""


@dataclass(frozen=True)
class TrainingMethod:
    """A training: `build` makes the module of a net that ends in a Linear; what it learns is all in its state.

    By default the loss is the cross-entropy, and the score 1 − the largest probability.
    `begin` sees the training data and the seed before the first step, `settle` the validation data after the last. Without
    `classes` the net gives no logits.
    """

    config: type[TrainConfig] = TrainConfig
    loss: Loss = lambda net, x, y, config, moment: F.cross_entropy(net(x), y)
    score: Callable[[Any, Tensor, Any], Tensor] = lambda net, x, config: msp(net(x))
    build: Callable[[nn.Sequential, Any], nn.Module] = lambda net, config: net
    begin: Callable[[Any, Tensor, Tensor, Any, int], None] = lambda net, x, y, config, seed: None
    settle: Callable[[Any, Tensor, Tensor, Any], None] = lambda net, x, y, config: None
    classes: bool = True


@dataclass(frozen=True, eq=False)
class Learned:
    """A trained classifier as a Scorer; higher scores are more OOD."""

    training: TrainingMethod
    net: nn.Module
    config: Any = field(default_factory=TrainConfig)

    @property
    def place(self) -> Place:
        """Where images belong."""
        return Place.of(self.net)

    @torch.no_grad()
    def score(self, x: Tensor) -> Tensor:
        """How OOD each image is, (B,)."""
        return torch.cat([self.training.score(self.net, part, self.config) for part in self._parts(x)])

    @torch.no_grad()
    def predict(self, x: Tensor) -> Prediction:
        """Probabilities and classes; neither without classes."""
        if not self.training.classes:
            return Prediction()
        probs = torch.cat([self.net(part) for part in self._parts(x)]).softmax(1)
        return Prediction(probs=probs, label=probs.argmax(1))

    def _parts(self, x: Tensor) -> tuple[Tensor, ...]:
        x = self.place.put(x)
        check_inputs(x, "the classifier")
        check_finite(x, None, "the inputs")
        return x.split(BLOCK)


@dataclass(frozen=True, eq=False)
class Ensemble:
    """A deep ensemble (Lakshminarayanan et al., 2017): members that were trained alone, from different starts."""

    members: Sequence[Learned]

    @property
    def place(self) -> Place:
        """Where images belong."""
        return self.members[0].place

    def score(self, x: Tensor) -> Tensor:
        """The entropy of the mean prediction, (B,)."""
        return predictive_entropy(self._probs(x))

    def predict(self, x: Tensor) -> Prediction:
        """The mean prediction."""
        probs = self._probs(x).mean(0)
        return Prediction(probs=probs, label=probs.argmax(1))

    def _probs(self, x: Tensor) -> Tensor:
        return torch.stack([probs for member in self.members if (probs := member.predict(x).probs) is not None])


class BodyAndHead(nn.Module):
    """A net in two parts: features, (B, D), and logits."""

    def __init__(self, net: nn.Sequential) -> None:
        super().__init__()
        self.body, self.head = body_and_head(net)

    def forward(self, x: Tensor) -> Tensor:
        """(B, ...) -> (B, C)."""
        return self.head(self.body(x))


def body_and_head(net: nn.Sequential) -> tuple[nn.Sequential, nn.Linear]:
    """What makes features, (B, D), and the last matrix, which makes logits of them."""
    layers = list(net) if isinstance(net, nn.Sequential) else []
    if not layers or not isinstance(layers[-1], nn.Linear):
        raise ModelError(f"Expected a torch.nn.Sequential whose last layer is a Linear, but got {type(net).__name__}.")
    return nn.Sequential(*layers[:-1]), layers[-1]


def train(method: TrainingMethod, net: nn.Module, data: Pair, valid: Pair, *, config: Any, seed: int = 0) -> None:
    """Train what `method.build` gave, in place, and leave it in evaluation mode. All that is random depends on `seed` alone."""
    rows = as_batches(data, Place.of(net), name="train", batch_size=config.batch_size)
    steps = config.epochs * math.ceil(len(data[1]) / config.batch_size)
    method.begin(net, *data, config, seed)

    def objective(step: int, batch: Batch) -> Tensor:
        moment = Moment(generator(seed, "classifier", step), step / steps)
        x, y = batch
        assert isinstance(x, Tensor)
        return method.loss(net, augment(x, moment.random) if config.augment else x, y, config, moment)

    net.train()
    optimizer = adam(net.parameters(), lr=config.lr)
    minimize(objective, optimizer, rows, steps=steps, seed=seed, schedule=lambda step: (1 + math.cos(math.pi * step / steps)) / 2)
    net.eval()
    method.settle(net, *valid, config)


def augment(x: Tensor, random: torch.Generator, most: int = 4) -> Tensor:
    """Each image mirrored or not; the batch shifted by up to `most` pixels, edges filled with zeros: (B, K, H, W) -> the same."""
    height, width = x.shape[2:]
    flips = torch.rand(len(x), 1, 1, 1, generator=random, device="cpu") < 0.5
    down, right = torch.randint(0, 2 * most + 1, (2,), generator=random, device="cpu").tolist()
    wide = F.pad(torch.where(flips.to(x.device), x.flip(3), x), (most,) * 4)
    return wide[:, :, down : down + height, right : right + width]
