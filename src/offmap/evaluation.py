"""Detectors × data sets: how well scores separate OOD data, and how good predictions on in-distribution data are."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from offmap import checks, metrics
from offmap._torch_private import tree_map
from offmap._types import IGNORED, Data, Inputs
from offmap.data import Place, Rows, as_batches, fork_rng, load_rows
from offmap.data.batch import drop_targets, is_table, read_batch, rows_of, take_rows
from offmap.data.batches import iter_batches
from offmap.detector import Detector
from offmap.errors import ConfigError, DataError, OffmapError
from offmap.likelihoods import Prediction, align_targets
from offmap.posterior.predictive import Scorer
from offmap.random import permutation
from offmap.table import Table


@dataclass(frozen=True)
class Example:
    """One row: its index in its set, its score, its inputs with a leading axis of 1, and its target if it has one."""

    index: int
    score: float
    inputs: Inputs = field(repr=False)
    target: Tensor | None = None


@dataclass(frozen=True)
class Details:
    """What an evaluation keeps of one detector beyond its scores, for a page to show."""

    threshold: float | None  # scores above it are called OOD
    examples: dict[str, list[Example]]  # {set: rows of lowest, then of highest score}
    losses: Tensor | None = field(
        default=None, repr=False
    )  # (n,) of the test rows: squared errors, or shares of wrong labels; NaN without a target
    # {"own" or "wide": (k, stated, observed, count)}
    reliability: dict[str, Tensor] = field(default_factory=dict[str, Tensor], repr=False)


@dataclass(frozen=True)
class Points:
    """Some rows of a set whose inputs are one or two numbers: (m, 1) or (m, 2), and their targets if there are any."""

    inputs: Tensor = field(repr=False)
    targets: Tensor | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Evaluation:
    """Metrics and scores of several detectors.

    Attributes:
        rows: One dict per detector and data set; the set "test" holds the quality of predictions, clipped and unclipped. `error`
            is the mean loss of all rows, `error_unflagged` that of rows at or below the threshold, `aurc` the area under the
            risk-coverage curve: how well the score ranks errors, lower is better. A loss is a squared error, or 1 for a wrong
            class, else 0.
        scores: {detector: {set: (n,)}}, higher = more OOD.
        details: What else is kept of every detector.
        points: Rows of every set that can be drawn in a plane.
        detectors: The detectors themselves; copies sent to other processes leave them out.
    """

    rows: list[dict[str, Any]]
    scores: dict[str, dict[str, Tensor]] = field(repr=False)
    details: dict[str, Details] = field(default_factory=dict[str, Details], repr=False)
    points: dict[str, Points] = field(default_factory=dict[str, Points], repr=False)
    detectors: dict[str, Scorer] = field(default_factory=dict[str, Scorer], repr=False)

    def table(self) -> Table:
        """Return the rows, aligned for reading."""
        return Table(self.rows)

    def __str__(self) -> str:
        return str(self.table())

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "detectors": {}}


def evaluate(
    detectors: Scorer | Mapping[str, Scorer], test: Data, ood: Mapping[str, Data], *, positive: Literal["id", "ood"] = "id",
    target: str = "labels",
) -> Evaluation:  # fmt: skip
    """Measure AUROC, FPR@95 and AUPR of every detector on every OOD set, and NLL, ECE, coverage and width of guards' predictions.

    How well scores rank the errors of predictions is measured on `test`, and on OOD sets that come with targets.

    Args:
        detectors: One detector, or {name: detector}; whatever has `score(x) -> (B,)` will do.
        test: In-distribution rows with targets.
        ood: {name: data set}. Targets are not needed; a set whose targets fit the detector's task also gets `error`,
            `error_unflagged` and `aurc`. Pass inputs alone where classes of the same numbers mean something else.
        positive: FPR@95 is the share of OOD scores at or below the 95 % quantile of the in-distribution scores; "ood" exchanges
            the roles.
        target: Key of the targets in batches that are one dict.

    >>> from offmap.detectors.input_distance import Nearest
    >>> x = torch.linspace(-1, 1, 20)[:, None]
    >>> evaluate(Nearest(x), (0.9 * x, x[:, 0]), {"far": 3 + x}).rows[0]["auroc"]
    1.0
    """
    named = dict(detectors) if isinstance(detectors, Mapping) else {"guard": detectors}
    _check_arguments(named, ood, positive)
    evaluation = Evaluation([], {}, detectors=named)
    for name, scorer in named.items():
        detector = scorer if isinstance(scorer, Detector) else None
        place = detector.place if detector else Place.of(None)
        with fork_rng("test"):
            rows = load_rows(as_batches(test, place, name="test", target=target))
        quality, losses, reliability = measure_predictions(detector, rows) if detector else ({}, None, {})
        scores = evaluation.scores[name] = {"test": scorer.score(rows.inputs)}
        examples = {"test": pick_extremes(scores["test"], [rows.inputs], rows.targets)}
        _add_points(evaluation.points, "test", [rows.inputs], rows.targets)
        if detector and losses is not None:
            quality |= measure_errors(scores["test"], losses, detector.threshold)
            evaluation.rows.append({"scorer": name, "set": "test", **quality})
        for label, data in ood.items():
            batches = _load_batches(data, place, label, target)
            parts = [x for x, _ in batches]
            scores[label] = torch.cat([scorer.score(x) for x in parts])
            examples[label] = pick_extremes(scores[label], parts)
            _add_points(evaluation.points, label, parts)
            row = {"scorer": name, "set": label, **measure_separation(scores["test"], scores[label], positive)}
            if detector and losses is not None and (ood_losses := measure_losses(detector, batches, label)) is not None:
                row |= measure_errors(scores[label], ood_losses, detector.threshold)
            evaluation.rows.append(row)
        threshold: float | None = getattr(scorer, "threshold", None)  # a scorer of the user may have none
        evaluation.details[name] = Details(threshold, examples, losses, reliability)
    return evaluation


def measure_separation(id_scores: Tensor, ood_scores: Tensor, positive: Literal["id", "ood"] = "id") -> dict[str, float]:
    """Measure how well two sets of scores are separated."""
    ranking = {"auroc": metrics.auroc, "fpr95": partial(metrics.fpr_at, positive=positive)}
    measures = ranking | {"aupr_in": metrics.aupr_in, "aupr_out": metrics.aupr_out}
    return {name: float(measure(id_scores, ood_scores)) for name, measure in measures.items()}


def measure_predictions(detector: Detector, rows: Rows) -> tuple[dict[str, float], Tensor | None, dict[str, Tensor]]:
    """Measure predictions on in-distribution rows: metrics (prefix `wide_`: from unclipped draws), losses (n,), and reliability.

    All are empty for detectors that make no claim about targets.
    """
    detector.check_targets(rows)
    predictions = detector.predict_at(rows)
    if not predictions:
        return {}, None, {}
    regression = predictions["own"][0].mean is not None
    quality, losses, reliability = dict[str, float](), dict[str, Tensor](), dict[str, Tensor]()
    for name, (prediction, nll) in predictions.items():
        values, loss, curve = (_measure_regression if regression else _measure_classes)(prediction, rows.targets)
        prefix = "" if name == "own" else f"{name}_"
        quality[f"{prefix}nll"] = float(nll[~loss.isnan()].mean())
        quality |= {f"{prefix}{key}": value for key, value in values.items()}
        losses[name], reliability[name] = loss.cpu(), curve.cpu()
    if not detector.calibration.seen:  # else there are no conformal intervals
        covered, width = _measure_conformal(detector, rows, regression=regression)
        quality |= {"conformal_coverage": float(covered), "conformal_width": float(width)}
    return quality, losses["own"], reliability


def measure_errors(scores: Tensor, losses: Tensor, threshold: float) -> dict[str, float]:
    """Measure the losses of rows by their scores, (n,) each: of all, of those that are not flagged, and how they are ranked.

    Rows whose loss is NaN have no target and are left out; nothing is measured where there are no others.

    >>> measure_errors(torch.tensor([0.1, 0.2, 0.9]), torch.tensor([0.0, 0.0, 1.0]), 0.5)
    {'error': 0.3333333333333333, 'error_unflagged': 0.0, 'aurc': 0.1111111111111111}
    """
    losses, scores = losses.double().cpu(), scores.double().cpu()
    counted = ~losses.isnan()
    scores, losses = scores[counted], losses[counted]
    if not len(losses):
        return {}
    # a loss that overflows is in the mean of all rows, and so in the area
    area = float(metrics.aurc(scores, losses)) if bool(losses.isfinite().all()) else math.inf
    return {"error": float(losses.mean()), "error_unflagged": float(losses[scores <= threshold].mean()), "aurc": area}


def measure_losses(detector: Detector, batches: Sequence[tuple[Inputs, Tensor | None]], name: str) -> Tensor | None:
    """Return the losses of predictions, batch by batch, (n,); None unless all have targets that fit what is predicted."""
    losses: list[Tensor] = []
    for inputs, targets in batches:
        if targets is None:
            return None
        try:
            detector.check_targets(Rows(inputs, targets, len(targets), name))
        except OffmapError:
            return None
        losses.append(row_losses(detector.predict(inputs), targets).cpu())
    return torch.cat(losses)


def row_losses(prediction: Prediction, y: Tensor) -> Tensor:
    """Return squared errors, or shares of wrong labels, (n,); NaN without any target."""
    if prediction.mean is not None:
        losses = (align_targets(y, prediction.mean.shape).to(prediction.mean) - prediction.mean).square()
        return losses.unsqueeze(-1).flatten(1).mean(1)
    assert prediction.label is not None
    y = align_targets(y, prediction.label.shape).long()
    wrong = (prediction.label != y).double().masked_fill(y == IGNORED, torch.nan)
    return wrong.unsqueeze(-1).flatten(1).nanmean(1)


def _measure_regression(prediction: Prediction, y: Tensor) -> tuple[dict[str, float], Tensor, Tensor]:
    """RMSE, and ECE, coverage and width of Gaussian intervals; squared errors (n,); coverage by level."""
    assert prediction.mean is not None
    assert prediction.std is not None
    losses = row_losses(prediction, y)
    mean, std, y = prediction.mean.flatten(), prediction.std.flatten(), y.flatten().to(prediction.mean)
    bounds = mean - 1.959964 * std, mean + 1.959964 * std
    values = {
        "rmse": float((mean - y).square().mean().sqrt()),
        "ece": float(metrics.quantile_ece(mean, std, y)),
        "coverage": float(metrics.coverage(*bounds, y)),
        "width": float(metrics.mean_width(*bounds)),
    }
    return values, losses, metrics.coverage_curve(mean, std, y)


def _measure_classes(prediction: Prediction, y: Tensor) -> tuple[dict[str, float], Tensor, Tensor]:
    """Accuracy and ECE over all positions that count; shares of wrong labels (n,), NaN without any; accuracy by confidence."""
    assert prediction.probs is not None
    assert prediction.label is not None
    losses, y = row_losses(prediction, y), align_targets(y, prediction.label.shape).long()
    counted = y.flatten() != IGNORED
    probs, labels = prediction.probs.movedim(1, -1).flatten(0, -2)[counted], y.flatten()[counted]
    accuracy = (prediction.label.flatten()[counted] == labels).float().mean()
    values = {"accuracy": float(accuracy), "ece": float(metrics.expected_calibration_error(probs, labels))}
    return values, losses, metrics.confidence_curve(probs, labels)


def _measure_conformal(detector: Detector, rows: Rows, *, regression: bool) -> tuple[Tensor, Tensor]:
    """Coverage and mean width of conformal intervals, or mean size of conformal sets of classes."""
    if regression:
        interval = detector.interval(rows.inputs, 0.95)
        lower, upper = interval.lower.flatten(), interval.upper.flatten()
        return metrics.coverage(lower, upper, rows.targets.flatten()), metrics.mean_width(lower, upper)
    sets = detector.prediction_set(rows.inputs, 0.95)
    y = align_targets(rows.targets, sets[:, 0].shape).long()
    counted = y != IGNORED
    covered = sets.gather(1, y.masked_fill(~counted, 0).unsqueeze(1)).squeeze(1)[counted]
    return covered.float().mean(), sets.sum(1)[counted].float().mean()


def pick_extremes(scores: Tensor, parts: Sequence[Inputs], targets: Tensor | None = None, count: int = 5) -> list[Example]:
    """Pick the rows of lowest and of highest score, in rising order: all, or `count` of either end."""
    order = scores.argsort(stable=True)
    chosen = (order if len(order) <= 2 * count else torch.cat([order[:count], order[-count:]])).tolist()
    targets = None if targets is None else targets.cpu()
    return [Example(i, float(scores[i]), _copy_row(parts, i), None if targets is None else targets[i]) for i in chosen]


def _copy_row(parts: Sequence[Inputs], index: int) -> Inputs:
    """One row of consecutive parts, on the CPU, as a copy that does not keep them alive."""
    for part in parts:
        if index < rows_of(part):
            return tree_map(lambda leaf: leaf.cpu() if isinstance(leaf, Tensor) else leaf, take_rows(part, [index]))
        index -= rows_of(part)
    raise IndexError(index)


def _add_points(points: dict[str, Points], label: str, parts: Sequence[Inputs], targets: Tensor | None = None) -> None:
    """Keep some rows of a set, once, if they can be drawn in a plane."""
    if label in points or not all(is_table(part) and part.shape[1] <= 2 for part in parts):
        return
    x = torch.cat([part for part in parts if isinstance(part, Tensor)]).cpu()
    chosen = permutation(len(x), "points")[:300].sort().values
    points[label] = Points(x[chosen].float(), None if targets is None else targets.cpu()[chosen])


def _load_batches(data: Data, place: Place, name: str, target: str) -> list[tuple[Any, Tensor | None]]:
    """Inputs of an OOD data set in one batch or several, with targets where there are some."""
    loader = DataLoader(data, batch_size=1024) if isinstance(data, Dataset) else data
    with fork_rng("ood"):
        loaded = list(iter_batches(loader, f"`{name}`")) if isinstance(loader, DataLoader) else [loader]
    if not loaded:
        raise DataError(f"Expected at least one example in `{name}`, but it is empty.")
    return [_read_batch(batch, place, name, target) for batch in loaded]


def _read_batch(batch: Any, place: Place, name: str, target: str) -> tuple[Any, Tensor | None]:
    """Inputs of one batch, and its targets; None if it has none, or something else in their place."""
    try:
        return read_batch(batch, place, target, name, f"`{name}`")
    except OffmapError:  # if the inputs are at fault, the scorer says so
        return tree_map(place.put, drop_targets(batch, target)), None


def _check_arguments(detectors: Mapping[str, Any], ood: Any, positive: str) -> None:
    for name, detector in detectors.items():
        if not isinstance(detector, Scorer) or isinstance(detector, type):
            raise ConfigError(f"Expected scorers with a `score` method, but {name!r} is of type {type(detector).__name__}.")
    if not isinstance(ood, Mapping):
        raise DataError(f"Expected `ood` to be a dict of data sets by name, but got {type(ood).__name__}.")
    if not detectors or not ood:
        raise DataError("Expected at least one scorer and one OOD data set in `ood`, but got none.")
    if "test" in ood:
        raise DataError("Expected names of OOD data sets other than 'test', which is the in-distribution one's. Rename it.")
    checks.one_of("positive", positive, ("id", "ood"))
