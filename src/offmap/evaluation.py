"""Scorers × data sets: how well strange data are told apart, and how good predictions on familiar data stay. Data only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, Dataset

from offmap._types import IGNORED, Data
from offmap.batches import Place, Rows, batches, gather, unlabelled
from offmap.errors import ConfigError, DataError, nearest
from offmap.guarding.guard import Guard, check_familiar, nll
from offmap.likelihoods import Prediction, aligned
from offmap.methods.protocol import Scorer
from offmap.metrics import aupr_in, aupr_out, auroc, fpr_at
from offmap.metrics.calibration import expected_calibration_error, quantile_ece
from offmap.metrics.intervals import coverage, mean_width
from offmap.table import Table

LEVEL = 0.95


@dataclass(frozen=True)
class Evaluation:
    """`rows`: one dict per scorer and data set (set "test" holds in-distribution quality, clipped and unclipped).

    `scores`: {scorer: {set: (n,)}}, higher = more OOD.
    """

    rows: list[dict[str, Any]]
    scores: dict[str, dict[str, Tensor]] = field(repr=False)

    def table(self) -> Table:
        """The rows, aligned for reading."""
        return Table(self.rows)

    def __str__(self) -> str:
        return str(self.table())


def evaluate(
    scorers: Scorer | Mapping[str, Scorer],
    test: Data,
    ood: Mapping[str, Data],
    *,
    positive: str = "id",
    target: str = "labels",
) -> Evaluation:
    """AUROC, FPR@95, AUPR-in and -out of every scorer on every strange set; NLL, ECE, coverage and width of guards on `test`.

    FPR@95 is the share of OOD scores at or below the 95 % quantile of the ID scores; `positive="ood"` turns the roles around.
    OOD data may come without targets.
    """
    named = dict(scorers) if isinstance(scorers, Mapping) else {"guard": scorers}
    _check(named, ood, positive)
    rows: list[dict[str, Any]] = []
    scores: dict[str, dict[str, Tensor]] = {}
    for name, scorer in named.items():
        place = getattr(scorer, "place", Place(torch.device("cpu"), torch.float32))
        familiar = gather(batches(test, place, name="test", target=target))
        if isinstance(scorer, Guard):
            check_familiar(scorer, familiar)
        scores[name] = {"test": scorer.score(familiar.inputs)}
        if isinstance(scorer, Guard):
            rows.append({"scorer": name, "set": "test", **quality(scorer, familiar)})
        for label, data in ood.items():
            scores[name][label] = torch.cat([scorer.score(x) for x in _inputs(data, place, label, target)])
            rows.append({"scorer": name, "set": label, **detection(scores[name]["test"], scores[name][label], positive)})
    return Evaluation(rows, scores)


def detection(familiar: Tensor, strange: Tensor, positive: str = "id") -> dict[str, float]:
    """How well two sets of scores are told apart."""
    return {
        "auroc": float(auroc(familiar, strange)),
        "fpr95": float(fpr_at(familiar, strange, positive=positive)),  # pyright: ignore[reportArgumentType]
        "aupr_in": float(aupr_in(familiar, strange)),
        "aupr_out": float(aupr_out(familiar, strange)),
    }


def quality(guard: Guard, rows: Rows) -> dict[str, float]:
    """Quality of a guard's predictions on familiar data, clipped and (prefix `wide_`) unclipped."""
    result: dict[str, float] = {}
    for prefix, clip in (("", guard.clip), ("wide_", None)):
        prediction = guard.predict(rows.inputs, clip=clip)
        measured = {"nll": float(nll(guard, rows, clip=clip).mean())} | _fit_of(prediction, rows.targets)
        result |= {f"{prefix}{name}": value for name, value in measured.items()}
    if guard.predict(rows.take(torch.arange(1, device=rows.targets.device)).inputs).mean is not None:
        interval = guard.interval(rows.inputs, LEVEL)
        y = rows.targets.reshape(interval.lower.shape)
        inside = coverage(interval.lower.flatten(), interval.upper.flatten(), y.flatten())
        width = mean_width(interval.lower.flatten(), interval.upper.flatten())
        return result | {"conformal_coverage": float(inside), "conformal_width": float(width)}
    chosen = guard.prediction_set(rows.inputs, LEVEL)
    y = aligned(rows.targets, chosen[:, 0].shape).long()
    counted = y != IGNORED
    covered = chosen.gather(1, y.masked_fill(~counted, 0).unsqueeze(1)).squeeze(1)[counted]
    return result | {
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
    assert prediction.probs is not None
    assert prediction.label is not None
    counted = y.flatten() != IGNORED
    probs = prediction.probs.movedim(1, -1).flatten(0, -2)[counted]
    label, flat = prediction.label.flatten()[counted], y.flatten().long()[counted]
    return {"accuracy": float((label == flat).float().mean()), "ece": float(expected_calibration_error(probs, flat))}


def _inputs(data: Data, place: Place, name: str, target: str) -> list[Any]:
    """Inputs of a strange data set, which may have no targets, in one batch or several."""
    loader = DataLoader(data, batch_size=1024) if isinstance(data, Dataset) else data
    parts = [unlabelled(batch, target) for batch in (loader if isinstance(loader, DataLoader) else [loader])]
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
        raise DataError("Expected at least one scorer and one strange data set in `ood`, but got none.")
    if "test" in ood:
        raise DataError("Expected names of strange data sets other than 'test', which is the familiar one's. Rename it.")
    if positive not in ("id", "ood"):
        raise ConfigError(f"Expected `positive` to be {nearest(str(positive), ('id', 'ood'))}, but got {positive!r}.")
