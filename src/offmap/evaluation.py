"""Scorers × data sets: how well OOD data are told apart, and how good predictions on in-distribution data stay. Data only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from offmap import checks
from offmap._torch_private import tree_map
from offmap._types import IGNORED, Data, Inputs
from offmap.calibration import nll
from offmap.data import Place, Rows, as_batches, drop_targets, fork_rng, iter_batches, load_rows
from offmap.data.inputs import is_table, rows_of, take_rows
from offmap.ensemble import GuardEnsemble, mixture_nll
from offmap.errors import ConfigError, DataError
from offmap.guard import Guard
from offmap.likelihoods import Prediction, align_targets
from offmap.metrics import (
    aupr_in,
    aupr_out,
    auroc,
    confidence_curve,
    coverage,
    coverage_curve,
    expected_calibration_error,
    fpr_at,
    mean_width,
    quantile_ece,
)
from offmap.posterior.protocol import Scorer
from offmap.random import permutation
from offmap.table import Table

LEVEL = 0.95
KEPT = 5
"""Examples kept at either end of every set."""

POINTS = 300
"""Points kept of every set, where inputs can be drawn in a plane."""


@dataclass(frozen=True)
class Example:
    """One row: its number in its set, its score, its inputs with a leading axis of 1, and its target if it has one."""

    place: int
    score: float
    inputs: Inputs = field(repr=False)
    target: Tensor | None = None


@dataclass(frozen=True)
class Seen:
    """What was seen of one scorer beyond its scores. `losses` (n,) is all that grows with the data.

    `examples` {set: the least OOD, then the most OOD}. Of guards and mixtures: `losses` of the test rows, squared errors or
    shares of wrong labels, NaN where a row has no target; `reliability` {"own" or "wide": (k, 3)}, stated, seen, number.
    """

    threshold: float | None
    examples: dict[str, list[Example]]
    losses: Tensor | None = None
    reliability: dict[str, Tensor] = field(default_factory=dict[str, Tensor])


@dataclass(frozen=True)
class Points:
    """Some rows of a set whose inputs are one or two numbers: (m, 1) or (m, 2), and their targets if there are any."""

    inputs: Tensor
    targets: Tensor | None = None


@dataclass(frozen=True)
class Evaluation:
    """`rows`: one dict per scorer and data set (set "test" holds in-distribution quality, clipped and unclipped).

    `scores`: {scorer: {set: (n,)}}, higher = more OOD. The rest is what a page shows: `seen` of every scorer, `points` of every
    set in a plane, and the `scorers` themselves, which a copy on its way to another process leaves behind.
    """

    rows: list[dict[str, Any]]
    scores: dict[str, dict[str, Tensor]] = field(repr=False)
    seen: dict[str, Seen] = field(default_factory=dict[str, Seen], repr=False)
    points: dict[str, Points] = field(default_factory=dict[str, Points], repr=False)
    scorers: dict[str, Scorer] = field(default_factory=dict[str, Scorer], repr=False)

    def table(self) -> Table:
        """The rows, aligned for reading."""
        return Table(self.rows)

    def __str__(self) -> str:
        return str(self.table())

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "scorers": {}}


def evaluate(
    scorers: Scorer | Mapping[str, Scorer],
    test: Data,
    ood: Mapping[str, Data],
    *,
    positive: str = "id",
    target: str = "labels",
) -> Evaluation:
    """AUROC, FPR@95, AUPR-in and -out of every scorer on every OOD set; NLL, ECE, coverage and width of what guards and
    mixtures predict on `test`.

    FPR@95 is the share of OOD scores at or below the 95 % quantile of the ID scores; `positive="ood"` turns the roles around.
    OOD data may come without targets. A few rows of every set are kept as examples.
    """
    named = dict(scorers) if isinstance(scorers, Mapping) else {"guard": scorers}
    _check(named, ood, positive)
    made = Evaluation([], {}, scorers=named)
    for name, scorer in named.items():
        place = getattr(scorer, "place", Place(torch.device("cpu"), torch.float32))
        with fork_rng("test"):
            familiar = load_rows(as_batches(test, place, name="test", target=target))
        if isinstance(scorer, Guard | GuardEnsemble):
            (scorer if isinstance(scorer, Guard) else scorer.guards[0]).check_targets(familiar)
        scores = made.scores[name] = {"test": scorer.score(familiar.inputs)}
        examples = {"test": extremes(scores["test"], [familiar.inputs], familiar.targets)}
        losses, reliability = None, {}
        if isinstance(scorer, Guard | GuardEnsemble):
            row, losses, reliability = quality(scorer, familiar)
            made.rows.append({"scorer": name, "set": "test", **row})
        _keep(made.points, "test", [familiar.inputs], familiar.targets)
        for label, data in ood.items():
            parts = _inputs(data, place, label, target)
            scores[label] = torch.cat([scorer.score(x) for x in parts])
            examples[label] = extremes(scores[label], parts)
            _keep(made.points, label, parts)
            made.rows.append({"scorer": name, "set": label, **detection(scores["test"], scores[label], positive)})
        made.seen[name] = Seen(getattr(scorer, "threshold", None), examples, losses, reliability)
    return made


def extremes(scores: Tensor, parts: Sequence[Inputs], targets: Tensor | None = None, kept: int = KEPT) -> list[Example]:
    """The rows of lowest and of highest score, in rising order: all, or `kept` of either end.

    >>> [e.place for e in extremes(torch.tensor([3.0, 1.0, 2.0, 5.0]), [torch.zeros(4, 2)], kept=1)]
    [1, 3]
    """
    order = scores.argsort(stable=True)
    chosen = (order if len(order) <= 2 * kept else torch.cat([order[:kept], order[-kept:]])).tolist()
    return [
        Example(place, float(scores[place]), _row(parts, place), None if targets is None else targets[place].cpu())
        for place in chosen
    ]


def _row(parts: Sequence[Inputs], place: int) -> Inputs:
    """One row of consecutive parts, on the CPU, as a copy that does not keep them alive."""
    for part in parts:
        if place < rows_of(part):
            return tree_map(lambda leaf: leaf.cpu() if isinstance(leaf, Tensor) else leaf, take_rows(part, [place]))
        place -= rows_of(part)
    raise IndexError(place)


def _keep(points: dict[str, Points], label: str, parts: Sequence[Inputs], targets: Tensor | None = None) -> None:
    """Keep some rows of a set, once, if they can be drawn in a plane."""
    if label in points or not all(is_table(part) and part.shape[1] <= 2 for part in parts):
        return
    x = torch.cat([part for part in parts if isinstance(part, Tensor)]).cpu()
    chosen = permutation(len(x), "points")[:POINTS].sort().values
    points[label] = Points(x[chosen].float(), None if targets is None else targets.cpu()[chosen])


def detection(familiar: Tensor, strange: Tensor, positive: str = "id") -> dict[str, float]:
    """How well two sets of scores are told apart."""
    return {
        "auroc": float(auroc(familiar, strange)),
        "fpr95": float(fpr_at(familiar, strange, positive=positive)),  # pyright: ignore[reportArgumentType]
        "aupr_in": float(aupr_in(familiar, strange)),
        "aupr_out": float(aupr_out(familiar, strange)),
    }


def quality(guard: Guard | GuardEnsemble, rows: Rows) -> tuple[dict[str, float], Tensor, dict[str, Tensor]]:
    """Quality of predictions on in-distribution data, and (prefix `wide_`) of a guard's unclipped ones; losses; reliability."""
    own = guard.predict(rows.inputs)
    losses = _losses(own, rows.targets)
    said = {"own": own} | ({"wide": guard.predict(rows.inputs, clip=None)} if isinstance(guard, Guard) else {})
    result: dict[str, float] = {}
    for name, prediction in said.items():
        if isinstance(guard, Guard):
            paid = nll(guard, rows, clip=guard.clip if name == "own" else None)
        else:
            paid = mixture_nll(prediction, rows.targets)
        measured = {"nll": float(paid[~losses.isnan()].mean())} | _fit_of(prediction, rows.targets)
        result |= {key if name == "own" else f"wide_{key}": value for key, value in measured.items()}
    curves = {name: _reliability(prediction, rows.targets) for name, prediction in said.items()}
    return result | _conformal(guard, rows, own), losses.cpu(), curves


def _conformal(guard: Guard | GuardEnsemble, rows: Rows, own: Prediction) -> dict[str, float]:
    """Coverage and mean width of conformal intervals or sets."""
    if own.mean is not None:
        interval = guard.interval(rows.inputs, LEVEL)
        y = rows.targets.reshape(interval.lower.shape)
        inside = coverage(interval.lower.flatten(), interval.upper.flatten(), y.flatten())
        width = mean_width(interval.lower.flatten(), interval.upper.flatten())
        return {"conformal_coverage": float(inside), "conformal_width": float(width)}
    chosen = guard.prediction_set(rows.inputs, LEVEL)
    y = align_targets(rows.targets, chosen[:, 0].shape).long()
    counted = y != IGNORED
    covered = chosen.gather(1, y.masked_fill(~counted, 0).unsqueeze(1)).squeeze(1)[counted]
    return {
        "conformal_coverage": float(covered.float().mean()),
        "conformal_width": float(chosen.sum(1)[counted].float().mean()),
    }


def _fit_of(prediction: Prediction, y: Tensor) -> dict[str, float]:
    """ECE, coverage and width at 95 %, and RMSE or accuracy."""
    if prediction.mean is not None and prediction.std is not None:
        mean, std, flat = prediction.mean.flatten(), prediction.std.flatten(), y.flatten().to(prediction.mean)
        radius = 1.959964 * std
        return {
            "rmse": float((mean - flat).square().mean().sqrt()),
            "ece": float(quantile_ece(mean, std, flat)),
            "coverage": float(coverage(mean - radius, mean + radius, flat)),
            "width": float(mean_width(mean - radius, mean + radius)),
        }
    probs, flat = _classes(prediction, y)
    assert prediction.label is not None
    label = prediction.label.flatten()[y.flatten() != IGNORED]
    return {"accuracy": float((label == flat).float().mean()), "ece": float(expected_calibration_error(probs, flat))}


def _classes(prediction: Prediction, y: Tensor) -> tuple[Tensor, Tensor]:
    """Probabilities and labels of all positions that count."""
    assert prediction.probs is not None
    counted = y.flatten() != IGNORED
    return prediction.probs.movedim(1, -1).flatten(0, -2)[counted], y.flatten().long()[counted]


def _losses(prediction: Prediction, y: Tensor) -> Tensor:
    """Mean squared error or share of wrong labels of every row, (n,); NaN for a row whose targets are all −100."""
    if prediction.mean is not None:
        error = (align_targets(y, prediction.mean.shape).to(prediction.mean) - prediction.mean).square()
        return error.unsqueeze(-1).flatten(1).mean(1)
    assert prediction.label is not None
    said = align_targets(y, prediction.label.shape).long()
    wrong = (prediction.label != said).double().masked_fill(said == IGNORED, torch.nan)
    return wrong.unsqueeze(-1).flatten(1).nanmean(1)


def _reliability(prediction: Prediction, y: Tensor) -> Tensor:
    """Stated, seen, number: intervals of a regression by level, labels of a classification by confidence."""
    if prediction.mean is not None and prediction.std is not None:
        return coverage_curve(prediction.mean.flatten(), prediction.std.flatten(), y.flatten().to(prediction.mean)).cpu()
    return confidence_curve(*_classes(prediction, y)).cpu()


def _inputs(data: Data, place: Place, name: str, target: str) -> list[Any]:
    """Inputs of an OOD data set, which may have no targets, in one batch or several."""
    loader = DataLoader(data, batch_size=1024) if isinstance(data, Dataset) else data
    with fork_rng("ood"):
        read = list(iter_batches(loader, f"`{name}`")) if isinstance(loader, DataLoader) else [loader]
    parts = [drop_targets(batch, target) for batch in read]
    if not parts:
        raise DataError(f"Expected at least one example in `{name}`, but it is empty.")
    return [tree_map(place.put, part) for part in parts]


def _check(scorers: Mapping[str, Any], ood: Any, positive: str) -> None:
    """Refuse what cannot be evaluated before any score is made."""
    for name, scorer in scorers.items():
        if not isinstance(scorer, Scorer) or isinstance(scorer, type):
            raise ConfigError(f"Expected scorers with a `score` method, but {name!r} is of type {type(scorer).__name__}.")
    if not isinstance(ood, Mapping):
        raise DataError(f"Expected `ood` to be a dict of data sets by name, but got {type(ood).__name__}.")
    if not scorers or not ood:
        raise DataError("Expected at least one scorer and one OOD data set in `ood`, but got none.")
    if "test" in ood:
        raise DataError("Expected names of OOD data sets other than 'test', which is the in-distribution one's. Rename it.")
    checks.one_of("positive", positive, ("id", "ood"))
