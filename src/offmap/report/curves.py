"""The numbers that a page draws of one detector: histograms, ROC, risk, history, and predictions as its weights are clipped.

Their amount does not depend on the number of rows.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from offmap.evaluation import Details, Evaluation, Points
from offmap.guard import Guard
from offmap.likelihoods import Prediction
from offmap.likelihoods.classification import predictive_entropy
from offmap.metrics import risk_coverage
from offmap.posterior.predictive import History, Member, Stochastic
from offmap.report.diagnosis import risk_limits
from offmap.report.figures import Array, Axis, round_numbers, to_json

STEPS = 400
"""The threshold moves in so many steps from one end of the axis to the other; one of them is the detector's own."""

BINS, CURVE, CHECKS, LINES = 60, 160, 150, 8
"""Bins of a histogram; points of a curve; checks of a fit, and members of it."""

CLIPS: tuple[float | None, ...] = (None, 5.0, 2.0, 1.5, 1.0, 0.7, 0.5, 0.3, 0.2, 0.1, 0.05, 0.0)
"""Clips of the frames, besides the guard's own."""

LINE, SIDE, DOTS, MARGIN = 161, 44, 150, 0.06
"""Points of a line; points of one side of a square; drawn rows of a set; margin around them, as a share of their range."""


def curves(evaluation: Evaluation, name: str) -> dict[str, Any]:
    """Return all that the page draws of one detector."""
    set_scores = {label: values.double().cpu().numpy() for label, values in evaluation.scores[name].items()}
    detector, details = evaluation.detectors.get(name), evaluation.details.get(name) or Details(None, {})
    id_scores, ood_scores = set_scores["test"], [values for label, values in set_scores.items() if label != "test"]
    own = details.threshold if details.threshold is not None and math.isfinite(details.threshold) else None
    start = own if own is not None else _quantile(id_scores, 0.95)
    axis = Axis.of(id_scores, ood_scores, start)
    thresholds = axis.at(np.linspace(0, 1, STEPS + 1))
    step = int(np.abs(axis.place(thresholds) - axis.place(np.array(start))).argmin())
    thresholds[step] = start
    areas = {row["set"]: row["auroc"] for row in evaluation.rows if row["scorer"] == name and "auroc" in row}
    row = next((row for row in evaluation.rows if row["scorer"] == name and row["set"] == "test"), {})
    kind = "classification" if "accuracy" in row else "regression" if "rmse" in row else None
    losses = None if details.losses is None else details.losses.double().numpy()
    return {
        "name": name,
        "own": own is not None,
        "start": step,
        "ticks": axis.ticks(),
        "axis": axis.kind,
        "thresholds": [to_json(t, 6) for t in thresholds],
        "sets": [_histogram(label, values, axis, thresholds) for label, values in set_scores.items()],
        "roc": [_roc_curve(label, areas.get(label), id_scores, set_scores[label]) for label in set_scores if label != "test"],
        "risk": None if losses is None else risk_curve(id_scores, losses, thresholds, kind),
        "reliability": {key: [[to_json(v) for v in row] for row in rows.tolist()] for key, rows in details.reliability.items()},
        "kind": kind,
        "history": _history_curves(detector.history) if isinstance(detector, Guard) else None,
        "clips": clip_frames(evaluation, name),
    }


def _quantile(values: Array, share: float) -> float:
    """Return the smallest value that so large a share does not exceed."""
    ordered = np.sort(values)
    return float(ordered[max(0, math.ceil(share * len(ordered) * (1 - 1e-12)) - 1)])


def _histogram(label: str, values: Array, axis: Axis, thresholds: Array) -> dict[str, Any]:
    """Count scores in bins, and above every threshold."""
    ordered = np.sort(values)
    finite = np.nan_to_num(values, nan=axis.high, posinf=axis.high, neginf=axis.low)
    counts = np.histogram(axis.place(finite), np.linspace(0, 1, BINS + 1))[0]
    return {
        "name": label,
        "rows": len(values),
        "infinite": int(np.isinf(values).sum()),
        "bins": [to_json(share) for share in counts / len(values)],
        "over": (len(ordered) - np.searchsorted(ordered, thresholds, side="right")).tolist(),
        "quartiles": [to_json(_quantile(values, share)) for share in (0.05, 0.25, 0.5, 0.75, 0.95)],
    }


def roc(id_scores: Array, ood_scores: Array) -> tuple[Array, Array]:
    """Return false alarms (share of ID data) and catches (share of OOD data) as the threshold falls.

    >>> [curve.tolist() for curve in roc(np.array([0.1, 0.6]), np.array([0.5, 0.9]))]
    [[0.0, 0.0, 0.5, 0.5, 1.0], [0.0, 0.5, 0.5, 1.0, 1.0]]
    """
    thresholds = np.unique(np.concatenate([id_scores, ood_scores]))
    alarms, catches = (1 - np.searchsorted(np.sort(s), thresholds) / len(s) for s in (id_scores, ood_scores))
    return np.append(alarms, 0.0)[::-1], np.append(catches, 0.0)[::-1]


def _roc_curve(label: str, area: float | None, id_scores: Array, ood_scores: Array) -> dict[str, Any]:
    alarms, catches = roc(id_scores, ood_scores)
    few = thin(alarms + catches, CURVE)
    points = {"x": [to_json(v) for v in alarms[few]], "y": [to_json(v) for v in catches[few]]}
    return {"name": label, "auroc": None if area is None else to_json(area, 5), **points}


def thin(along: Array, count: int) -> list[int]:
    """Return positions of at most `count` points of a curve, evenly spread by a quantity that grows along it, with both ends.

    >>> thin(np.array([0.0, 0.01, 0.02, 1.0, 2.0]), 3)
    [0, 3, 4]
    """
    if len(along) <= count:
        return list(range(len(along)))
    positions = np.searchsorted(along, np.linspace(along[0], along[-1], count))
    return sorted({0, *np.minimum(positions, len(along) - 1).tolist(), len(along) - 1})


def risk_curve(values: Array, losses: Array, thresholds: Array, kind: str | None) -> dict[str, Any] | None:
    """Return the loss of answered rows over their share, and at every threshold; for a regression its root mean square."""
    labelled = ~np.isnan(losses)
    if not labelled.any() or not np.isfinite(losses[labelled]).all():
        return None
    values, losses = values[labelled], losses[labelled]
    root = np.sqrt if kind == "regression" else np.asarray
    coverage, risks = (t.numpy() for t in risk_coverage(torch.from_numpy(values), torch.from_numpy(losses)))
    few = thin(coverage, CURVE)
    order = np.argsort(values, kind="stable")
    sums = np.cumsum(losses[order])
    answered = np.searchsorted(values[order], thresholds, side="right")
    y = root(risks[few])
    top = float(y.max()) or 1.0
    return {
        "label": "RMSE" if kind == "regression" else "error rate", "share": kind != "regression",
        "x": [to_json(v) for v in coverage[few]], "y": [to_json(v) for v in y],
        "top": to_json(top), "ticks": round_numbers(0.0, top, 4), "answered": [to_json(k / len(values), 6) for k in answered],
        "at": [to_json(float(root(sums[k - 1] / k))) if k else None for k in answered],
    }  # fmt: skip


def _history_curves(past: History | None) -> dict[str, Any] | None:
    """Return risk and entropy of a fit over its steps; None if there were none."""
    if past is None or not past.step:
        return None
    few = np.unique(np.linspace(0, len(past.step) - 1, CHECKS).round().astype(int)).tolist()
    members = min(LINES, len(past.risk[0]))
    lines: Mapping[str, Sequence[Sequence[float]]] = {"risk": past.risk, "entropy": past.entropy}
    drawn = {key: [[to_json(values[i][m]) for i in few] for m in range(members)] for key, values in lines.items()}
    ends = {key: _ends([v for line in drawn[key] for v in line if v is not None]) for key in lines}
    bound = past.max_risk[:members]
    limits = risk_limits(np.array(past.risk, np.float64)[:, :members], bound) if bound else None
    ends["risk"] = limits or ends["risk"]
    return {
        "step": [past.step[i] for i in few], "steps": round_numbers(0, past.step[-1], 3), **drawn,
        "threshold": [to_json(v) for v in bound], "kept": past.kept[:members], "members": len(past.risk[0]),
        "ends": {key: [to_json(v) for v in pair] for key, pair in ends.items()},
        "ticks": {key: round_numbers(*pair, 4) for key, pair in ends.items()},
    }  # fmt: skip


def _ends(values: Sequence[float]) -> tuple[float, float]:
    """Return the range of values with a little room."""
    low, high = min(values, default=0.0), max(values, default=1.0)
    room = 0.06 * (high - low) or 0.5
    return low - room, high + room


# ------------------------------------------------------------------------------------------------------- clips


def clip_frames(evaluation: Evaluation, name: str) -> dict[str, Any] | str:
    """Return what a guard predicts over a line or a plane for every clip (the paper's figure 4), or why that cannot be drawn."""
    guard, points = evaluation.detectors.get(name), evaluation.points
    if not isinstance(guard, Guard):
        return "Only guards draw weights that can be clipped."
    predictive = guard.predictive.source if isinstance(guard.predictive, Member) else guard.predictive
    if not isinstance(predictive, Stochastic):
        return "This guard does not draw its weights around those of a model, so there is nothing to clip."
    if set(points) != set(evaluation.scores[name]):
        return "The inputs are more than two numbers, so that the predictions cannot be drawn as an image."
    inputs = torch.cat([p.inputs for p in points.values()])
    low, high = inputs.amin(0), inputs.amax(0)
    room = MARGIN * (high - low) + 1e-9 * high.abs().clamp_min(1)
    low, high = low - room, high + room
    flat = len(low) == 2
    x = _grid(low, high) if flat else torch.linspace(float(low[0]), float(high[0]), LINE)[:, None]
    clips = sorted({*CLIPS, guard.clip}, key=lambda clip: -math.inf if clip is None else -clip)
    predictions = [guard.predict(x, clip=clip) for clip in clips]
    medians = [{label: _median(guard.predict(p.inputs, clip=clip)) for label, p in points.items()} for clip in clips]
    return {
        "clips": ["∞" if clip is None else f"{clip:.3g}" for clip in clips],
        "own": clips.index(guard.clip),
        "unit": "predictive entropy" if predictions[0].probs is not None else "standard deviation",
        "medians": medians,
        "low": [to_json(float(v)) for v in low], "high": [to_json(float(v)) for v in high],
        "ticks": [round_numbers(float(a), float(b), 5) for a, b in zip(low, high, strict=True)],
        "points": {label: _dots(p) for label, p in points.items()},
        **(_plane(predictions) if flat else _line(predictions, points["test"].targets)),
    }  # fmt: skip


def _grid(low: Tensor, high: Tensor) -> Tensor:
    """Return the points of a grid, row by row from the lowest second number up: (n², 2)."""
    across, up = (torch.linspace(float(a), float(b), SIDE) for a, b in zip(low, high, strict=True))
    y, x = torch.meshgrid(up, across, indexing="ij")
    return torch.stack([x, y], -1).flatten(0, 1)


def _uncertainty(prediction: Prediction) -> Tensor:
    """Return the entropy of a classification or the standard deviation of a regression's first target: (B,)."""
    if prediction.probs is not None:
        return _first(predictive_entropy(prediction.probs[None]))
    return _first(prediction.std)


def _median(prediction: Prediction) -> float | None:
    return to_json(float(_uncertainty(prediction).median()))


def _first(values: Tensor | None) -> Tensor:
    """Return the first target or position, on the CPU: (B,) or (B, ...) -> (B,)."""
    assert values is not None
    return (values if values.ndim == 1 else values.flatten(1)[:, 0]).cpu()


def _dots(points: Points) -> dict[str, Any]:
    """Return some rows, with their class or their first target."""
    some = slice(None, None, -(-len(points.inputs) // DOTS))
    targets = None if points.targets is None else [to_json(v) for v in _first(points.targets[some]).double().tolist()]
    return {"x": [[to_json(v) for v in row] for row in points.inputs[some].tolist()], "y": targets}


def _line(predictions: list[Prediction], targets: Tensor | None) -> dict[str, Any]:
    """Return a band of mean ± 2 standard deviations, or the entropy, along the line."""
    if predictions[0].probs is not None:
        top = math.log(predictions[0].probs.shape[1])
        areas = [{"area": [to_json(v) for v in _uncertainty(p).tolist()]} for p in predictions]
        return {"kind": "area", "frames": areas, "ends": [0.0, to_json(top)], "levels": round_numbers(0.0, top, 4)}
    y = _first(targets).double()
    room = 1.2 * float(y.max() - y.min()) or 1.0
    low, high = float(y.min()) - room, float(y.max()) + room
    bands = [{"mean": _cut(p.mean, low, high), "std": _cut(p.std, 0.0, high - low)} for p in predictions]
    return {"kind": "band", "frames": bands, "ends": [to_json(low), to_json(high)], "levels": round_numbers(low, high, 5)}


def _cut(values: Tensor | None, low: float, high: float) -> list[float | None]:
    """Cut values that go far beyond the figure."""
    reach = 3 * (high - low)
    return [to_json(v) for v in _first(values).double().nan_to_num(nan=high).clamp(low - reach, high + reach).tolist()]


def _plane(predictions: list[Prediction]) -> dict[str, Any]:
    """Return uncertainty on the square as bytes, one scale for all frames: linear for entropies, logarithmic for deviations."""
    values = [_uncertainty(p).double().numpy() for p in predictions]
    if predictions[0].probs is not None:
        low, high = 0.0, math.log(predictions[0].probs.shape[1])
        shares = [v / high for v in values]
    else:
        positive = np.concatenate(values)
        positive = positive[np.isfinite(positive) & (positive > 0)]
        low, high = (float(f(positive)) for f in (np.min, np.max)) if len(positive) else (1.0, 2.0)
        high = high if high > low else 2 * low
        shares = [np.log(np.maximum(v, low) / low) / math.log(high / low) for v in values]
    return {"kind": "map", "side": SIDE, "frames": [_bytes(share) for share in shares], "ends": [to_json(low), to_json(high)]}


def _bytes(shares: Array) -> str:
    """Encode shares from 0 to 1 as base64 of one byte each; what is not finite is 1."""
    levels = np.clip(np.nan_to_num(shares, nan=1.0, posinf=1.0) * 255, 0, 255).round().astype(np.uint8)
    return base64.b64encode(levels.tobytes()).decode()
