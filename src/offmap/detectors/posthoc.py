"""`detect`: the classic post-hoc detectors of a trained classifier, used like a guard."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from offmap import checks
from offmap._types import IGNORED, Data, Inputs
from offmap.data import Batches, Place, fork_rng, load_train_valid
from offmap.data.batch import take_rows
from offmap.data.image_spec import ImageSpec, warn_if_inaccurate
from offmap.detector import Calibration, Detector
from offmap.detectors.base import DETECTORS, FitData, ScoreFn, check_needs, find_method, fit_score
from offmap.detectors.classifier import Classifier, Features, find_features
from offmap.errors import DataError, ModelError
from offmap.likelihoods import Categorical, Prediction
from offmap.model.forward import LRUCache, OutputFn
from offmap.model.params import as_models

logger = logging.getLogger("offmap")

CACHE_NUMBERS = 1 << 24
"""Features and logits that detectors share for the last inputs (64 MB in float32)."""


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class PostHocDetector(Detector):
    """A classic detector of a trained classifier, as `offmap.detect` fits it; its predictions are the model's own.

    Args:
        method: The name of the detector.
        classifier: A private copy of the model, with its features.
        score_fn: From features and logits to scores (B,).
    """

    method: str
    classifier: Classifier
    score_fn: ScoreFn

    def _features(self, rows: Inputs) -> Features:
        return self.classifier.extract_features(rows)

    def _score(self, features: Features) -> Tensor:
        return count_nan_as_ood(self.score_fn(features))

    def _predict(self, features: Features) -> Prediction:
        probs = features.logits.softmax(1)
        return Prediction(probs=probs, label=probs.argmax(1))

    def _describe(self) -> str:
        return f"{self.method} of {type(self.classifier.model).__name__}"


def detect(
    model: nn.Module, train: Data, valid: Data | None = None, *, method: str = "energy", features: str | None = None,
    output_fn: OutputFn | None = None, target: str = "labels", false_alarms: float = 0.05, rows: int = 20_000,
    batch_size: int = 128, seed: int = 0, **options: Any,
) -> PostHocDetector:  # fmt: skip
    """Fit one of the classic post-hoc detectors to a trained classifier; `offmap.detectors.DETECTORS` lists them.

    Args:
        model: A trained classifier with outputs (B, C). It is copied and left as it is.
        train: Training rows with integer classes (n,).
        valid: Rows the model has not seen, which set the threshold. None: a tenth of `train`, with a warning.
        method: The name of the detector.
        features: Name of the layer whose output (or, of the layer that returns the logits, whose input) are the features. None:
            the rows that the last matrix multiplies.
        output_fn: Maps the model's output to the logits; by default a tensor, `.logits` or `[0]`.
        target: Key of the classes in batches that are one dict.
        false_alarms: Share of in-distribution rows that may be called OOD.
        rows: Use at most so many training rows, a random part of more.
        batch_size: Rows per forward pass.
        seed: Seed of the random parts.
        options: Options of the method, such as `k` of "knn".

    >>> x = torch.linspace(-1, 1, 40)[:, None]
    >>> model = nn.Linear(1, 2)
    >>> _ = model.load_state_dict({"weight": torch.tensor([[-1.0], [1.0]]), "bias": torch.zeros(2)})
    >>> detector = detect(model, (x, (x[:, 0] > 0).long()), (x, (x[:, 0] > 0).long()), method="mls")
    >>> detector.score(torch.tensor([[2.0], [0.0]])).tolist()
    [-2.0, -0.0]
    """
    find_method(method, options)
    data = prepare_fit_data(
        model, train, valid, features=features, output_fn=output_fn, target=target, rows=rows, batch_size=batch_size, seed=seed,
        cache=False,
    )  # fmt: skip
    return fit_detector(method, data, false_alarms=false_alarms, **options)


def detect_all(
    model: nn.Module, train: Data, valid: Data | None = None, *,
    methods: Iterable[str] | Mapping[str, Mapping[str, Any]] | None = None, features: str | None = None,
    output_fn: OutputFn | None = None, target: str = "labels", false_alarms: float = 0.05, rows: int = 20_000,
    batch_size: int = 128, seed: int = 0, cache: bool = True,
) -> dict[str, PostHocDetector]:  # fmt: skip
    """Fit several detectors with one pass over the data.

    Args:
        model: A trained classifier with outputs (B, C). It is copied and left as it is.
        train: Training rows with integer classes (n,).
        valid: Rows the model has not seen, which set the thresholds. None: a tenth of `train`, with a warning.
        methods: Names of detectors, or {name: options}. None: all that the model allows.
        features: Name of the layer whose output (or, of the layer that returns the logits, whose input) are the features. None:
            the rows that the last matrix multiplies.
        output_fn: Maps the model's output to the logits; by default a tensor, `.logits` or `[0]`.
        target: Key of the classes in batches that are one dict.
        false_alarms: Share of in-distribution rows that may be called OOD.
        rows: Use at most so many training rows, a random part of more.
        batch_size: Rows per forward pass.
        seed: Seed of the random parts.
        cache: Keep features and logits of the last inputs (64 MB), so that scoring them with every detector costs one pass.

    >>> x = torch.linspace(-1, 1, 40)[:, None]
    >>> data = x, (x[:, 0] > 0).long()
    >>> {name: len(d.score(x)) for name, d in detect_all(nn.Linear(1, 2), data, data, methods=["msp", "vim"]).items()}
    {'msp': 40, 'vim': 40}
    """
    names = [methods] if isinstance(methods, str) else methods or DETECTORS
    options = methods if isinstance(methods, Mapping) else {name: {} for name in names}
    chosen = {name: find_method(name, values)[0] for name, values in options.items()}
    data = prepare_fit_data(
        model, train, valid, features=features, output_fn=output_fn, target=target, rows=rows, batch_size=batch_size, seed=seed,
        cache=cache,
    )  # fmt: skip
    for name, method in chosen.items():
        try:
            check_needs(method, data.classifier)
        except ModelError as error:
            if methods is not None:
                raise
            logger.warning("The detector %r is left out. %s", name, error)
            options = {other: values for other, values in options.items() if other != name}
    return {name: fit_detector(name, data, false_alarms=false_alarms, **values) for name, values in options.items()}


def fit_detector(method: str, data: FitData, *, false_alarms: float = 0.05, **options: Any) -> PostHocDetector:
    """Fit one detector to data that several may share, with its threshold.

    Args:
        method: The name of the detector.
        data: What `prepare_fit_data` returns.
        false_alarms: Share of in-distribution rows that may be called OOD.
        options: Options of the method.
    """
    false_alarms = checks.fraction("false_alarms", false_alarms, example=0.05)
    with torch.inference_mode(False), fork_rng(data.seed):
        score_fn = fit_score(method, data, **options)
        calibration = Calibration(count_nan_as_ood(score_fn(data.valid)), false_alarms=false_alarms)
    calibration.warn_if_infinite(len(calibration.scores))
    return PostHocDetector(
        calibration=calibration, place=data.classifier.place, target=data.target, seed=data.seed, image_spec=data.image_spec,
        method=method, classifier=data.classifier, score_fn=score_fn,
    )  # fmt: skip


def prepare_fit_data(
    model: nn.Module, train: Data, valid: Data | None = None, *, features: str | None = None, output_fn: OutputFn | None = None,
    target: str = "labels", rows: int = 20_000, batch_size: int = 128, seed: int = 0, cache: bool = True,
) -> FitData:  # fmt: skip
    """Run training and validation rows through the classifier once, for any number of detectors; arguments are `detect_all`'s."""
    rows, batch_size = checks.integer("rows", rows, 1), checks.integer("batch_size", batch_size, 1)
    seed = checks.integer("seed", seed)
    if not isinstance(model, nn.Module):
        raise ModelError(f"Expected one trained torch.nn.Module, but got {type(model).__name__}.")
    with torch.inference_mode(False), fork_rng(seed):
        place = Place.of(as_models(model)[0])
        data, held = load_train_valid(train, valid, place, seed=seed, batch_size=batch_size, target=target)
        first, _ = next(iter(data))
        spec, memory = ImageSpec.of(first), LRUCache(CACHE_NUMBERS) if cache else None
        classifier = find_features(model, first, features=features, output_fn=output_fn, batch_size=batch_size, cache=memory)
        parts: list[tuple[Tensor, Tensor, Tensor]] = []
        for x, y in _take_batches(data, rows, seed):
            spec.check_shape(x, "the training inputs")
            spec = spec.widen(x)
            batch = replace(classifier, cache=None).extract_features(x)
            Categorical().check_targets(batch.logits, y, data.name)
            counted = y != IGNORED
            parts.append((batch.features[counted], batch.logits[counted], y[counted].long()))
        h, z, y = (torch.cat(column) for column in zip(*parts, strict=True))
        if not len(y):
            raise DataError(f"Expected classes in `{data.name}`, but every target is −100.")
        warn_if_inaccurate(spec, z, y)
        spec.check(held.inputs, "the validation inputs")
        valid_features = classifier.extract_features(held.inputs)
        Categorical().check_targets(valid_features.logits, held.targets, held.name)
    inputs = lambda: (x for x, _ in _take_batches(data, rows, seed))  # noqa: E731
    return FitData(classifier, h, z, y, valid_features, held.targets, inputs, spec, target, seed)


def _take_batches(data: Batches, rows: int, seed: int) -> Iterator[tuple[Inputs, Tensor]]:
    """Yield batches of at most so many rows in all; of more than that, a random part where the data allow it."""
    try:
        shuffle = data.rows > rows
    except TypeError:  # a stream of unknown length
        shuffle = False
    for x, y in data.shuffled(seed, 0) if shuffle else data:
        yield (x, y) if len(y) <= rows else (take_rows(x, slice(0, rows)), y[:rows])
        rows -= len(y)
        if rows <= 0:
            return


def count_nan_as_ood(scores: Tensor) -> Tensor:
    """Replace NaN by infinity: such inputs are infinitely OOD."""
    return scores.nan_to_num(nan=torch.inf, posinf=torch.inf)
