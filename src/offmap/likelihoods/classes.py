"""Classification: one of C, or yes and no."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from offmap._types import IGNORED
from offmap.errors import ConfigError
from offmap.likelihoods.protocol import Prediction, aligned, averaged
from offmap.scores import uncertainty as scores


@dataclass(frozen=True)
class Categorical:
    """Classification: C logits on `axis` of a batch, 1 as in torch, (B, C, *positions), or −1 as in transformers, (B, T, C).

    Targets (B, *positions) of −100 are left out.

    >>> Categorical().nll(torch.zeros(1, 1, 4), torch.tensor([2]))
    tensor([[1.3863]])
    >>> Categorical(axis=-1).nll(torch.zeros(1, 1, 3, 4), torch.tensor([[2, -100, -100]]))
    tensor([[1.3863]])
    """

    axis: int = 1

    def __post_init__(self) -> None:
        if self.axis not in (1, -1):
            raise ConfigError(f"Expected `axis` to be 1 or -1, the class axis of a batch, but got {self.axis!r}.")

    def logits(self, outputs: Tensor) -> Tensor:
        """(P, B, C, *positions), wherever the model has its classes."""
        return outputs if self.axis == 1 else outputs.movedim(-1, 2)

    def nll(self, output: Tensor, y: Tensor) -> Tensor:
        """−log p(y), averaged over positions."""
        return _picked(self.logits(output).log_softmax(2), y)

    def prediction_nll(self, outputs: Tensor, y: Tensor) -> Tensor:
        """−log (1/P) Σ_p p(y | w_p), averaged over positions: (P, B, ...), (B, ...) -> (B,)."""
        mean = self.logits(outputs).log_softmax(2).logsumexp(0, keepdim=True) - math.log(outputs.shape[0])
        return _picked(mean, y)[0]

    def predictive(self, outputs: Tensor) -> Prediction:
        """The mean of the probabilities, (B, C, *positions)."""
        probs = self.logits(outputs).softmax(2).mean(0)
        return Prediction(probs=probs, label=probs.argmax(1))

    def score(self, outputs: Tensor) -> Tensor:
        """The entropy of the mean prediction, (B, *positions)."""
        return scores.predictive_entropy(self.logits(outputs).softmax(2))

    def epistemic(self, outputs: Tensor) -> Tensor:
        """The mutual information between prediction and draw, (B, *positions)."""
        return scores.mutual_information(self.logits(outputs).softmax(2))


def _picked(logs: Tensor, y: Tensor) -> Tensor:
    """Minus the log-probability of the targets: (P, B, C, *positions), (B, *positions) -> (P, B)."""
    y = aligned(y, logs.shape[1:2] + logs.shape[3:]).long()
    index = y.masked_fill(y == IGNORED, 0).expand(logs.shape[0], *y.shape)
    return averaged(-logs.gather(2, index.unsqueeze(2)).squeeze(2), y)


@dataclass(frozen=True)
class Bernoulli:
    """Yes or no: a logit per example, (B,) or (B, 1), or per position: (B, *positions), with or without an axis of size 1.

    Several labels of one example are positions as well. Probabilities are (B, 2, *positions), like a classifier's; targets of
    −100 are left out.

    >>> Bernoulli().nll(torch.zeros(1, 1), torch.tensor([1]))
    tensor([[0.6931]])
    """

    positions: int = 0

    def logit(self, output: Tensor) -> Tensor:
        """One number per position: (P, B, ...) -> (P, B, *positions)."""
        if output.ndim - 2 == self.positions:
            return output
        return output.squeeze(2 if output.shape[2] == 1 else -1)

    def logits(self, output: Tensor) -> Tensor:
        """Two-class logits, (P, B, 2, *positions)."""
        logit = self.logit(output)
        return torch.stack([torch.zeros_like(logit), logit], 2)

    def nll(self, output: Tensor, y: Tensor) -> Tensor:
        """log(1 + e^∓logit), averaged over positions."""
        logit = self.logit(output)
        y = aligned(y, logit.shape[1:])
        return averaged(F.softplus((1 - 2 * y.to(logit)) * logit), y)

    def prediction_nll(self, outputs: Tensor, y: Tensor) -> Tensor:
        """−log (1/P) Σ_p p(y | w_p), averaged over positions: (P, B, ...), (B, ...) -> (B,)."""
        return Categorical().prediction_nll(self.logits(outputs), y)

    def predictive(self, outputs: Tensor) -> Prediction:
        """The mean of the probabilities, (B, 2, *positions)."""
        return Categorical().predictive(self.logits(outputs))

    def score(self, outputs: Tensor) -> Tensor:
        """The entropy of the mean prediction, (B, *positions)."""
        return Categorical().score(self.logits(outputs))

    def epistemic(self, outputs: Tensor) -> Tensor:
        """The mutual information between prediction and draw, (B, *positions)."""
        return Categorical().epistemic(self.logits(outputs))
