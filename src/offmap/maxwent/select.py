"""Choices made on validation data alone: the clip, and the tradeoff."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

from torch import Tensor

CLIPS: tuple[float, ...] = (math.inf, 10.0, 5.0, 2.0, 1.0, 0.5, 0.2, 0.1, 0.0)
"""The paper's grid."""

Fitted = TypeVar("Fitted")


def lowest(candidates: Sequence[float], risk: Callable[[float], float]) -> tuple[float, dict[float, float]]:
    """The candidate of lowest risk (the first of equals), and every risk; NaN never wins.

    >>> lowest([3.0, 1.0, -1.0], lambda c: c * c)
    (1.0, {3.0: 9.0, 1.0: 1.0, -1.0: 1.0})
    """
    risks = {c: risk(c) for c in candidates}
    return min(candidates, key=lambda c: math.inf if math.isnan(risks[c]) else risks[c]), risks


def highest_entropy(fits: Sequence[Fitted], entropy: Callable[[Fitted], Tensor], passed: Callable[[Fitted], bool]) -> Fitted:
    """Appendix B: among the fits whose validation risk is at most τ, the one of highest mean entropy; of all, if none passes."""
    passing = [fit for fit in fits if passed(fit)]
    return max(passing or fits, key=lambda fit: float(entropy(fit).detach().mean()))
