"""What a page draws of one scorer, as plain numbers whose amount does not depend on that of the rows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from offmap.evaluation import Evaluation, Seen
from offmap.maxwent.monitors import History
from offmap.metrics import risk_coverage
from offmap.report.axis import Axis, nice
from offmap.report.diagnosis import risk_limits
from offmap.report.figures import Array, roc

STEPS = 400
"""The threshold moves in so many steps from one end of the axis to the other; one of them is the scorer's own."""

BINS, CURVE, CHECKS, LINES = 60, 160, 150, 8
"""Of a histogram; points of a curve; checks of a fit, and members of it."""


def measured(evaluation: Evaluation, name: str) -> dict[str, Any]:
    """All curves of one scorer."""
    scores = {label: values.double().cpu().numpy() for label, values in evaluation.scores[name].items()}
    seen = evaluation.seen.get(name) or Seen(None, {})
    familiar, strange = scores["test"], [values for label, values in scores.items() if label != "test"]
    own = seen.threshold if seen.threshold is not None and math.isfinite(seen.threshold) else None
    start = own if own is not None else _quantile(familiar, 0.95)
    axis = Axis.of(familiar, strange, start)
    thresholds = axis.at(np.linspace(0, 1, STEPS + 1))
    step = int(np.abs(axis.place(thresholds) - axis.place(np.array(start))).argmin())
    thresholds[step] = start
    areas = {row["set"]: row["auroc"] for row in evaluation.rows if row["scorer"] == name and "auroc" in row}
    return {
        "name": name,
        "own": own is not None,
        "start": step,
        "ticks": axis.ticks(),
        "axis": axis.kind,
        "thresholds": [short(t, 6) for t in thresholds],
        "sets": [_set(label, values, axis, thresholds) for label, values in scores.items()],
        "roc": [_roc(label, areas.get(label), familiar, scores[label]) for label in scores if label != "test"],
        "risk": None
        if seen.losses is None
        else risk(familiar, seen.losses.double().numpy(), thresholds, _kind(evaluation, name)),
        "reliability": {key: [[short(v) for v in row] for row in curve.tolist()] for key, curve in seen.reliability.items()},
        "kind": _kind(evaluation, name),
        "history": history(getattr(evaluation.scorers.get(name), "history", None)),
    }


def _kind(evaluation: Evaluation, name: str) -> str | None:
    """What the scorer predicts, as its row on the test data tells; None if it predicts nothing."""
    row = next((row for row in evaluation.rows if row["scorer"] == name and row["set"] == "test"), {})
    return "classification" if "accuracy" in row else "regression" if "rmse" in row else None


def _quantile(values: Array, share: float) -> float:
    """The smallest value that so large a share does not exceed."""
    ordered = np.sort(values)
    return float(ordered[max(0, math.ceil(share * len(ordered) * (1 - 1e-12)) - 1)])


def _set(label: str, scores: Array, axis: Axis, thresholds: Array) -> dict[str, Any]:
    """Histogram, and how many scores lie above every threshold."""
    ordered = np.sort(scores)
    edges = np.linspace(0, 1, BINS + 1)
    counts = np.histogram(axis.place(np.nan_to_num(scores, nan=axis.high, posinf=axis.high, neginf=axis.low)), edges)[0]
    return {
        "name": label,
        "rows": len(scores),
        "infinite": int(np.isinf(scores).sum()),
        "bins": [short(share) for share in counts / len(scores)],
        "over": (len(ordered) - np.searchsorted(ordered, thresholds, side="right")).tolist(),
        "quartiles": [short(_quantile(scores, share)) for share in (0.05, 0.25, 0.5, 0.75, 0.95)],
    }


def _roc(label: str, area: float | None, familiar: Array, strange: Array) -> dict[str, Any]:
    alarms, catches = roc(familiar, strange)
    kept = thinned(alarms + catches, CURVE)
    return {
        "name": label, "auroc": None if area is None else short(area, 5),
        "x": [short(v) for v in alarms[kept]], "y": [short(v) for v in catches[kept]],
    }  # fmt: skip


def thinned(along: Array, count: int) -> list[int]:
    """Places of at most so many points of a curve, evenly spread by a quantity that grows along it; both ends are kept.

    >>> thinned(np.array([0.0, 0.01, 0.02, 1.0, 2.0]), 3)
    [0, 3, 4]
    """
    if len(along) <= count:
        return list(range(len(along)))
    places = np.searchsorted(along, np.linspace(along[0], along[-1], count))
    return sorted({0, *np.minimum(places, len(along) - 1).tolist(), len(along) - 1})


def risk(scores: Array, losses: Array, thresholds: Array, kind: str | None) -> dict[str, Any] | None:
    """Loss of the answered rows over their share, and at every threshold; errors of a regression as their root mean square."""
    told = ~np.isnan(losses)
    if not told.any() or not np.isfinite(losses[told]).all():
        return None
    scores, losses = scores[told], losses[told]
    shown = np.sqrt if kind == "regression" else np.asarray
    coverage, risks = (t.numpy() for t in risk_coverage(torch.from_numpy(scores), torch.from_numpy(losses)))
    kept = thinned(coverage, CURVE)
    order = np.argsort(scores, kind="stable")
    sums = np.cumsum(losses[order])
    answered = np.searchsorted(scores[order], thresholds, side="right")
    at = [short(float(shown(sums[k - 1] / k))) if k else None for k in answered]
    values = shown(risks[kept])
    return {
        "label": "RMSE" if kind == "regression" else "error rate", "share": kind != "regression",
        "x": [short(v) for v in coverage[kept]], "y": [short(v) for v in values],
        "top": short(float(values.max()) or 1.0), "ticks": nice(0.0, float(values.max()) or 1.0, 4),
        "answered": [short(k / len(scores), 6) for k in answered], "at": at,
    }  # fmt: skip


def history(past: History | None) -> dict[str, Any] | None:
    """Risk and entropy of a fit, over its steps; None if there were none."""
    if past is None or not past.step:
        return None
    few = np.unique(np.linspace(0, len(past.step) - 1, CHECKS).round().astype(int)).tolist()
    members = min(LINES, len(past.risk[0]))
    lines: Mapping[str, Sequence[Sequence[float]]] = {"risk": past.risk, "entropy": past.entropy}
    drawn = {key: [[short(values[i][m]) for i in few] for m in range(members)] for key, values in lines.items()}
    bound = past.max_risk[:members]
    limits = risk_limits(np.array(past.risk, np.float64)[:, :members], bound) if bound else None
    entropy = [v for line in drawn["entropy"] for v in line if v is not None]
    ends = {"risk": limits or _ends([v for line in drawn["risk"] for v in line if v is not None]), "entropy": _ends(entropy)}
    return {
        "step": [past.step[i] for i in few], "steps": nice(0, past.step[-1], 3), **drawn,
        "threshold": [short(v) for v in bound], "kept": past.kept[:members], "members": len(past.risk[0]),
        "ends": {key: [short(v) for v in pair] for key, pair in ends.items()},
        "ticks": {key: nice(*pair, 4) for key, pair in ends.items()},
    }  # fmt: skip


def _ends(values: Sequence[float]) -> tuple[float, float]:
    """The range of values with a little room."""
    low, high = min(values, default=0.0), max(values, default=1.0)
    room = 0.06 * (high - low) or 0.5
    return low - room, high + room


def short(value: float, digits: int = 4) -> float | None:
    """A number in so many digits, None for what JSON has no word for.

    >>> short(1 / 3), short(math.inf)
    (0.3333, None)
    """
    return float(f"{float(value):.{digits}g}") if math.isfinite(value) else None
