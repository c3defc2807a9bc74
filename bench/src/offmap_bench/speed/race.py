"""Contestants take turns, so that a busy machine slows all of them, and the best turn of each counts."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Timing:
    """Seconds of every turn: of the processor, and on the wall.

    With one thread the two agree on an idle core. On a shared one the wall also counts the waiting, and more of it the longer
    a contestant runs: ratios of processor time are the fair ones.
    """

    cpu: list[float] = field(default_factory=list)
    wall: list[float] = field(default_factory=list)

    @property
    def best(self) -> float:
        return min(self.cpu)

    @property
    def median(self) -> float:
        return statistics.median(self.cpu)


def race(
    contestants: Mapping[str, Callable[[], object]], *, rounds: int, at_most: Mapping[str, int] | None = None
) -> dict[str, Timing]:
    """Every contestant in turn, `rounds` times (or as often as `at_most` says), after one unmeasured turn of the short ones."""
    limits = dict.fromkeys(contestants, rounds) | dict(at_most or {})
    timings = {name: Timing() for name in contestants}
    for name, run in contestants.items():
        if limits[name] == rounds:
            run()
    for turn in range(rounds):
        for name, run in contestants.items():
            if turn < limits[name]:
                cpu, wall = time.process_time(), time.perf_counter()
                run()
                timings[name].cpu.append(time.process_time() - cpu)
                timings[name].wall.append(time.perf_counter() - wall)
    return timings


def repeated(calls: int, call: Callable[[], object]) -> Callable[[], object]:
    """So many calls in a row."""
    return lambda: [call() for _ in range(calls)]
