"""What the server has seen: counts for Prometheus, and the share of off-map rows among the latest."""

from __future__ import annotations

import bisect
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from offmap.serve.model import Arrays

POINTS = 300
"""Of the live page's line, one a second at most."""

SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
"""Upper bounds of the time that a request takes."""


class Histogram:
    """Counts below some bounds, as Prometheus wants them."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = sorted({float(bound) for bound in bounds if np.isfinite(bound)})
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def add(self, value: float) -> None:
        """Count one value; an infinite one counts, but is not added up."""
        self.counts[bisect.bisect_left(self.bounds, value)] += 1
        self.total += value if np.isfinite(value) else 0.0

    def lines(self, name: str) -> list[str]:
        """Bucket, sum and count.

        >>> histogram = Histogram([1.0])
        >>> histogram.add(0.5)
        >>> histogram.lines("x")
        ['x_bucket{le="1.0"} 1', 'x_bucket{le="+Inf"} 1', 'x_sum 0.5', 'x_count 1']
        """
        below = np.cumsum(self.counts).tolist()
        bounds = [*(str(bound) for bound in self.bounds), "+Inf"]
        lines = [f'{name}_bucket{{le="{bound}"}} {count}' for bound, count in zip(bounds, below, strict=True)]
        return [*lines, f"{name}_sum {self.total}", f"{name}_count {below[-1]}"]


class Seen:
    """Counts since the start, and the latest `window` verdicts; `alert` is the share above which something is wrong."""

    def __init__(
        self, levels: Sequence[float], *, window: int, alert: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.requests: Counter[int] = Counter()
        self.rows = self.flagged = 0
        self.scores, self.seconds = Histogram(levels), Histogram(SECONDS)
        self.verdicts: deque[bool] = deque(maxlen=window)
        self.recent = 0
        self.alert, self.clock = alert, clock
        self.start = clock()
        self.line: deque[tuple[float, float]] = deque(maxlen=POINTS)

    def answered(self, told: Arrays) -> None:
        """Count the rows of one answer."""
        for score, ood in zip(told["score"].tolist(), told["ood"].tolist(), strict=True):
            self.scores.add(score)
            if len(self.verdicts) == self.verdicts.maxlen:
                self.recent -= self.verdicts[0]
            self.verdicts.append(ood)
            self.recent += ood
            self.flagged += ood
            self.rows += 1
        now = self.clock() - self.start
        if self.line and now - self.line[-1][0] < 1.0:
            self.line[-1] = (self.line[-1][0], self.share)
        else:
            self.line.append((now, self.share))

    def ended(self, status: int, seconds: float) -> None:
        """Count one request."""
        self.requests[status] += 1
        self.seconds.add(seconds)

    @property
    def share(self) -> float:
        """Off-map rows among the latest; 0 before the first."""
        return self.recent / len(self.verdicts) if self.verdicts else 0.0

    def live(self) -> dict[str, Any]:
        """What the live page draws."""
        return {
            "share": self.share, "alert": self.alert, "alarm": self.share > self.alert, "window": len(self.verdicts),
            "rows": self.rows, "flagged": self.flagged, "line": [[round(t, 1), share] for t, share in self.line],
        }  # fmt: skip

    def text(self, threshold: float) -> str:
        """All of it in Prometheus' text format."""
        lines: list[str] = []

        def tell(name: str, kind: str, help_: str, values: Sequence[str]) -> None:
            lines.extend([f"# HELP {name} {help_}", f"# TYPE {name} {kind}", *values])

        codes = [f'offmap_requests_total{{code="{code}"}} {count}' for code, count in sorted(self.requests.items())]
        tell("offmap_requests_total", "counter", "Requests to /score by HTTP status.", codes)
        tell("offmap_rows_total", "counter", "Rows scored.", [f"offmap_rows_total {self.rows}"])
        tell("offmap_rows_flagged_total", "counter", "Rows called off the map.", [f"offmap_rows_flagged_total {self.flagged}"])
        tell("offmap_share", "gauge", "Share of off-map rows among the latest.", [f"offmap_share {self.share}"])
        tell(
            "offmap_alert", "gauge", "1 if that share is above the alert line.", [f"offmap_alert {int(self.share > self.alert)}"]
        )
        tell("offmap_threshold", "gauge", "Scores above it are called off the map.", [f"offmap_threshold {threshold}"])
        tell("offmap_score", "histogram", "Scores of rows.", self.scores.lines("offmap_score"))
        tell("offmap_seconds", "histogram", "Seconds that requests to /score took.", self.seconds.lines("offmap_seconds"))
        return "\n".join(lines) + "\n"
