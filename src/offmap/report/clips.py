"""Figure 4 of the paper for any guard over a line or a plane: what it predicts as its weights are clipped, from ∞ to 0."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from offmap.evaluation import Evaluation, Points
from offmap.guard import Guard
from offmap.likelihoods import Prediction
from offmap.posterior.predictive import Stochastic
from offmap.report.axis import nice
from offmap.report.figures import Array
from offmap.report.measured import short
from offmap.scores import uncertainty as scores

CLIPS: tuple[float | None, ...] = (None, 5.0, 2.0, 1.5, 1.0, 0.7, 0.5, 0.3, 0.2, 0.1, 0.05, 0.0)
"""The frames, with the guard's own clip among them."""

LINE, SIDE = 161, 44
"""Points of a line; points of one side of a square."""

DOTS = 150
"""Points of a set that are drawn."""

MARGIN = 0.06
"""Room around the points, as a share of their range."""


def frames(evaluation: Evaluation, name: str) -> dict[str, Any] | str:
    """A frame for every clip, or why there are none, in words."""
    guard, points = evaluation.scorers.get(name), evaluation.points
    if not isinstance(guard, Guard):
        return "Only guards draw weights that can be clipped."
    if not isinstance(getattr(guard.predictive, "whole", guard.predictive), Stochastic):
        return "This guard does not draw its weights around those of a model, so there is nothing to clip."
    if set(points) != set(evaluation.scores[name]):
        return "The inputs are more than two numbers, so that the predictions cannot be drawn as a picture."
    all_params = torch.cat([p.inputs for p in points.values()])
    low, high = all_params.amin(0), all_params.amax(0)
    room = MARGIN * (high - low) + 1e-9 * high.abs().clamp_min(1)
    low, high = low - room, high + room
    x = torch.linspace(float(low[0]), float(high[0]), LINE)[:, None] if len(low) == 1 else _square(low, high)
    clips = _clips(guard.clip)
    pictures = [guard.predict(x, clip=clip) for clip in clips]
    answers = [{label: uncertainty(guard.predict(p.inputs, clip=clip)) for label, p in points.items()} for clip in clips]
    draw = _line if len(low) == 1 else _plane
    return {
        "clips": ["∞" if clip is None else f"{clip:.3g}" for clip in clips],
        "own": clips.index(guard.clip),
        "unit": "predictive entropy" if pictures[0].probs is not None else "standard deviation",
        "medians": [{label: short(float(values.median())) for label, values in found.items()} for found in answers],
        "low": [short(float(v)) for v in low], "high": [short(float(v)) for v in high],
        "ticks": [nice(float(a), float(b), 5) for a, b in zip(low, high, strict=True)],
        "points": {label: _dots(p) for label, p in points.items()},
        **draw(pictures, points),
    }  # fmt: skip


def _clips(own: float | None) -> list[float | None]:
    """All clips in falling order, None for no clip at all first."""
    return sorted({*CLIPS, own}, key=lambda clip: -math.inf if clip is None else -clip)


def _square(low: Tensor, high: Tensor) -> Tensor:
    """Points of a grid, row by row from the lowest second number up: (n², 2)."""
    across, up = (torch.linspace(float(a), float(b), SIDE) for a, b in zip(low, high, strict=True))
    y, x = torch.meshgrid(up, across, indexing="ij")
    return torch.stack([x, y], -1).flatten(0, 1)


def uncertainty(prediction: Prediction) -> Tensor:
    """The entropy of a classification or the standard deviation of a regression's first target: (B,)."""
    if prediction.probs is not None:
        return first(scores.predictive_entropy(prediction.probs[None]))
    assert prediction.std is not None
    return first(prediction.std)


def first(values: Tensor) -> Tensor:
    """The first target or position, on the CPU: (B,) or (B, ...) -> (B,)."""
    return (values if values.ndim == 1 else values.flatten(1)[:, 0]).cpu()


def _dots(points: Points) -> dict[str, Any]:
    """Some points, with their class or their first target."""
    some = slice(None, None, -(-len(points.inputs) // DOTS))
    targets = None if points.targets is None else [short(v) for v in first(points.targets[some]).double().tolist()]
    return {"x": [[short(v) for v in row] for row in points.inputs[some].tolist()], "y": targets}


def _line(pictures: list[Prediction], points: Mapping[str, Points]) -> dict[str, Any]:
    """A band of mean ± 2 standard deviations, or the entropy, along the line."""
    if pictures[0].probs is not None:
        top = math.log(pictures[0].probs.shape[1])
        curves = [{"area": [short(v) for v in uncertainty(p).tolist()]} for p in pictures]
        return {"kind": "area", "frames": curves, "ends": [0.0, short(top)], "levels": nice(0.0, top, 4)}
    targets = points["test"].targets
    assert targets is not None
    y = first(targets).double()
    room = 1.2 * float(y.max() - y.min()) or 1.0
    low, high = float(y.min()) - room, float(y.max()) + room
    bands = [{"mean": _limited(p.mean, low, high), "std": _limited(p.std, 0.0, high - low)} for p in pictures]
    return {"kind": "band", "frames": bands, "ends": [short(low), short(high)], "levels": nice(low, high, 5)}


def _limited(values: Tensor | None, low: float, high: float) -> list[float | None]:
    """Values that go far beyond the picture are cut off there: nobody sees them, and files are shorter."""
    assert values is not None
    span = high - low
    return [short(v) for v in first(values).double().nan_to_num(nan=high).clamp(low - 3 * span, high + 3 * span).tolist()]


def _plane(pictures: list[Prediction], points: Mapping[str, Points]) -> dict[str, Any]:
    """Uncertainty on the square as bytes, on one scale for all frames: even for entropies, logarithmic for deviations."""
    values = [uncertainty(p).double().numpy() for p in pictures]
    if pictures[0].probs is not None:
        low, high = 0.0, math.log(pictures[0].probs.shape[1])
        shares = [v / high for v in values]
    else:
        known = np.concatenate(values)
        known = known[np.isfinite(known) & (known > 0)]
        low, high = (float(f(known)) for f in (np.min, np.max)) if len(known) else (1.0, 2.0)
        high = high if high > low else 2 * low
        shares = [np.log(np.maximum(v, low) / low) / math.log(high / low) for v in values]
    return {"kind": "map", "side": SIDE, "frames": [_bytes(share) for share in shares], "ends": [short(low), short(high)]}


def _bytes(shares: Array) -> str:
    """Shares from 0 to 1 as base64 of one byte each; what is not finite is at the top."""
    levels = np.clip(np.nan_to_num(shares, nan=1.0, posinf=1.0) * 255, 0, 255).round().astype(np.uint8)
    return base64.b64encode(levels.tobytes()).decode()
