"""What detectors are fitted on: features, logits and classes of in-distribution data, seen in one pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from offmap._types import Inputs
from offmap.detectors.penultimate import Classifier, Head, Seen
from offmap.errors import ConfigError, DataError

Rule: TypeAlias = Callable[[Seen], Tensor]
"""From what a classifier makes of B inputs to B scores, higher = more OOD."""


@dataclass(frozen=True)
class FitData:
    """Training data as the classifier sees them, (n, D), (n, C), (n,), and validation data.

    `batches` goes over the training inputs once more, for detectors that look inside the net.
    """

    classifier: Classifier
    features: Tensor
    logits: Tensor
    labels: Tensor
    valid: Seen
    valid_labels: Tensor
    batches: Callable[[], Iterable[Inputs]] = tuple
    span: float = 1.0  # between the smallest and the largest number in the training inputs

    @property
    def head(self) -> Head:
        """The last matrix; who asks for it has been told that it is there."""
        assert self.classifier.source is not None
        assert self.classifier.source.head is not None
        return self.classifier.source.head

    @property
    def classes(self) -> int:
        """C."""
        return self.logits.shape[1]


def each_class(labels: Tensor, classes: int, whose: str) -> Tensor:
    """How many rows each class has, (C,), refused if one has none.

    >>> each_class(torch.tensor([0, 2, 2, 1]), 3, "training rows")
    tensor([1, 1, 2])
    """
    counts = torch.bincount(labels, minlength=classes)
    if bool((counts == 0).any()):
        absent = (counts == 0).nonzero().flatten().tolist()
        raise DataError(
            f"Expected {whose} of each of the {classes} classes, but classes {absent} have none. Pass more training data, or "
            "take a method that needs no rows of every class, such as 'energy' or 'knn'."
        )
    return counts


def number(name: str, value: Any, low: float, high: float, *, whole: bool = False) -> None:
    """Refuse an option that is no (whole) number between two bounds, both included."""
    kind = "a whole number" if whole else "a number"
    fits = isinstance(value, int if whole else int | float) and not isinstance(value, bool) and low <= value <= high
    if not fits:
        raise ConfigError(f"Expected `{name}` to be {kind} from {low:g} to {high:g}, but got {value!r}.")
