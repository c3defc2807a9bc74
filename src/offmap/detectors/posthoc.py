"""`detect`: the classic post-hoc detectors of a trained classifier, with the same small face as a guard."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from offmap import checks, conformal
from offmap._torch_private import tree_map
from offmap._types import IGNORED, Data, Inputs
from offmap.data import (  # fmt: skip
    Batches,
    Place,
    Rows,
    batches,
    check_finite,
    check_inputs,
    gather,
    given,
    is_mapping,
    own_order,
    split,
    unlabelled,
)
from offmap.data.image_spec import ImageSpec, warn_if_inaccurate
from offmap.data.inputs import mark_shared, rows_of, take_rows
from offmap.detector import Result, concat_padded, concat_results, merge_parts
from offmap.detectors import catalog
from offmap.detectors.known import FitData, Rule, number
from offmap.detectors.penultimate import Classifier, Seen, classifier
from offmap.errors import DataError, ModelError
from offmap.fit import VALID_SHARE
from offmap.likelihoods import Categorical, Prediction
from offmap.model.cache import LRUCache
from offmap.model.forward import OutputFn
from offmap.model.members import as_models

logger = logging.getLogger("offmap")

BLOCK = 4096
"""Rows whose features are held at once while scoring."""


@dataclass(frozen=True, eq=False)
class PostHocDetector:
    """A frozen Scorer with a threshold. Methods take what a guard's take; higher scores are more OOD.

    `calibration` (n,) are the scores of in-distribution data; `threshold` their conformal quantile at 1 − `false_alarms`.
    """

    method: str
    classifier: Classifier
    rule: Rule
    form: ImageSpec
    calibration: Tensor
    false_alarms: float = 0.05
    target: str = "labels"

    @property
    def threshold(self) -> float:
        """Scores above it are called OOD; infinite when calibration data are too few."""
        return float(conformal.quantile(self.calibration, 1 - self.false_alarms))

    @property
    def place(self) -> Place:
        """Where inputs are put."""
        return self.classifier.place

    def __call__(self, x: Inputs) -> Result:
        """The plain net's prediction, score and verdict for every input."""
        return merge_parts((self._answer(seen) for seen in self._seen(x)), concat_results)

    def score(self, x: Inputs) -> Tensor:
        """How OOD each input is, (B,); a NaN counts as infinitely OOD."""
        return merge_parts((self._scores(seen) for seen in self._seen(x)), concat_padded)

    def predict(self, x: Inputs) -> Prediction:
        """The plain net's prediction."""
        return merge_parts((_prediction(seen) for seen in self._seen(x)), concat_results)

    def calibrate(self, valid: Data, false_alarms: float = 0.05) -> PostHocDetector:
        """The same detector with threshold and p-values from other in-distribution data."""
        with own_order("valid"):
            rows = gather(batches(valid, self.place, name="valid", target=self.target), least=2)
        return _calibrated(self, self.score(rows.inputs), false_alarms)

    def _answer(self, seen: Seen) -> Result:
        score = self._scores(seen)
        p_value = conformal.p_value(self.calibration, score).to(score)
        return Result(**vars(_prediction(seen)), score=score, ood=score > self.threshold, p_value=p_value)

    def _scores(self, seen: Seen) -> Tensor:
        return self.rule(seen).nan_to_num(nan=torch.inf, posinf=torch.inf)

    def _seen(self, x: Any) -> Iterator[Seen]:
        empty = True
        for source in given(x, "the inputs") if isinstance(x, DataLoader) else [x]:
            asked = unlabelled(source, self.target) if isinstance(x, DataLoader) or is_mapping(source) else source
            inputs = tree_map(self.place.put, asked)
            check_inputs(inputs, "the detector")
            check_finite(inputs, None, "the inputs")
            self.form.check(inputs, "the inputs")
            inputs = mark_shared(inputs)
            for start in range(0, rows_of(inputs), BLOCK):
                empty = False
                yield self.classifier.look(take_rows(inputs, slice(start, start + BLOCK)))
        if empty:
            raise DataError("Expected at least one input, but got none.")


def detect(
    net: nn.Module,
    train: Data,
    valid: Data | None = None,
    *,
    method: str = "energy",
    features: str | None = None,
    output_fn: OutputFn | None = None,
    target: str = "labels",
    false_alarms: float = 0.05,
    rows: int = 20_000,
    batch_size: int = 128,
    seed: int = 0,
    **options: Any,
) -> PostHocDetector:
    """One of the classic detectors on a trained classifier: `offmap.detectors.catalog.DETECTORS` lists them.

    Features are what the net's last matrix meets; where it does not end in one, `features` names a layer: what it gives, or, of
    the layer that gives the logits, what it is given. At most `rows` training rows are looked at, a random part of more. The
    threshold is conformal at `false_alarms` on `valid`, or on a tenth of `train` set aside. Further options are those of the
    method, such as `k=` of "knn".
    """
    catalog.kind(method, options)
    chosen = detect_all(
        net, train, valid, methods={method: options}, features=features, output_fn=output_fn, target=target,
        false_alarms=false_alarms, rows=rows, batch_size=batch_size, seed=seed, remember=False,
    )  # fmt: skip
    return chosen[method]


def detect_all(
    net: nn.Module,
    train: Data,
    valid: Data | None = None,
    *,
    methods: Iterable[str] | dict[str, dict[str, Any]] | None = None,
    features: str | None = None,
    output_fn: OutputFn | None = None,
    target: str = "labels",
    false_alarms: float = 0.05,
    rows: int = 20_000,
    batch_size: int = 128,
    seed: int = 0,
    remember: bool = True,
) -> dict[str, PostHocDetector]:
    """Several detectors by name, or {name: options}, that cost one pass together; by default all that the net allows.

    With `remember`, features and logits of the last inputs are kept (64 MB), so that scoring them with each costs one pass too.
    """
    names = [methods] if isinstance(methods, str) else methods or catalog.DETECTORS
    asked = methods if isinstance(methods, dict) else {name: {} for name in names}
    for name, options in asked.items():
        catalog.kind(name, options)
    seen = look(
        net, train, valid, features=features, output_fn=output_fn, target=target, rows=rows, batch_size=batch_size, seed=seed,
        remember=remember,
    )  # fmt: skip
    if methods is None:
        asked = {name: options for name, options in asked.items() if _allowed(name, seen.known.classifier)}
    for name in asked:
        catalog.check(name, seen.known.classifier)
    return {name: seen.detector(name, false_alarms=false_alarms, **options) for name, options in asked.items()}


@dataclass(frozen=True, eq=False)
class Sight:
    """Training and validation data as a classifier sees them: one pass for any number of detectors."""

    known: FitData
    form: ImageSpec
    target: str = "labels"
    seed: int = 0

    def detector(self, method: str, *, false_alarms: float = 0.05, **options: Any) -> PostHocDetector:
        """The detector of that name, fitted, with its threshold."""
        with torch.inference_mode(False), own_order(self.seed):
            return _made(method, self.known, self.form, options, false_alarms, self.target)


def look(
    net: nn.Module,
    train: Data,
    valid: Data | None = None,
    *,
    features: str | None = None,
    output_fn: OutputFn | None = None,
    target: str = "labels",
    rows: int = 20_000,
    batch_size: int = 128,
    seed: int = 0,
    remember: bool = True,
) -> Sight:
    """What `detect_all` fits its detectors on, for those who want them one after another."""
    number("rows", rows, 1, 1e12, whole=True)
    number("batch_size", batch_size, 1, 1e12, whole=True)
    seed = checks.whole("seed", seed)
    if not isinstance(net, nn.Module):
        raise ModelError(f"Expected one trained torch.nn.Module, but got {type(net).__name__}.")
    with torch.inference_mode(False), own_order(seed):
        memory = LRUCache() if remember else None
        known, form = _look(net, train, valid, features, output_fn, (target, rows, batch_size, seed), memory)
    return Sight(known, form, target, seed)


def _made(
    name: str, known: FitData, form: ImageSpec, options: dict[str, Any], false_alarms: float, target: str
) -> PostHocDetector:
    rule = catalog.fit(name, known, **options)
    made = PostHocDetector(name, known.classifier, rule, form, known.labels.new_zeros(1, dtype=torch.float32), target=target)
    return _calibrated(made, rule(known.valid).nan_to_num(nan=torch.inf, posinf=torch.inf), false_alarms)


def _calibrated(made: PostHocDetector, scores: Tensor, false_alarms: float) -> PostHocDetector:
    """The detector with its threshold; an infinite one is said."""
    false_alarms = checks.alarms(false_alarms)
    made = replace(made, calibration=scores, false_alarms=false_alarms)
    if made.threshold == torch.inf:
        logger.warning(
            "The threshold of %r is infinite, so nothing will be flagged: %d calibration rows are too few for a false alarm rate "
            "of %g, or their scores overflow. Pass at least %d.",
            made.method, len(scores), false_alarms, math.ceil(1 / false_alarms * (1 - 1e-12)) - 1,
        )  # fmt: skip
    return made


def _allowed(name: str, found: Classifier) -> bool:
    try:
        catalog.check(name, found)
    except ModelError as error:
        logger.warning("The detector %r is left out. %s", name, error)
        return False
    return True


def _look(
    net: nn.Module,
    train: Data,
    valid: Data | None,
    features: str | None,
    output_fn: OutputFn | None,
    how: tuple[str, int, int, int],
    memory: LRUCache | None,
) -> tuple[FitData, ImageSpec]:
    """Training and validation data as the net sees them."""
    target, most, batch_size, seed = how
    place = Place.of(as_models(net)[0])
    data, held = _data(train, valid, place, target, batch_size, seed)
    first, _ = next(iter(data))
    form = ImageSpec.of(first)
    found = classifier(net, first, features=features, output_fn=output_fn, batch_size=batch_size, memory=memory)
    parts: list[tuple[Tensor, Tensor, Tensor]] = []
    for x, y in _first(data, most, seed):
        form.check_shape(x, "the training inputs")
        seen = replace(found, memory=None).look(x)
        Categorical().check_targets(seen.logits, y, data.name)
        counted = y != IGNORED
        form = form.widen(x)
        parts.append((seen.features[counted], seen.logits[counted], y[counted].long()))
    h, z, y = (torch.cat(each) for each in zip(*parts, strict=True))
    if not len(y):
        raise DataError(f"Expected classes in `{data.name}`, but every target is −100.")
    warn_if_inaccurate(form, z, y)
    form.check(held.inputs, "the validation inputs")
    known_valid = found.look(held.inputs)
    Categorical().check_targets(known_valid.logits, held.targets, held.name)
    known = FitData(found, h, z, y, known_valid, held.targets, lambda: (x for x, _ in _first(data, most, seed)), form.span)
    return known, form


def _data(train: Data, valid: Data | None, place: Place, target: str, batch_size: int, seed: int) -> tuple[Batches, Rows]:
    """Training batches and validation rows; without `valid`, a tenth of the training data, said so."""
    if valid is not None:
        data = batches(train, place, name="train", batch_size=batch_size, target=target)
        return data, gather(batches(valid, place, name="valid", batch_size=batch_size, target=target), least=2)
    data, held = split(train, place, fraction=VALID_SHARE, seed=seed, batch_size=batch_size, target=target)
    held = gather(held, least=2)
    logger.warning("No validation data: %d random rows of `train` are set aside. Pass `valid=` to choose them.", held.rows)
    return data, held


def _first(data: Batches, most: int, seed: int) -> Iterator[tuple[Inputs, Tensor]]:
    """Batches of at most so many rows; of more than that, a random part where the data allow it."""
    try:
        plenty = data.rows > most
    except TypeError:  # a stream of unknown length
        plenty = False
    left = most
    for x, y in data.shuffled(seed, 0) if plenty else data:
        yield (x, y) if len(y) <= left else (take_rows(x, slice(0, left)), y[:left])
        left -= len(y)
        if left <= 0:
            return


def _prediction(seen: Seen) -> Prediction:
    probs = seen.logits.softmax(1)
    return Prediction(probs=probs, label=probs.argmax(1))
