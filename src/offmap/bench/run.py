"""Run what a store lacks: resumable, and one failed cell never loses the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import torch

from offmap.bench.cell import Bench
from offmap.bench.plan import Cell
from offmap.bench.store import read_all, write
from offmap.engine.local import run_jobs

ENDS = ("done", "failed", "before")
"""What became of a cell; "before": its record was there."""

Report = Callable[[str], None]
"""Told what is about to be done, and one of ENDS for every cell."""


@dataclass(frozen=True)
class Outcome:
    """How many cells a run found done and finished; why others failed, {reason: cells}; and the records it could not read."""

    before: int
    done: int
    failures: dict[str, int]
    damaged: dict[str, str]

    @property
    def failed(self) -> int:
        """How many cells failed."""
        return sum(self.failures.values())


def run(cells: Sequence[Cell], folder: Path, *, workers: int = 1, report: Report = lambda told: None) -> Outcome:
    """Run the cells whose record is missing, failed, damaged or made with other defaults.

    Cells of one task and seed go to one worker: they share hosts, and some a fit. Every record is written as soon as its cell is
    done.
    """
    found = read_all(folder)
    lacking = [cell for cell in cells if found.state(cell) != "ok"]
    for _ in range(len(cells) - len(lacking)):
        report("before")
    if workers <= 1:
        reasons = [run_group(lacking, folder, report=report)]
    else:
        groups = groupby(lacking, key=lambda cell: (cell.task, cell.seed))
        jobs = [(run_group, (list(group), folder)) for _, group in groups]
        reasons = run_jobs(jobs, workers=workers, report=lambda number, told: report(told))
    failures = dict(Counter(reason for group in reasons for reason in group))
    return Outcome(len(cells) - len(lacking), len(lacking) - sum(failures.values()), failures, found.damaged)


def run_group(cells: Sequence[Cell], folder: Path, *, report: Report) -> list[str]:
    """Cells one after another, with one thread: small tensors run slower on two. Returns why some failed."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    bench, failures = Bench(), list[str]()
    try:
        for cell in cells:
            report(f"{cell.label} on {cell.task}, seed {cell.seed}")
            record = bench.run(cell)
            write(folder, record)
            if record.status == "failed":
                failures.append(record.reason)
            report("done" if record.status == "ok" else "failed")
    finally:
        torch.set_num_threads(threads)
    return failures
