"""Metrics over a data set, as pure functions of 1-D tensors, computed in float64."""

from offmap.metrics.calibration import (
    brier,
    confidence_curve,
    coverage,
    coverage_curve,
    ence,
    expected_calibration_error,
    interval_score,
    mean_width,
    quantile_ece,
)  # fmt: skip
from offmap.metrics.ranking import aupr_in, aupr_out, aurc, auroc, fpr_at, mean_ranks, rank_correlation, risk_coverage

LOWER_IS_BETTER = (
    "fpr_at", "expected_calibration_error", "brier", "ence", "quantile_ece", "mean_width", "interval_score", "aurc",
    "mean_ranks",
)  # fmt: skip
HIGHER_IS_BETTER: dict[str, bool | None] = {
    **dict.fromkeys(("auroc", "aupr_in", "aupr_out"), True),
    **dict.fromkeys(LOWER_IS_BETTER, False),
    **dict.fromkeys(("coverage", "rank_correlation"), None),
}
"""Which way each metric improves; None where the best value lies between."""

__all__ = [
    "HIGHER_IS_BETTER", "aupr_in", "aupr_out", "aurc", "auroc", "brier", "confidence_curve", "coverage", "coverage_curve", "ence",
    "expected_calibration_error", "fpr_at", "interval_score", "mean_ranks", "mean_width", "quantile_ece", "rank_correlation",
    "risk_coverage",
]  # fmt: skip
