"""The numbers that a page draws of one detector, few for any number of rows: histograms, ROC, risk, history, clips."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from offmap.evaluation import Details, Evaluation
from offmap.guard import Guard
from offmap.likelihoods import Prediction
from offmap.likelihoods.classification import predictive_entropy
from offmap.metrics import risk_coverage
from offmap.posterior.predictive import History, Stochastic, Wrapper
from offmap.report.diagnosis import risk_limits
from offmap.report.page import Array

DECADES = 50
"""The ratio from which scores get an axis that is not linear."""

CLIPS: tuple[float | None, ...] = (None, 5.0, 2.0, 1.5, 1.0, 0.7, 0.5, 0.3, 0.2, 0.1, 0.05, 0.0)
"""Clips of the frames, besides the guard's own."""

DIGITS = {"thresholds": 6, "answered": 6, "auroc": 5}
"""Digits of the numbers under these names; all others have four."""


def curves(evaluation: Evaluation, name: str) -> dict[str, Any]:
    """Return all that the page draws of one detector."""
    set_scores = {label: values.double().cpu().numpy() for label, values in evaluation.scores[name].items()}
    detector, details = evaluation.detectors.get(name), evaluation.details.get(name) or Details(None, {})
    id_scores = set_scores["test"]
    has_threshold = details.threshold is not None and math.isfinite(details.threshold)
    start = details.threshold if has_threshold and details.threshold is not None else float(quantiles(id_scores, [0.95])[0])
    axis, along = score_axis(list(set_scores.values()), start)
    thresholds, step = along.copy(), min(int(np.searchsorted(along, start)), 400)
    thresholds[step] = start
    row = quality(evaluation, name)
    kind = "classification" if "accuracy" in row else "regression" if "rmse" in row else None
    losses = None if details.losses is None else details.losses.double().numpy()
    return to_json({
        "name": name,
        "own": has_threshold,
        "start": step,
        "axis": axis,
        "thresholds": thresholds,
        "sets": [_histogram(label, values, along, thresholds) for label, values in set_scores.items()],
        "roc": [_roc_curve(label, area, id_scores, set_scores[label]) for label, area in areas(evaluation, name).items()],
        "risk": None if losses is None else risk_curve(id_scores, losses, thresholds, kind),
        "reliability": details.reliability,
        "kind": kind,
        "history": _history_curves(detector.history) if isinstance(detector, Guard) else None,
        "clips": clip_frames(evaluation, name),
    })  # fmt: skip


def areas(evaluation: Evaluation, name: str) -> dict[str, float]:
    """Return the AUROC of a detector by OOD set."""
    return {row["set"]: row["auroc"] for row in evaluation.rows if row["scorer"] == name and "auroc" in row}


def quality(evaluation: Evaluation, name: str) -> dict[str, Any]:
    """Return the metrics of a detector's predictions; empty if it predicts nothing."""
    return next((row for row in evaluation.rows if row["scorer"] == name and row["set"] == "test"), {})


def to_json(value: Any, digits: int = 4) -> Any:
    """Return nested numbers as JSON can hold them: in few digits, and None for those that are not finite."""
    if isinstance(value, Mapping):
        return {key: to_json(entry, DIGITS.get(key, digits)) for key, entry in value.items()}
    if isinstance(value, np.ndarray | Tensor):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [to_json(entry, digits) for entry in value]
    if isinstance(value, float):
        return float(f"{value:.{digits}g}") if math.isfinite(value) else None
    return value


def score_axis(sets: Sequence[Array], threshold: float = math.nan) -> tuple[str, Array]:
    """Return an axis that shows all sets (in-distribution scores first) and the threshold: its kind, and 401 values along it.

    Kinds are "linear", "log", and "asinh", which is linear among the in-distribution scores and logarithmic far from them.
    """
    finite = [values for each in sets if len(values := each[np.isfinite(each)])]
    if not finite:
        return "linear", np.linspace(0, 1, 401)
    # of every set, a few rows in a thousand are drawn at the ends instead of beyond them
    ends = np.concatenate([*(np.quantile(values, (0.002, 0.998)) for values in finite), [threshold]])
    low, high = (float(f(ends[np.isfinite(ends)])) for f in (np.min, np.max))
    inner, centre, outer = (float(v) for v in np.quantile(finite[0], (0.05, 0.5, 0.95)))
    if not high > low:
        return "linear", np.linspace(low - 0.5, low + 0.5, 401)
    if low > 0 and high > DECADES * low:
        return "log", np.geomspace(low, high, 401)
    if high - low > DECADES * (outer - inner):
        unit = (outer - inner) / 2 or (high - low) / 1000
        ends = np.arcsinh((np.array([low, high]) - centre) / unit)
        return "asinh", (centre + unit * np.sinh(np.linspace(ends[0], ends[1], 401))).clip(low, high)
    return "linear", np.linspace(low, high, 401)


def quantiles(values: Array, shares: Sequence[float]) -> Array:
    """Return the smallest values that so large shares of them do not exceed; infinities are values as all others."""
    return np.sort(values)[[max(0, math.ceil(share * len(values) * (1 - 1e-12)) - 1) for share in shares]]


def _histogram(label: str, values: Array, along: Array, thresholds: Array) -> dict[str, Any]:
    """Count scores in 50 bins along the axis, and above every threshold."""
    inside = np.nan_to_num(values, nan=along[-1]).clip(along[0], along[-1])
    return {
        "name": label,
        "rows": len(values),
        "bins": np.histogram(inside, along[::8])[0] / len(values),
        "over": len(values) - np.searchsorted(np.sort(values), thresholds, side="right"),
        "quantiles": quantiles(values, (0.05, 0.25, 0.5, 0.75, 0.95)),
    }


def roc(id_scores: Array, ood_scores: Array) -> tuple[Array, Array]:
    """Return false alarms (share of ID data) and catches (share of OOD data) as the threshold falls."""
    thresholds = np.unique(np.concatenate([id_scores, ood_scores]))
    alarms, catches = (1 - np.searchsorted(np.sort(s), thresholds) / len(s) for s in (id_scores, ood_scores))
    return np.append(alarms, 0.0)[::-1], np.append(catches, 0.0)[::-1]


def _roc_curve(label: str, area: float, id_scores: Array, ood_scores: Array) -> dict[str, Any]:
    alarms, catches = roc(id_scores, ood_scores)
    few = thin(alarms + catches)
    return {"name": label, "auroc": area, "x": alarms[few], "y": catches[few]}


def thin(along: Array, count: int = 160) -> list[int]:
    """Return positions of at most `count` points of a curve, evenly spread by a quantity that grows along it, with both ends."""
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
    few = thin(coverage)
    y = root(risks[few])
    order = np.argsort(values, kind="stable")
    sums, answered = np.cumsum(losses[order]), np.searchsorted(values[order], thresholds, side="right")
    return {
        "label": "RMSE" if kind == "regression" else "error rate", "share": kind != "regression", "x": coverage[few], "y": y,
        "top": float(y.max()) or 1.0, "answered": answered / len(values),
        "at": [float(root(sums[k - 1] / k)) if k else None for k in answered],
    }  # fmt: skip


def _history_curves(past: History | None) -> dict[str, Any] | None:
    """Return risk and entropy of a fit over its steps, of some checks and members; None if it took none."""
    if past is None or len(past.step) < 2:
        return None
    few = np.unique(np.linspace(0, len(past.step) - 1, 150).round().astype(int))
    risk, entropy = (np.array(values, np.float64)[:, :8] for values in (past.risk, past.entropy))
    members = risk.shape[1]
    bound = past.max_risk[:members]
    return {
        "step": np.array(past.step)[few], "risk": risk[few].T, "entropy": entropy[few].T,
        "max_risk": bound, "kept": past.kept[:members], "members": len(past.risk[0]),
        "ends": {"risk": risk_limits(risk, bound) if bound else None, "entropy": None},
    }  # fmt: skip


def clip_frames(evaluation: Evaluation, name: str) -> dict[str, Any] | str:
    """Return what a guard predicts over a line or a plane for every clip (the paper's figure 4), or why that cannot be drawn."""
    guard, points = evaluation.detectors.get(name), evaluation.points
    if not isinstance(guard, Guard):
        return "Only guards draw weights that can be clipped."
    predictive = guard.predictive.source if isinstance(guard.predictive, Wrapper) else guard.predictive
    if not isinstance(predictive, Stochastic):
        return "This guard does not draw its weights around those of a model, so there is nothing to clip."
    if set(points) != set(evaluation.scores[name]):
        return "The inputs are more than two numbers, so that the predictions cannot be drawn as an image."
    inputs = torch.cat([p.inputs for p in points.values()])
    low, high = inputs.amin(0), inputs.amax(0)
    room = 0.06 * (high - low) + 1e-9 * high.abs().clamp_min(1)
    low, high = low - room, high + room
    flat = len(low) == 2
    sides = [torch.linspace(float(a), float(b), 44 if flat else 161) for a, b in zip(low, high, strict=True)]
    x = torch.cartesian_prod(*reversed(sides)).flip(-1) if flat else sides[0][:, None]  # row by row from the lowest y up
    clips = sorted({*CLIPS, guard.clip}, key=lambda clip: -math.inf if clip is None else -clip)
    predictions = [guard.predict(x, clip=clip) for clip in clips]
    medians = [{label: _spread(guard.predict(p.inputs, clip=clip)).median() for label, p in points.items()} for clip in clips]
    return {
        "clips": ["∞" if clip is None else f"{clip:.3g}" for clip in clips],
        "own": clips.index(guard.clip),
        "unit": "predictive entropy" if predictions[0].probs is not None else "standard deviation",
        "medians": medians, "low": low, "high": high,
        "points": {label: {"x": _some(p.inputs), "y": None if p.targets is None else _first(_some(p.targets))}
                   for label, p in points.items()},
        **(_plane(predictions) if flat else _line(predictions, points["test"].targets)),
    }  # fmt: skip


def _first(values: Tensor | None) -> Tensor:
    """Return the first target or position, on the CPU: (B,) or (B, ...) -> (B,)."""
    assert values is not None
    return (values if values.ndim == 1 else values.flatten(1)[:, 0]).double().cpu()


def _spread(prediction: Prediction) -> Tensor:
    """Return the entropy of a classification or the standard deviation of a regression's first target: (B,)."""
    return _first(prediction.std if prediction.probs is None else predictive_entropy(prediction.probs[None]))


def _some(rows: Tensor) -> Tensor:
    """Return at most 150 rows, evenly spread."""
    return rows[:: -(-len(rows) // 150)]


def _line(predictions: list[Prediction], targets: Tensor | None) -> dict[str, Any]:
    """Return a band of mean ± 2 standard deviations, or the entropy, along the line."""
    if predictions[0].probs is not None:
        ends = (0.0, math.log(predictions[0].probs.shape[1]))
        return {"kind": "area", "frames": [{"area": _spread(p)} for p in predictions], "ends": ends}
    y = _first(targets)
    room = 1.2 * float(y.max() - y.min()) or 1.0
    low, high = float(y.min()) - room, float(y.max()) + room
    reach = 3 * (high - low)  # what goes far beyond the figure is cut
    means = [_first(p.mean).nan_to_num(nan=high).clamp(low - reach, high + reach) for p in predictions]
    deviations = [_first(p.std).nan_to_num(nan=reach).clamp(max=reach) for p in predictions]
    frames = [{"mean": mean, "std": std} for mean, std in zip(means, deviations, strict=True)]
    return {"kind": "band", "frames": frames, "ends": (low, high)}


def _plane(predictions: list[Prediction]) -> dict[str, Any]:
    """Return uncertainty on the square as base64 of bytes, one scale for all frames: linear for entropies, else logarithmic."""
    values = np.stack([_spread(p).numpy() for p in predictions])
    if predictions[0].probs is not None:
        low, high = 0.0, math.log(predictions[0].probs.shape[1])
        shares = values / high
    else:
        positive = values[np.isfinite(values) & (values > 0)]
        low, high = (float(positive.min()), float(positive.max())) if len(positive) else (1.0, 2.0)
        high = high if high > low else 2 * low
        shares = np.log(np.maximum(values, low) / low) / math.log(high / low)
    levels = np.clip(np.nan_to_num(shares, nan=1.0, posinf=1.0) * 255, 0, 255).round().astype(np.uint8)
    frames = [base64.b64encode(frame.tobytes()).decode() for frame in levels]
    return {"kind": "map", "side": 44, "frames": frames, "ends": (low, high)}
