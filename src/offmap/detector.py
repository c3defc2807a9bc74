"""What a guard answers, and what it remembers of in-distribution data."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import TypeVar

import torch
from torch import Tensor

from offmap import conformal
from offmap._types import IGNORED, Inputs
from offmap.data import lay
from offmap.errors import NotFittedError
from offmap.likelihoods import Prediction

logger = logging.getLogger("offmap")


@dataclass(frozen=True, kw_only=True)
class Result(Prediction):
    """A prediction from clipped draws with a verdict from unclipped ones.

    `score` (B,) is higher for more OOD inputs, `ood` is score > threshold, `p_value` the conformal p-value (the share of
    in-distribution data at least as OOD); `score_map` (B, *positions) keeps the positions of dense outputs, NaN where there is
    padding. Batches of different lengths are joined at the length of the longest: NaN, label −100.
    """

    score: Tensor
    ood: Tensor
    p_value: Tensor
    score_map: Tensor | None = None


@dataclass(frozen=True)
class Interval:
    """Lower and upper ends in the shape of the mean; infinite when the calibration set is too small for the level."""

    lower: Tensor
    upper: Tensor


@dataclass(frozen=True)
class Calibration:
    """What in-distribution data looked like: scores (n,), and how far off predictions were, `residuals` (n,) or (n, K); for dense outputs
    those of one position per row.

    `exact` is False when the same data also chose the risk threshold or the clip: guarantees are then approximate.
    """

    scores: Tensor
    residuals: Tensor
    false_alarms: float = 0.05
    exact: bool = True

    @property
    def threshold(self) -> float:
        """The ⌈(1 − false alarms)(n + 1)⌉-th smallest score; infinite when n is too small.

        >>> Calibration(torch.arange(1.0, 40.0), torch.zeros(39)).threshold
        38.0
        """
        return float(conformal.quantile(self.scores, 1 - self.false_alarms))


def interval_around(prediction: Prediction, calibration: Calibration, level: float) -> Interval:
    """Conformal interval mean ± q·std; infinite when calibration data are too few for the level."""
    if prediction.mean is None or prediction.std is None:
        raise NotFittedError("Expected a regression guard for `interval`; use `prediction_set` for classification.")
    radius = conformal.quantile(calibration.residuals, level).to(prediction.std) * prediction.std
    return Interval(prediction.mean - radius, prediction.mean + radius)


def likely_classes(prediction: Prediction, calibration: Calibration, level: float) -> Tensor:
    """Classes that cannot be ruled out at this level, (B, C) bool; all of them when calibration data are too few."""
    if prediction.probs is None:
        raise NotFittedError("Expected a classification guard for `prediction_set`; use `interval` for regression.")
    return 1 - prediction.probs <= conformal.quantile(calibration.residuals, level).to(prediction.probs)


def tell_if_infinite(threshold: float, rows: int, false_alarms: float, name: str = "valid") -> None:
    """Say why nothing will be flagged, if so: too few rows for the rate of false alarms, or scores that overflow."""
    needed = math.ceil(1 / false_alarms * (1 - 1e-12)) - 1
    if rows < needed:
        logger.warning(
            "The threshold is infinite, so nothing will be flagged: %d calibration rows are too few for a false alarm rate of "
            "%g. Pass at least %d.", rows, false_alarms, needed,
        )  # fmt: skip
    elif threshold == math.inf:
        logger.warning("The threshold is infinite, so nothing will be flagged: the scores of `%s` overflow.", name)


def attended(inputs: Inputs, scores: Tensor) -> Tensor | None:
    """Which positions of a map (B, T) are no padding, by the `attention_mask` (B, T) of a dict of inputs, if it has one.

    A map one shorter than the mask holds what is told of the next tokens: the mask's last columns belong to it.

    >>> attended({"attention_mask": torch.tensor([[1, 1, 0]])}, torch.zeros(1, 2))
    tensor([[ True, False]])
    """
    mask = inputs.get("attention_mask") if isinstance(inputs, dict) else None
    if mask is None or mask.ndim != 2 or scores.ndim != 2 or mask.shape[1] - scores.shape[1] not in (0, 1):
        return None
    return mask[:, mask.shape[1] - scores.shape[1] :] != 0


def reduced(scores: Tensor, how: str | None) -> Tensor:
    """Positions to one score per example, NaN left out: (B, *positions) -> (B,); infinite where no position is left.

    >>> reduced(torch.tensor([[1.0, 3.0, torch.nan]]), "mean")
    tensor([2.])
    """
    if how is None or scores.ndim == 1:
        return scores
    flat = scores.flatten(1)
    missing = flat.isnan()
    result = flat.nanmean(1) if how == "mean" else flat.masked_fill(missing, -torch.inf).amax(1)
    return result.masked_fill(missing.all(1), torch.inf)


Record = TypeVar("Record", bound=Prediction)
Part = TypeVar("Part")


def joined(parts: list[Record]) -> Record:
    """One answer out of the answers to consecutive rows."""
    whole = {}
    for f in fields(parts[0]):
        values = [getattr(part, f.name) for part in parts]
        whole[f.name] = None if values[0] is None else concat_padded(values)
    return type(parts[0])(**whole)


def concat_padded(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Rows one after another; where positions differ in number, the missing ones are NaN, −100 or False by type.

    >>> concat_padded([torch.tensor([[0.5, 1.0]]), torch.tensor([[2.0]])])
    tensor([[0.5000, 1.0000],
            [2.0000,    nan]])
    """
    kind = parts[0].dtype
    return lay(parts, torch.nan if kind.is_floating_point else False if kind == torch.bool else IGNORED, dim)


def gathered(parts: Iterable[Part], join: Callable[[list[Part]], Part]) -> Part:
    """All parts joined, in a few long pieces on the way.

    Many short ones, left between the large temporaries of later blocks, would keep the allocator from using freed memory again:
    a stream of a million rows then holds 100 MB more than one of ten thousand.
    """
    pieces: list[tuple[int, Part]] = []
    for part in parts:
        size = 1
        while pieces and pieces[-1][0] <= size:
            before, piece = pieces.pop()
            size, part = size + before, join([piece, part])
        pieces.append((size, part))
    return join([piece for _, piece in pieces])
