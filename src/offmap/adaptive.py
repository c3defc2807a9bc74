"""`AdaptiveThreshold`: a threshold that follows a stream of scores, so that in the long run the rate of alarms stays as set."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from offmap import checks
from offmap.detector import Detector
from offmap.errors import ConfigError, DataError, ShapeError

LARGEST = 1e38  # distance from the centre in spreads; an infinite score counts as this


class AdaptiveThreshold:
    """Judge a stream by a threshold that rises after each alarm and falls a little after each other row.

    With u = asinh((score − centre)/unit), both of the calibration scores, each row moves the threshold q of u to
    q + lr·(1[u > q] − false_alarms): the online quantile of Gibbs & Candès (2021) and Angelopoulos, Barber & Bates (2024).
    Whatever the scores do, drift, jump or answer the threshold, the share of T rows that is flagged differs from `false_alarms`
    by at most (R + lr)/(lr·T), where R is the range of u and the first q. Nothing needs to be exchangeable.

    The price: it gets used to what lasts. A jump of u by D is flagged for about D/lr rows and then taken as normal. Where
    normal rows become known, pass them as `normal`: only these move the threshold then, and the promise is for these.

    Args:
        detector: A calibrated guard or other detector, whose threshold is the first one.
        lr: How far an alarm moves the threshold; 1 is about from the median of the calibration scores to their 95 % quantile.
            Larger follows faster and is less steady.
        false_alarms: Share of rows to flag; None: as the detector was calibrated.

    >>> import offmap
    >>> x = torch.linspace(-1, 1, 200).unsqueeze(1)
    >>> guard = offmap.fit(torch.nn.Linear(1, 1), (x[::2], x[::2, 0]), (x[1::2], x[1::2, 0]), solver="closed-form")
    >>> adaptive, scores = AdaptiveThreshold(guard), guard.score(x * torch.linspace(1, 3, 100).repeat(2).unsqueeze(1))
    >>> flagged = adaptive.update(scores.repeat(200))
    >>> adaptive.rows, round(adaptive.flagged / adaptive.rows, 2)
    (40000, 0.05)
    """

    def __init__(self, detector: Detector, *, lr: float = 0.02, false_alarms: float | None = None) -> None:
        if not isinstance(detector, Detector):
            raise ConfigError(f"Expected a guard or another detector, but got {type(detector).__name__}.")
        calibration = detector.calibration
        scores = calibration.scores.detach().cpu().double()
        scores = scores[scores.isfinite()]
        if not len(scores):
            raise DataError("Expected a detector with finite calibration scores, but all of them overflow.")
        rate = calibration.false_alarms if false_alarms is None else false_alarms
        self.false_alarms: float = checks.fraction("false_alarms", rate, example=0.05)
        self.lr: float = checks.number("lr", lr, above=0)
        centre, upper, first = (float(scores.quantile(level)) for level in (0.5, 0.95, 1 - self.false_alarms))
        self.centre: float = centre
        self.unit: float = (upper - centre) or 1.0
        if self.false_alarms == calibration.false_alarms and math.isfinite(calibration.threshold):
            first = calibration.threshold
        self.level: float = math.asinh((first - centre) / self.unit)
        self.rows: int = 0
        self.flagged: int = 0

    @property
    def threshold(self) -> float:
        """The threshold for the next score."""
        return self.centre + self.unit * math.sinh(self.level)

    def update(self, scores: Tensor, normal: Tensor | None = None) -> Tensor:
        """Judge rows in their order and learn from each before the next: (B,) -> (B,) bool, True where OOD.

        Args:
            scores: (B,) of consecutive rows, of the detector's `score`. Blocks of any length give the same as single rows.
            normal: (B,) bool, rows known to be in-distribution, if only these are to move the threshold; None: all do.
        """
        scores = checks.tensor("scores", torch.as_tensor(scores, device="cpu"))
        if scores.ndim != 1:
            raise ShapeError(f"Expected `scores` of shape (B,), but got {tuple(scores.shape)}.")
        if count := int(scores.isnan().sum()):
            raise DataError(f"Expected `scores` without NaN, but {count} of {len(scores)} are NaN.")
        learned = (
            torch.ones(len(scores), dtype=torch.bool, device="cpu") if normal is None else torch.as_tensor(normal, device="cpu")
        )
        if learned.shape != scores.shape or learned.dtype != torch.bool:
            raise ShapeError(f"Expected `normal` as bool {tuple(scores.shape)}, but got {learned.dtype} {tuple(learned.shape)}.")
        distances = ((scores.detach().cpu().double() - self.centre) / self.unit).clamp(-LARGEST, LARGEST)
        rise, fall, level, verdicts = self.lr * (1 - self.false_alarms), self.lr * self.false_alarms, self.level, list[bool]()
        for value, learn in zip(distances.asinh().tolist(), learned.tolist(), strict=True):
            ood = value > level
            verdicts.append(ood)
            if learn:
                level = level + rise if ood else level - fall
        self.level = level
        flagged = torch.tensor(verdicts, dtype=torch.bool, device=scores.device)
        self.rows += int(learned.sum())
        self.flagged += int((flagged.cpu() & learned).sum())
        return flagged

    def state_dict(self) -> dict[str, float]:
        """Return all that it knows as plain numbers, which JSON can hold."""
        return dict(vars(self))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from an earlier state.

        Args:
            state: What `state_dict` returned.
        """
        if set(state) != set(vars(self)) or not all(math.isfinite(checks.number(n, v)) for n, v in state.items()):
            raise ConfigError(f"Expected finite {', '.join(vars(self))} in the state, but got {', '.join(map(str, state))}.")
        vars(self).update(state)

    def __repr__(self) -> str:
        return (
            f"AdaptiveThreshold(threshold {self.threshold:.4g}, false_alarms {self.false_alarms:g}, lr {self.lr:g}): "
            f"{self.flagged} of {self.rows} rows flagged"
        )
