"""Classification: one of C classes per example or position."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from offmap._types import IGNORED
from offmap.errors import ConfigError, DataError
from offmap.likelihoods.protocol import Likelihood, Prediction, align_targets, mean_over_positions
from offmap.scores import uncertainty


class Classification(Likelihood):
    """What follows from class logits alone, whatever the model's output is; targets of −100 are ignored."""

    classifies: ClassVar[bool] = True

    @abstractmethod
    def logits(self, outputs: Tensor) -> Tensor:
        """Return the logits with the classes on axis 2, (P, B, C, *positions)."""

    def nll(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return −log p(y), averaged over positions: (P, B, ...), (B, ...) -> (P, B)."""
        return _cross_entropy(self.logits(outputs).log_softmax(2), y)

    def predictive_nll(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return −log (1/P) Σ_p p(y | w_p), averaged over positions: (P, B, ...), (B, ...) -> (B,)."""
        mean = self.logits(outputs).log_softmax(2).logsumexp(0, keepdim=True) - math.log(outputs.shape[0])
        return _cross_entropy(mean, y)[0]

    def predict(self, outputs: Tensor) -> Prediction:
        """Return the mean of the probabilities, (B, C, *positions), and its largest class."""
        probs = self.logits(outputs).softmax(2).mean(0)
        return Prediction(probs=probs, label=probs.argmax(1))

    def score(self, outputs: Tensor) -> Tensor:
        """Return the entropy of the mean prediction, (B, *positions)."""
        return uncertainty.predictive_entropy(self.logits(outputs).softmax(2))

    def epistemic(self, outputs: Tensor) -> Tensor:
        """Return the mutual information between prediction and draw, (B, *positions)."""
        return uncertainty.mutual_information(self.logits(outputs).softmax(2))

    def baseline_nll(self, y: Tensor) -> Tensor:
        """Return −log of the frequency of every target that counts.

        >>> Categorical().baseline_nll(torch.tensor([0, 0, 0, 1])).max()
        tensor(1.3863, dtype=torch.float64)
        """
        _, index, counts = torch.unique(y[y != IGNORED], return_inverse=True, return_counts=True)
        return -(counts.double() / counts.sum()).log()[index.flatten()]

    def check_targets(self, output: Tensor, y: Tensor, name: str) -> None:
        """Raise unless the targets (n, ...) that count are classes of a model with outputs (b, ...)."""
        super().check_targets(output, y, name)
        y = y[y != IGNORED]
        if y.numel() == 0:  # perhaps one batch of several
            return
        classes, low, high = self.logits(output[None, :1]).shape[2], float(y.min()), float(y.max())
        if low < 0 or high >= classes:
            raise DataError(
                f"Expected targets from 0 to {classes - 1} for {classes} classes, but `{name}` holds values from {low:g} to "
                f"{high:g}. Relabel the targets, or use a model with more outputs."
            )
        if bool((y != y.long()).any()):
            raise DataError(f"Expected whole numbers as classes, but `{name}` holds fractions. Round them, or fit a regression.")


@dataclass(frozen=True)
class Categorical(Classification):
    """Classification with C logits; targets (B, *positions) are class numbers, −100 is ignored.

    Args:
        axis: The class axis of a batch: 1 as in torch, (B, C, *positions), or −1 as in transformers, (B, T, C).

    >>> Categorical().nll(torch.zeros(1, 1, 4), torch.tensor([2]))
    tensor([[1.3863]])
    >>> Categorical(axis=-1).nll(torch.zeros(1, 1, 3, 4), torch.tensor([[2, -100, -100]]))
    tensor([[1.3863]])
    """

    axis: int = 1

    expects: ClassVar[str] = "integer targets (B, ...) with outputs (B, C, ...) of logits, or (B, ..., C)"

    def __post_init__(self) -> None:
        if self.axis not in (1, -1):
            raise ConfigError(f"Expected `axis` to be 1 or -1, the class axis of a batch, but got {self.axis!r}.")

    def logits(self, outputs: Tensor) -> Tensor:
        """Return the logits with the classes on axis 2, (P, B, C, *positions)."""
        return outputs if self.axis == 1 else outputs.movedim(-1, 2)

    @classmethod
    def infer(cls, output: Tensor, y: Tensor) -> Categorical | None:
        """Return the likelihood whose class axis is the one that the targets lack: 1, else the last."""
        if y.is_floating_point() or output.ndim < 2:
            return None
        return next((cls(axis) for axis in (1, -1) if y.shape == drop_axis(output.shape, axis)), None)

    def fits(self, output: Tensor, y: Tensor) -> bool:
        """Return whether targets are whole numbers with one axis less than the outputs."""
        return not y.is_floating_point() and output.ndim >= 2 and y.ndim == output.ndim - 1


def drop_axis(shape: torch.Size, axis: int) -> torch.Size:
    """Return the shape of a batch without one of its axes."""
    axis %= max(1, len(shape))
    return torch.Size((*shape[:axis], *shape[axis + 1 :]))


def _cross_entropy(log_probs: Tensor, y: Tensor) -> Tensor:
    """Return minus the log-probability of the targets: (P, B, C, *positions), (B, *positions) -> (P, B)."""
    y = align_targets(y, log_probs.shape[1:2] + log_probs.shape[3:]).long()
    index = y.masked_fill(y == IGNORED, 0).expand(log_probs.shape[0], *y.shape)
    return mean_over_positions(-log_probs.gather(2, index.unsqueeze(2)).squeeze(2), y)
