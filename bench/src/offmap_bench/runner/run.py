"""Run what a store lacks: resumable, and one failed cell never loses the others."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Literal

import torch

from offmap.distributed.pool import Pool
from offmap_bench.runner.cell import Bench
from offmap_bench.runner.plan import Cell
from offmap_bench.runner.store import Stamp, read_all, set_aside, stamp, write, written_since


@dataclass(frozen=True)
class Event:
    """What happens to a cell: it begins, is done or fails after so many seconds, or its record was there before."""

    kind: Literal["begin", "done", "failed", "before"]
    cell: Cell
    seconds: float = 0.0


Report = Callable[[Event], None]


@dataclass(frozen=True)
class Outcome:
    """How many cells a run found done and finished; why others failed, {reason: cells}; and the records it could not read and set
    aside, {file: why, and where it is now}.
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
    cells: Sequence[Cell], folder: Path, *, jobs: int = 1, pool: Pool | None = None, report: Report = lambda event: None
) -> Outcome:
    """Run the cells whose record is missing, failed, damaged or made with other defaults, by so many local jobs or by a pool.

    Cells of one task and seed go to one process: they share models, and some a fit. Every record is written as soon as its cell
    is done. A record that cannot be read is renamed, never deleted.
    """
    pool, folder = pool or Pool(workers=jobs), folder.absolute()
    found = read_all(folder)
    lacking = [cell for cell in cells if found.state(cell) != "ok"]
    names = [f"{cell.hash}.json" for cell in lacking if found.state(cell) == "damaged"]
    damaged = {name: f"{found.damaged[name]} It is now {set_aside(folder / name).name}." for name in names}
    for cell in cells:
        if found.state(cell) == "ok":
            report(Event("before", cell))
    if pool.here:
        reasons = [run_group(lacking, folder, report=report)]
    else:
        groups = [list(group) for _, group in groupby(lacking, key=lambda cell: (cell.task, cell.seed))]
        work = [(run_group, (group, folder, {cell.hash: stamp(folder, cell) for cell in group})) for group in groups]
        once = _once(report)
        reasons = pool.run_jobs(work, report=lambda number, event: once(event))
    failures = dict(Counter(reason for group in reasons for reason in group))
    return Outcome(len(cells) - len(lacking), len(lacking) - sum(failures.values()), failures, damaged)


def run_group(cells: Sequence[Cell], folder: Path, before: Mapping[str, Stamp] | None = None, *, report: Report) -> list[str]:
    """Cells one after another, with one thread: small tensors run slower on two. Returns why some failed.

    `before` is what there was of their records when the run began. Where there is another by now, a worker wrote it and died
    later: that cell is done.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    bench, failures = Bench(), list[str]()
    try:
        for cell in cells:
            record = written_since(folder, cell, before[cell.hash]) if before else None
            begin = time.perf_counter()
            if record is None:
                report(Event("begin", cell))
                record = bench.run(cell)
                write(folder, record)
            if record.status == "failed":
                failures.append(record.reason)
            report(Event("done" if record.status == "ok" else "failed", cell, time.perf_counter() - begin))
    finally:
        torch.set_num_threads(threads)
    return failures


def _once(report: Report) -> Report:
    """Tells the end of each cell once, also where a group was run again."""
    ended = set[str]()

    def tell(event: Event) -> None:
        if event.cell.hash not in ended:
            report(event)
        if event.kind != "begin":
            ended.add(event.cell.hash)

    return tell
