"""Run what a store lacks: resumable, and one failed cell never loses the others."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Literal

from offmap.distributed.jobs import Pool
from offmap_bench.runner.cell import Bench, single_thread
from offmap_bench.runner.plan import Cell
from offmap_bench.runner.store import Record, read_records, set_damaged_aside, write_records


@dataclass(frozen=True)
class Event:
    """What happens to a cell: it begins, is done or fails after so many seconds, or its record was there before."""

    kind: Literal["begin", "done", "failed", "before"]
    cell: Cell
    seconds: float = 0.0


Report = Callable[[Event], None]


@dataclass(frozen=True)
class Outcome:
    """How many cells a run found done and finished; why others failed, {reason: cells}; and the damaged lines that it set aside,
    {name: what is wrong, and where the line is now}.
    """

    before: int
    done: int
    failures: dict[str, int]
    damaged: dict[str, str]

    @property
    def failed(self) -> int:
        """How many cells failed."""
        return sum(self.failures.values())


def run(
    cells: Sequence[Cell], path: Path, *, jobs: int = 1, pool: Pool | None = None, report: Report = lambda event: None
) -> Outcome:
    """Run the cells whose record is missing, failed, damaged or stale, in local processes or by a pool.

    Cells of one task and seed run in one process: they share base models, and some a fit. A record is written as soon as its
    cell ends. Damaged lines are moved to another file, never deleted.
    """
    pool, path, ended = pool or Pool(workers=jobs), path.absolute(), set[str]()
    damaged, records = set_damaged_aside(path), read_records(path)
    states = {cell.hash: records.state(cell) for cell in cells}
    lacking = [cell for cell in cells if states[cell.hash] != "ok"]

    def report_once(_: int, event: Event) -> None:
        """Report the end of each cell once, also where a group was run again."""
        if event.cell.hash not in ended:
            report(event)
        if event.kind != "begin":
            ended.add(event.cell.hash)

    for cell in cells:
        if states[cell.hash] == "ok":
            report(Event("before", cell))
    groups = [list(group) for _, group in groupby(lacking, key=lambda cell: (cell.task, cell.seed))]
    work = [(run_group, (group, path, {cell.hash: records.records.get(cell.hash) for cell in group})) for group in groups]
    reasons = pool.run_jobs(work, report=report_once)
    failures = dict(Counter(reason for group in reasons for reason in group))
    return Outcome(len(cells) - len(lacking), len(lacking) - sum(failures.values()), failures, damaged)


def run_group(cells: Sequence[Cell], path: Path, before: Mapping[str, Record | None], *, report: Report) -> list[str]:
    """Run cells one after another, and return why some failed.

    `before` are their records when the run began. A record that differs by now is of a worker that wrote it and died later.
    """
    written, bench, failures = read_records(path).records, Bench(), list[str]()
    for cell in cells:
        begin, record = time.perf_counter(), written.get(cell.hash)
        if record is None or record == before[cell.hash]:
            report(Event("begin", cell))
            with single_thread():
                record = bench.run(cell)
            write_records(path, record)
        if record.status == "failed":
            failures.append(record.reason)
        report(Event("done" if record.status == "ok" else "failed", cell, time.perf_counter() - begin))
    return failures
