"""Detectors × data sets: how well scores separate OOD data, and how good predictions on in-distribution data are."""

from __future__ import annotations

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
from offmap.data.batch import drop_targets, is_table, rows_of, take_rows
from offmap.data.batches import iter_batches
from offmap.detector import Detector
from offmap.errors import ConfigError, DataError
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
        rows: One dict per detector and data set; the set "test" holds the quality of predictions, clipped and unclipped.
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

    Args:
        detectors: One detector, or {name: detector}; whatever has `score(x) -> (B,)` will do.
        test: In-distribution rows with targets.
        ood: {name: data set}; targets are not needed.
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
        place = detector.place if detector else Place(torch.device("cpu"), torch.float32)
        with fork_rng("test"):
            rows = load_rows(as_batches(test, place, name="test", target=target))
        quality, losses, reliability = measure_predictions(detector, rows) if detector else ({}, None, {})
        scores = evaluation.scores[name] = {"test": scorer.score(rows.inputs)}
        examples = {"test": pick_extremes(scores["test"], [rows.inputs], rows.targets)}
        _add_points(evaluation.points, "test", [rows.inputs], rows.targets)
        if quality:
            evaluation.rows.append({"scorer": name, "set": "test", **quality})
        for label, data in ood.items():
            parts = _load_inputs(data, place, label, target)
            scores[label] = torch.cat([scorer.score(x) for x in parts])
            examples[label] = pick_extremes(scores[label], parts)
            _add_points(evaluation.points, label, parts)
            evaluation.rows.append({"scorer": name, "set": label, **measure_separation(scores["test"], scores[label], positive)})
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


def _measure_regression(prediction: Prediction, y: Tensor) -> tuple[dict[str, float], Tensor, Tensor]:
    """RMSE, and ECE, coverage and width of Gaussian intervals; squared errors (n,); coverage by level."""
    assert prediction.mean is not None
    assert prediction.std is not None
    errors = (align_targets(y, prediction.mean.shape).to(prediction.mean) - prediction.mean).square()
    mean, std, y = prediction.mean.flatten(), prediction.std.flatten(), y.flatten().to(prediction.mean)
    bounds = mean - 1.959964 * std, mean + 1.959964 * std
    values = {
        "rmse": float((mean - y).square().mean().sqrt()),
        "ece": float(metrics.quantile_ece(mean, std, y)),
        "coverage": float(metrics.coverage(*bounds, y)),
        "width": float(metrics.mean_width(*bounds)),
    }
    return values, errors.unsqueeze(-1).flatten(1).mean(1), metrics.coverage_curve(mean, std, y)


def _measure_classes(prediction: Prediction, y: Tensor) -> tuple[dict[str, float], Tensor, Tensor]:
    """Accuracy and ECE over all positions that count; shares of wrong labels (n,), NaN without any; accuracy by confidence."""
    assert prediction.probs is not None
    assert prediction.label is not None
    y = align_targets(y, prediction.label.shape).long()
    wrong = (prediction.label != y).double().masked_fill(y == IGNORED, torch.nan)
    counted = y.flatten() != IGNORED
    probs, labels = prediction.probs.movedim(1, -1).flatten(0, -2)[counted], y.flatten()[counted]
    accuracy = (prediction.label.flatten()[counted] == labels).float().mean()
    values = {"accuracy": float(accuracy), "ece": float(metrics.expected_calibration_error(probs, labels))}
    return values, wrong.unsqueeze(-1).flatten(1).nanmean(1), metrics.confidence_curve(probs, labels)


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


def _load_inputs(data: Data, place: Place, name: str, target: str) -> list[Any]:
    """Inputs of an OOD data set, which may have no targets, in one batch or several."""
    loader = DataLoader(data, batch_size=1024) if isinstance(data, Dataset) else data
    with fork_rng("ood"):
        loaded = list(iter_batches(loader, f"`{name}`")) if isinstance(loader, DataLoader) else [loader]
    if not loaded:
        raise DataError(f"Expected at least one example in `{name}`, but it is empty.")
    return [tree_map(place.put, drop_targets(batch, target)) for batch in loaded]


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
