"""Classification: one of C classes, or yes and no, per example or position; and how undecided draws are."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from offmap._types import IGNORED
from offmap.errors import ConfigError, DataError
from offmap.likelihoods.likelihood import Likelihood, Prediction, align_targets, drop_axis, mean_over_positions


def predictive_entropy(probs: Tensor) -> Tensor:
    """Return the entropy of the mean prediction in nats, all the doubt there is: (P, B, C, ...) -> (B, ...)."""
    return torch.special.entr(probs.mean(0)).sum(1)


def mutual_information(probs: Tensor) -> Tensor:
    """Return (1/P) Σ_p Σ_c p_pc log(p_pc / p̄_c) − p_pc + p̄_c in nats, never below 0: (P, B, C, ...) -> (B, ...).

    Its terms are small when the draws nearly agree, whereas two entropies would drown a difference below 1e-7 in float32.
    """
    mean = probs.mean(0)
    gap = probs - mean
    safe = torch.where(mean > 0, mean, 1)  # a class that no draw believes in adds nothing
    ratio = gap / safe  # p / p̄ − 1
    # far below the mean, p / p̄ − 1 rounds to −1 and its log1p to −∞; the plain logarithm is exact there
    near = torch.special.xlog1py(probs, ratio.clamp_min(-0.5))
    terms = torch.where(ratio > -0.5, near, torch.special.xlogy(probs, probs / safe)) - gap
    return terms.sum(2).mean(0).clamp_min(0)


ENDS_IN = (
    "All outputs look like probabilities, and are taken for logits: pass the model without its final {}, or "
    "`output_fn=lambda out: {}`."
)


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
        return predictive_entropy(self.logits(outputs).softmax(2))

    def epistemic(self, outputs: Tensor) -> Tensor:
        """Return the mutual information between prediction and draw, (B, *positions)."""
        return mutual_information(self.logits(outputs).softmax(2))

    def baseline_nll(self, y: Tensor) -> Tensor:
        """Return −log of the frequency of every target that counts."""
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

    def doubt_outputs(self, outputs: Tensor, y: Tensor) -> str:
        """Return a sentence where the model seems to end in a softmax: all outputs are at least 0 and sum to one."""
        values = self.logits(outputs)
        probabilities = bool((values >= 0).all()) and bool(((values.sum(2) - 1).abs() < 1e-2).all())
        return ENDS_IN.format("softmax", "out.clamp_min(1e-30).log()") if probabilities else ""

    @classmethod
    def infer(cls, output: Tensor, y: Tensor) -> Categorical | None:
        """Return the likelihood whose class axis is the one that the targets lack: 1, else the last."""
        if y.is_floating_point() or output.ndim < 2:
            return None
        return next((cls(axis) for axis in (1, -1) if y.shape == drop_axis(output.shape, axis)), None)

    def fits(self, output: Tensor, y: Tensor) -> bool:
        """Return whether targets are whole numbers with one axis less than the outputs."""
        return not y.is_floating_point() and output.ndim >= 2 and y.ndim == output.ndim - 1


@dataclass(frozen=True)
class Bernoulli(Classification):
    """Binary classification: a logit per example, (B,) or (B, 1), or per position, (B, *positions).

    Several labels of one example are positions as well. Probabilities are (B, 2, *positions), like those of a classifier with
    two classes; targets of −100 are ignored.

    Args:
        positions: The number of axes of positions; the outputs may have a further axis of size 1.

    >>> Bernoulli().nll(torch.zeros(1, 1), torch.tensor([1]))
    tensor([[0.6931]])
    """

    positions: int = 0

    expects: ClassVar[str] = "targets (B,) or (B, 1) of 0 and 1 with outputs (B,) or (B, 1) of logits, or both (B, *positions)"

    def logit(self, outputs: Tensor) -> Tensor:
        """Return one logit per position: (P, B, ...) -> (P, B, *positions)."""
        if outputs.ndim - 2 == self.positions:
            return outputs
        return outputs.squeeze(2 if outputs.shape[2] == 1 else -1)

    def logits(self, outputs: Tensor) -> Tensor:
        """Return two-class logits, (P, B, 2, *positions)."""
        logit = self.logit(outputs)
        return torch.stack([torch.zeros_like(logit), logit], 2)

    def nll(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return log(1 + e^∓logit), averaged over positions: (P, B, ...), (B, ...) -> (P, B)."""
        logit = self.logit(outputs)
        y = align_targets(y, logit.shape[1:])
        return mean_over_positions(F.softplus((1 - 2 * y.to(logit)) * logit), y)

    def doubt_outputs(self, outputs: Tensor, y: Tensor) -> str:
        """Return a sentence where the model seems to end in a sigmoid: as probabilities, outputs explain the targets better."""
        if not bool(((outputs >= 0) & (outputs <= 1)).all()):
            return ""
        as_logits, as_probabilities = (self.nll(o, y).mean() for o in (outputs, outputs.logit(eps=1e-6)))
        return ENDS_IN.format("sigmoid", "out.logit(eps=1e-6)") if bool(as_probabilities < 0.9 * as_logits) else ""

    @classmethod
    def infer(cls, output: Tensor, y: Tensor) -> Bernoulli | None:
        """Return the likelihood with the positions of the targets; None if they do not fit."""
        if cls().fits(output, y):
            return cls()
        squeezed = [drop_axis(output.shape, axis) for axis in (1, -1) if output.ndim > 2 and output.shape[axis] == 1]
        return cls(y.ndim - 1) if y.ndim > 1 and y.shape in [output.shape, *squeezed] else None

    def fits(self, output: Tensor, y: Tensor) -> bool:
        """Return whether there is one target per logit."""
        if self.positions == 0:
            return max(output.ndim, y.ndim) <= 2 and output.numel() == output.shape[0] and y.numel() == y.shape[0]
        extra = output.ndim - y.ndim
        return y.ndim == self.positions + 1 and (extra == 0 or (extra == 1 and 1 in (output.shape[1], output.shape[-1])))


def _cross_entropy(log_probs: Tensor, y: Tensor) -> Tensor:
    """Return minus the log-probability of the targets: (P, B, C, *positions), (B, *positions) -> (P, B)."""
    y = align_targets(y, log_probs.shape[1:2] + log_probs.shape[3:]).long()
    index = y.masked_fill(y == IGNORED, 0).expand(log_probs.shape[0], *y.shape)
    return mean_over_positions(-log_probs.gather(2, index.unsqueeze(2)).squeeze(2), y)
