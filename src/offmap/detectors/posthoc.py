"""`detect`: the classic post-hoc detectors of a trained classifier, used like a guard, and the registry of their functions."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from offmap import checks
from offmap._types import IGNORED, Data, Inputs
from offmap.data import Batches, Place, fork_rng
from offmap.data.batch import take_rows
from offmap.data.batches import load_train_valid, mark_repeats, watch_repeats, without_augmentation
from offmap.data.image_spec import ImageSpec, warn_if_inaccurate
from offmap.detector import Calibration, Detector
from offmap.detectors.classifier import Activations, Classifier, Head, find_features
from offmap.errors import ConfigError, DataError, ModelError, nearest
from offmap.likelihoods import Categorical, Prediction
from offmap.model.forward import LRUCache, OutputFn
from offmap.model.params import as_models

logger: logging.Logger = logging.getLogger("offmap")

Needs: TypeAlias = Literal["logits", "features", "head"]
"""What a detector needs of the model: logits only, features too, or also the linear head that maps features to logits."""

BATCH_ARGUMENTS = ("inputs", "features", "logits", "head", "classifier")
"""Parameters of a score function that are filled in for every batch, by name; all others are options or fitted state."""

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class FitData:
    """What detectors are fitted on: the classifier's features and logits of training and validation rows."""

    classifier: Classifier
    features: Tensor  # (n, D) of the training rows, no column if none were found
    logits: Tensor  # (n, C) of the training rows
    labels: Tensor  # (n,) classes of the training rows
    valid: Activations
    valid_labels: Tensor
    batches: Callable[[], Iterable[Inputs]]  # the training inputs once more, for detectors that read other layers
    image_spec: ImageSpec  # shape and value range of the training inputs
    target: str = "labels"
    seed: int = 0
    seen: bool = False  # the validation rows are training rows of the model

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

    def __call__(self, classifier: Classifier, batch: Activations, state: Mapping[str, Any]) -> Tensor:
        """Score B rows, (B,); NaN is infinitely OOD."""
        filled = {**vars(batch), "classifier": classifier, "head": classifier.head}
        wanted = inspect.signature(self.score).parameters
        scores = self.score(**{name: filled[name] for name in BATCH_ARGUMENTS if name in wanted}, **state)
        return scores.nan_to_num(nan=torch.inf, posinf=torch.inf)

    def check_needs(self, classifier: Classifier) -> None:
        """Raise a ModelError that lists candidate layers unless the model has what the method needs."""
        layer = classifier.layer
        if self.needs != "logits" and layer is None:
            raise ModelError(
                f"Expected a model that ends in one matrix for {self.name!r}, but no matrix of {type(classifier.model).__name__} "
                f"gives its logits. {classifier.remedy}"
            )
        if self.needs == "head" and layer is not None and layer.head is None:
            others = [name for name, other in DETECTORS.items() if other.needs != "head"]
            raise ModelError(
                f"Expected `features` that one matrix turns into the logits for {self.name!r}, but those of `{layer.module}` do "
                f"not. Leave `features` out, name the layer before the last matrix, or take one of {others}."
            )


DETECTORS: dict[str, Method] = {}
"""All detectors by name."""


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


def find_method(name: str, options: Mapping[str, Any]) -> tuple[Method, dict[str, Any]]:
    """Return the method of that name, and all of its options with defaults filled in; refuse unknown names and bad values.

    >>> sorted(DETECTORS)[:4], find_method("knn", {})[1]
    (['ash', 'dice', 'energy', 'entropy'], {'k': None})
    """
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


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class PostHocDetector(Detector):
    """A classic detector of a trained classifier, as `offmap.detect` fits it; its predictions are the model's own.

    Args:
        method: The registered detector.
        classifier: A private copy of the model, with its features.
        state: Arguments of the score function: fitted tensors, or options.
    """

    method: Method
    classifier: Classifier
    state: Mapping[str, Any]

    def _features(self, rows: Inputs) -> Activations:
        return self.classifier.activations(rows)

    def _score(self, features: Activations) -> Tensor:
        return self.method(self.classifier, features, self.state)

    def _predict(self, features: Activations) -> Prediction:
        probs = features.logits.softmax(1)
        return Prediction(probs=probs, label=probs.argmax(1))

    def _describe(self) -> str:
        chosen = ", ".join(f"{name}={self.state[name]!r}" for name in self.method.options if name in self.state)
        return f"{self.method.name}{f' with {chosen}' if chosen else ''} of {type(self.classifier.model).__name__}"


def detect(
    model: nn.Module, train: Data, valid: Data | None = None, *, method: str = "energy", features: str | None = None,
    output_fn: OutputFn | None = None, target: str = "labels", false_alarms: float = 0.05, rows: int = 20_000,
    batch_size: int = 128, seed: int = 0, **options: Any,
) -> PostHocDetector:  # fmt: skip
    """Fit one of the classic post-hoc detectors to a trained classifier; `offmap.detectors.DETECTORS` lists them.

    Args:
        model: A trained classifier with outputs (B, C). It is copied and left as it is.
        train: Training rows with integer classes (n,).
        valid: Rows the model has not seen, which set the threshold. None: a tenth of `train`, uncalibrated, with a warning.
        method: The name of the detector.
        features: Name of the layer whose output (or, of the layer that returns the logits, whose input) are the features. None:
            the rows that the last matrix multiplies.
        output_fn: Maps the model's output to the logits; by default a tensor, `.logits` or `[0]`.
        target: Key of the classes in batches that are one dict.
        false_alarms: Share of in-distribution rows that may be called OOD.
        rows: Use at most so many training rows, a random part of more.
        batch_size: Rows per forward pass.
        seed: Seed of the random parts.
        options: Options of the method, such as `k` of "knn" (by default 1 % of the rows of the smallest class, from 1 to 50).

    >>> x = torch.linspace(-1, 1, 40)[:, None]
    >>> model = nn.Linear(1, 2)
    >>> _ = model.load_state_dict({"weight": torch.tensor([[-1.0], [1.0]]), "bias": torch.zeros(2)})
    >>> y = (x[:, 0] > 0).long()
    >>> detector = detect(model, (x[::2], y[::2]), (x[1::2], y[1::2]), method="mls")
    >>> detector.score(torch.tensor([[2.0], [0.0]])).tolist()
    [-2.0, -0.0]
    """
    method = checks.one_of("method", method, DETECTORS)
    return detect_all(
        model, train, valid, methods={method: options}, features=features,
        output_fn=output_fn, target=target, false_alarms=false_alarms, rows=rows, batch_size=batch_size, seed=seed, cache=False,
    )[method]  # fmt: skip


def detect_all(
    model: nn.Module, train: Data, valid: Data | None = None, *,
    methods: Iterable[str] | Mapping[str, Mapping[str, Any]] | None = None, false_alarms: float = 0.05, cache: bool = True,
    **settings: Any,
) -> dict[str, PostHocDetector]:  # fmt: skip
    """Fit several detectors with one pass over the data.

    Args:
        model: A trained classifier with outputs (B, C). It is copied and left as it is.
        train: Training rows with integer classes (n,).
        valid: Rows the model has not seen, which set the thresholds. None: a tenth of `train`, uncalibrated, with a warning.
        methods: Names of detectors, or {name: options}. None: all that the model allows.
        false_alarms: Share of in-distribution rows that may be called OOD.
        cache: Keep features and logits of the last inputs (64 MB), so that scoring them with every detector costs one pass.
        settings: `features`, `output_fn`, `target`, `rows`, `batch_size` and `seed`, as of `detect`.

    >>> x = torch.linspace(-1, 1, 40)[:, None]
    >>> y = (x[:, 0] > 0).long()
    >>> detectors = detect_all(nn.Linear(1, 2), (x[::2], y[::2]), (x[1::2], y[1::2]), methods=["msp", "vim"])
    >>> {name: len(detector.score(x)) for name, detector in detectors.items()}
    {'msp': 40, 'vim': 40}
    """
    names = [methods] if isinstance(methods, str) else methods or DETECTORS
    options = methods if isinstance(methods, Mapping) else {name: {} for name in names}
    chosen = {name: find_method(name, values)[0] for name, values in options.items()}
    data = prepare_fit_data(model, train, valid, cache=cache, **settings)
    detectors: dict[str, PostHocDetector] = {}
    for name, method in chosen.items():
        try:
            method.check_needs(data.classifier)
        except ModelError as error:
            if methods is not None:
                raise
            logger.warning("The detector %r is left out. %s", name, error)
        else:
            detectors[name] = fit_detector(name, data, false_alarms=false_alarms, **options[name])
    return detectors


def fit_detector(name: str, data: FitData, *, false_alarms: float = 0.05, **options: Any) -> PostHocDetector:
    """Fit one detector, with its threshold, to data that several may share (of `prepare_fit_data`)."""
    false_alarms = checks.fraction("false_alarms", false_alarms, example=0.05)
    method, values = find_method(name, options)
    method.check_needs(data.classifier)
    with torch.inference_mode(False), fork_rng(data.seed):
        state = method.fit(data, **values) if method.fit else values
        calibration = Calibration(method(data.classifier, data.valid, state), false_alarms=false_alarms, seen=data.seen)
    calibration.warn_if_infinite(len(calibration.scores))
    return PostHocDetector(
        calibration=calibration, place=Place.of(data.classifier.model), target=data.target, seed=data.seed,
        image_spec=data.image_spec, method=method, classifier=data.classifier, state=state,
    )  # fmt: skip


def prepare_fit_data(
    model: nn.Module, train: Data, valid: Data | None = None, *, features: str | None = None, output_fn: OutputFn | None = None,
    target: str = "labels", rows: int = 20_000, batch_size: int = 128, seed: int = 0, cache: bool = True,
) -> FitData:  # fmt: skip
    """Run training and validation rows through the classifier once, for any number of detectors; arguments are `detect`'s."""
    rows, batch_size = checks.integer("rows", rows, 1), checks.integer("batch_size", batch_size, 1)
    seed = checks.integer("seed", seed)
    if isinstance(model, list | tuple):
        raise ModelError(f"Expected one trained torch.nn.Module, but got {type(model).__name__}.")
    with torch.inference_mode(False), fork_rng(seed):
        (model,) = as_models(model)
        place = Place.of(model)
        data, held = load_train_valid(train, valid, place, seed=seed, batch_size=batch_size, target=target)
        data, augmented = without_augmentation(data, valid)
        if augmented:
            logger.warning(augmented)
        data = watch_repeats(data, held)
        first, _ = next(iter(data))
        spec, classifier = ImageSpec.of(first), find_features(model, first, features=features, output_fn=output_fn)
        classifier = replace(classifier, batch_size=batch_size)
        parts: list[tuple[Tensor, Tensor, Tensor]] = []
        for x, y in _take_batches(data, rows, seed):
            spec.check_shape(x, "the training inputs")
            spec = spec.widen(x)
            batch = classifier.activations(x)
            Categorical().check_targets(batch.logits, y, data.name)
            counted = y != IGNORED
            parts.append((batch.features[counted], batch.logits[counted], y[counted].long()))
        held, _ = mark_repeats(data, held)
        h, z, y = (torch.cat(column) for column in zip(*parts, strict=True))
        if not len(y):
            raise DataError(f"Expected classes in `{data.name}`, but every target is −100.")
        warn_if_inaccurate(spec, z, y)
        spec.check(held.inputs, "the validation inputs")
        classifier = replace(classifier, cache=LRUCache(1 << 24) if cache else None)  # 64 MB in float32
        valid_rows = classifier.activations(held.inputs)
        Categorical().check_targets(valid_rows.logits, held.targets, held.name)
    inputs = lambda: (x for x, _ in _take_batches(data, rows, seed))  # noqa: E731
    return FitData(classifier, h, z, y, valid_rows, held.targets, inputs, spec, target, seed, held.seen)


def _take_batches(data: Batches, rows: int, seed: int) -> Iterator[tuple[Inputs, Tensor]]:
    """Yield batches of at most so many rows in all; of more than that, a random part where the data allow it."""
    try:
        shuffle = data.rows > rows
    except TypeError:  # a stream of unknown length
        shuffle = False
    for x, y in data.iter_shuffled(seed, 0) if shuffle else data:
        yield (x, y) if len(y) <= rows else (take_rows(x, slice(0, rows)), y[:rows])
        rows -= len(y)
        if rows <= 0:
            return


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
