"""The registry of detectors: a pure score function, an optional fit, needs of the model, and the range of each option."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypeVar

import torch
from torch import Tensor

from offmap import checks
from offmap._types import Inputs
from offmap.data.image_spec import ImageSpec
from offmap.detectors.classifier import Classifier, Features, Head
from offmap.errors import ConfigError, DataError, ModelError, nearest

ScoreFn: TypeAlias = Callable[[Features], Tensor]
"""From what a classifier computes for B inputs to B scores, higher = more OOD."""

Needs: TypeAlias = Literal["logits", "features", "head"]
"""What a detector needs of the model: logits only, features too, or also the linear head that maps features to logits."""

BATCH_ARGUMENTS = ("inputs", "features", "logits", "head", "classifier")
"""Parameters of a score function that are filled in for every batch, by name; all others are options or fitted state."""

UNIT_RANGE = ImageSpec(None, 0.0, 1.0, integral=False)


@dataclass(frozen=True)
class FitData:
    """What detectors are fitted on: the classifier's features and logits of training and validation rows.

    Attributes:
        features: (n, D) of the training rows, no column if none were found.
        logits: (n, C) of the training rows.
        labels: (n,) classes of the training rows.
        valid: Features and logits of the validation rows.
        valid_labels: Classes of the validation rows.
        batches: Iterates over the training inputs once more, for detectors that read other layers.
        image_spec: Shape and value range of the training inputs.
    """

    classifier: Classifier
    features: Tensor
    logits: Tensor
    labels: Tensor
    valid: Features
    valid_labels: Tensor
    batches: Callable[[], Iterable[Inputs]] = tuple
    image_spec: ImageSpec = UNIT_RANGE
    target: str = "labels"
    seed: int = 0

    @property
    def head(self) -> Head:
        """The final linear layer. Assumes that `needs="head"` was checked."""
        assert self.classifier.head is not None
        return self.classifier.head

    @property
    def classes(self) -> int:
        """The number of classes C."""
        return self.logits.shape[1]


@dataclass(frozen=True)
class Method:
    """A registered detector: `score(**batch arguments, **state)`, where `state` are its options, or what `fit` returns."""

    name: str
    score: Callable[..., Tensor]
    fit: Callable[..., Mapping[str, Any]] | None
    needs: Needs
    ranges: Mapping[str, tuple[float, float]]

    @property
    def options(self) -> dict[str, Any]:
        """Options with their default values."""
        parameters = inspect.signature(self.fit or self.score).parameters.values()
        return {p.name: p.default for p in parameters if p.default is not p.empty}


DETECTORS: dict[str, Method] = {}
"""All detectors by name."""

Function = TypeVar("Function", bound=Callable[..., Any])


def register(
    name: str, *, score: Callable[..., Tensor] | None = None, needs: Needs | None = None, **ranges: tuple[float, float]
) -> Callable[[Function], Function]:
    """Register the decorated function as the detector `name` of `offmap.detect`.

    Without `score`, the function is the score itself and has nothing to learn; its parameters with defaults are options. With
    `score`, it is the fit: it takes FitData and options, and returns the arguments of `score` that are not filled in per batch.

    Args:
        name: The `method` of `offmap.detect`.
        score: Pure function of `inputs`, `features` (B, D), `logits` (B, C), `head` or `classifier`, and of fitted state -> (B,).
        needs: What the model must have; by default it follows from the score's parameters.
        ranges: Smallest and largest value of each numeric option; the type of its default decides if it must be an integer.

    >>> @register("margin_doctest", scale=(0, 10))
    ... def margin(logits, scale=1.0):
    ...     return -scale * logits.topk(2).values.diff().abs().squeeze(1)
    >>> DETECTORS.pop("margin_doctest").options
    {'scale': 1.0}
    """

    def add(function: Function) -> Function:
        if name in DETECTORS:
            raise ConfigError(f"Expected a new name for a detector, but {name!r} is registered already.")
        parameters = inspect.signature(score or function).parameters
        least: Needs = "head" if "head" in parameters else "features" if "features" in parameters else "logits"
        DETECTORS[name] = Method(name, score or function, function if score else None, needs or least, ranges)
        return function

    return add


@dataclass(frozen=True)
class FittedScore:
    """A ScoreFn: the score function of a method with its fitted state."""

    method: Method
    classifier: Classifier
    state: Mapping[str, Any]

    def __call__(self, batch: Features) -> Tensor:
        """Score B rows: (B,)."""
        filled = {**vars(batch), "classifier": self.classifier, "head": self.classifier.head}
        wanted = inspect.signature(self.method.score).parameters
        return self.method.score(**{name: filled[name] for name in BATCH_ARGUMENTS if name in wanted}, **self.state)


def find_method(name: str, options: Mapping[str, Any]) -> tuple[Method, dict[str, Any]]:
    """Return the method of that name, and all of its options with defaults filled in; refuse unknown names and bad values."""
    method = DETECTORS[checks.one_of("method", name, DETECTORS)]
    defaults = method.options
    for option in options:
        if option not in defaults:
            raise ConfigError(f"Expected options of {name!r} to be {nearest(option, defaults)}, but got {option!r}.")
    values = defaults | dict(options)
    for option, (low, high) in method.ranges.items():
        check = checks.integer if isinstance(defaults[option], int) else checks.number
        check(option, values[option], low, high)
    return method, values


def check_needs(method: Method, classifier: Classifier) -> None:
    """Raise a ModelError that lists candidate layers unless the model has what the method needs."""
    layer = classifier.layer
    if method.needs != "logits" and layer is None:
        raise ModelError(
            f"Expected a model that ends in one matrix for {method.name!r}, but no matrix of {type(classifier.model).__name__} "
            f"gives its logits. {classifier.remedy}"
        )
    if method.needs == "head" and layer is not None and layer.head is None:
        others = [name for name, other in DETECTORS.items() if other.needs != "head"]
        raise ModelError(
            f"Expected features from which one matrix makes the logits for {method.name!r}, but those of `{layer.module}` are "
            f"none. Leave `features` out, name the layer before the last matrix, or take one of {others}."
        )


def fit_score(name: str, data: FitData, **options: Any) -> FittedScore:
    """Fit the detector of that name.

    >>> sorted(DETECTORS)[:4], DETECTORS["knn"].options
    (['ash', 'dice', 'energy', 'entropy'], {'k': 50})
    """
    method, values = find_method(name, options)
    check_needs(method, data.classifier)
    return FittedScore(method, data.classifier, method.fit(data, **values) if method.fit else values)


def count_classes(labels: Tensor, classes: int, rows: str) -> Tensor:
    """Count the rows of each class, (n,) -> (C,), and refuse a class without any; `rows` names them in the error.

    >>> count_classes(torch.tensor([0, 2, 2, 1]), 3, "training rows")
    tensor([1, 1, 2])
    """
    counts = torch.bincount(labels, minlength=classes)
    if bool((counts == 0).any()):
        absent = (counts == 0).nonzero().flatten().tolist()
        raise DataError(
            f"Expected {rows} of each of the {classes} classes, but classes {absent} have none. Pass more training data, or "
            "take a method that needs no rows of every class, such as 'energy' or 'knn'."
        )
    return counts


def class_means(rows: Tensor, labels: Tensor, counts: Tensor) -> Tensor:
    """Average the rows of each class in float64: (n, D), (n,), (C,) -> (C, D)."""
    sums = rows.new_zeros(len(counts), rows.shape[1], dtype=torch.float64)
    return sums.index_add_(0, labels, rows.double()) / counts[:, None]
