"""What the server counts for Prometheus and the live page, and when the share of off-map rows is an alarm."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from offmap.serve.logs import log_event
from offmap.serve.model import Model
from offmap.serve.parsing import Arrays

ALARM_CHANCE = 1e-5
"""How likely sound rows are to raise the alarm, each time that a window of them is looked at."""


@cache
def alert_count(n: int, false_alarms: float, calibration_rows: int | None) -> int:
    """Return how many flagged rows among n are no alarm: more have a chance of at most `ALARM_CHANCE` if all is sound.

    In-distribution rows are flagged as often as promised on average over sets of calibration rows; a threshold of few rows may be
    off by much. So the number is beta-binomial, which is exact for exchangeable rows; binomial without `calibration_rows`.

    >>> alert_count(1000, 0.05, None), alert_count(1000, 0.05, 1000), alert_count(1000, 0.05, 100), alert_count(3, 0.05, 100)
    (82, 99, 197, 3)
    """
    above = None if calibration_rows is None else max(1, math.floor(false_alarms * (calibration_rows + 1) + 1e-9))

    def log_chance(k: int) -> float:
        ways = math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
        if above is None or calibration_rows is None:
            return ways + k * math.log(false_alarms) + (n - k) * math.log1p(-false_alarms)
        below = calibration_rows + 1 - above
        return ways + _log_beta(k + above, n - k + below) - _log_beta(above, below)

    total = 0.0
    for k in range(n):
        total += math.exp(log_chance(k))
        if 1 - total <= ALARM_CHANCE:
            return k
    return n


def _log_beta(a: float, b: float) -> float:
    return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)


class Monitor:
    """Counts since the start for Prometheus, and the share of off-map rows among the latest `window`.

    The alarm is on while that share is above `alert`, by default above what the promised share of false alarms explains.
    """

    def __init__(
        self, model: Model, window: int = 1000, alert: float | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        registry = CollectorRegistry()
        self.registry: CollectorRegistry = registry
        self.requests: Counter = Counter("offmap_requests", "Requests to /score by HTTP status.", ["code"], registry=registry)
        self.rows: Counter = Counter("offmap_rows", "Rows scored.", registry=registry)
        self.flagged: Counter = Counter("offmap_rows_flagged", "Rows called off the map.", registry=registry)
        gauges = {
            "share": ("Share of off-map rows among the latest.", lambda: self.share),
            "alert_share": ("Share above which is alarm.", lambda: self.alert_share),
            "alert": ("1 if the share is above that, else 0.", lambda: self.alarm),
            "threshold": ("Scores above it are called off the map.", lambda: model.threshold),
            "false_alarms": ("Promised share of in-distribution rows that are called so.", lambda: model.false_alarms),
        }
        for name, (text, value) in gauges.items():
            Gauge(f"offmap_{name}", text, registry=registry).set_function(value)
        finite = {float(level) for level in (*model.levels, model.threshold) if np.isfinite(level)}
        self.bounds: list[float] = sorted(finite) or [0.0]
        self.scores: Histogram = Histogram("offmap_score", "Scores of rows.", buckets=self.bounds, registry=registry)
        bounds = (0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 1.0)
        there = registry if "p_value" in model.outputs else None
        self.p_values: Histogram = Histogram("offmap_p_value", "P-values of rows.", buckets=bounds, registry=there)
        bounds = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
        text = "Seconds that requests to /score took."
        self.seconds: Histogram = Histogram("offmap_seconds", text, buckets=bounds, registry=registry)
        self.model: Model = model
        self.alarm: bool = False
        self._alert, self._clock, self._start = alert, clock, clock()
        self.latest: deque[bool] = deque(maxlen=window)
        self.line: deque[tuple[float, float]] = deque(maxlen=300)  # of the live page, a point a second at most

    def count_rows(self, outputs: Arrays) -> None:
        """Count the rows of one response; log when the alarm begins or ends."""
        infinite = np.nextafter(self.bounds[-1], np.inf)  # counts in the last bucket, but does not spoil the sum
        for score in np.where(np.isfinite(outputs["score"]), outputs["score"], infinite).tolist():
            self.scores.observe(score)
        for p_value in outputs["p_value"].tolist() if "p_value" in outputs else []:
            self.p_values.observe(p_value)
        self.latest.extend(outputs["ood"].tolist())
        self.rows.inc(len(outputs["ood"]))
        self.flagged.inc(int(outputs["ood"].sum()))
        now = self._clock() - self._start
        if self.line and now - self.line[-1][0] < 1.0:
            now = self.line.pop()[0]
        self.line.append((now, self.share))
        before, self.alarm = self.alarm, self.share > self.alert_share
        if self.alarm != before:
            line = f"{100 * self.share:.1f} % of the latest {len(self.latest)} rows are off the map"
            what = f"Alarm on: {line}, more than {100 * self.alert_share:.1f} %." if self.alarm else f"Alarm off: {line}."
            level, event = (logging.WARNING, "alarm on") if self.alarm else (logging.INFO, "alarm off")
            log_event(level, event, what, share=self.share, alert_share=self.alert_share, window=len(self.latest))

    @property
    def share(self) -> float:
        """Share of off-map rows among the latest; 0 before the first."""
        return sum(self.latest) / len(self.latest) if self.latest else 0.0

    @property
    def alert_share(self) -> float:
        """Share of as many rows as the window has above which is alarm."""
        n = len(self.latest) or self.latest.maxlen or 1
        n -= n % max(1, n // 100)  # a hundredth fewer rows at most, so that few numbers are looked at
        return alert_count(n, self.model.false_alarms, self.model.calibration_rows) / n if self._alert is None else self._alert

    def to_dict(self) -> dict[str, Any]:
        """Return what the live page draws."""
        rows, flagged = (int(self.registry.get_sample_value(f"offmap_{name}_total") or 0) for name in ("rows", "rows_flagged"))
        return {
            "share": self.share, "alert": self.alert_share, "alarm": self.alarm, "promised": self.model.false_alarms,
            "window": len(self.latest), "rows": rows, "flagged": flagged,
            "line": [[round(t, 1), share] for t, share in self.line],
        }  # fmt: skip
