"""Scalars over a data set, as pure functions of 1-D tensors; each is computed in float64."""

from __future__ import annotations

from offmap.metrics.calibration import brier, ence, expected_calibration_error, quantile_ece, reference_ece
from offmap.metrics.intervals import coverage, interval_score, mean_width
from offmap.metrics.ood import aupr_in, aupr_out, auroc, fpr_at
from offmap.metrics.ranking import aurc, mean_ranks, rank_correlation, risk_coverage

HIGHER_IS_BETTER: dict[str, bool | None] = {
    "auroc": True,
    "aupr_in": True,
    "aupr_out": True,
    "fpr_at": False,
    "expected_calibration_error": False,
    "brier": False,
    "ence": False,
    "quantile_ece": False,
    "reference_ece": False,
    "coverage": None,  # neither: best at the level that was asked for
    "mean_width": False,
    "interval_score": False,
    "aurc": False,
    "mean_ranks": False,
    "rank_correlation": None,
}
"""Which way each metric improves; None where the best value lies between."""

__all__ = [
    "HIGHER_IS_BETTER",
    "aupr_in",
    "aupr_out",
    "aurc",
    "auroc",
    "brier",
    "coverage",
    "ence",
    "expected_calibration_error",
    "fpr_at",
    "interval_score",
    "mean_ranks",
    "mean_width",
    "quantile_ece",
    "rank_correlation",
    "reference_ece",
    "risk_coverage",
]
