"""What a guard answers, and what it remembers of familiar data."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import TypeVar

import torch
from torch import Tensor

from offmap import conformal
from offmap.likelihoods import Prediction


@dataclass(frozen=True, kw_only=True)
class Answer(Prediction):
    """A prediction from clipped draws with a verdict from unclipped ones.

    `score` (B,) is higher for stranger inputs, `ood` is score > threshold, `p_value` the conformal p-value (the share of
    familiar data at least as strange); `score_map` (B, *positions) keeps the positions of dense outputs.
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
    """What familiar data looked like: scores (n,), and how far off predictions were, `misses` (n,) or (n, K).

    `exact` is False when the same data also chose the risk threshold or the clip: guarantees are then approximate.
    """

    scores: Tensor
    misses: Tensor
    false_alarms: float = 0.05
    exact: bool = True

    @property
    def threshold(self) -> float:
        """The ⌈(1 − false alarms)(n + 1)⌉-th smallest score; infinite when n is too small.

        >>> Calibration(torch.arange(1.0, 40.0), torch.zeros(39)).threshold
        38.0
        """
        return float(conformal.quantile(self.scores, 1 - self.false_alarms))


Record = TypeVar("Record", bound=Prediction)
Part = TypeVar("Part")


def joined(parts: list[Record]) -> Record:
    """One answer out of the answers to consecutive rows."""
    whole = {}
    for f in fields(parts[0]):
        values = [getattr(part, f.name) for part in parts]
        whole[f.name] = None if values[0] is None else torch.cat(values)
    return type(parts[0])(**whole)


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
