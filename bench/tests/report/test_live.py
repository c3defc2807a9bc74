"""The table of a run that runs: what is done, what failed, and what is left to wait for."""

from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console

from offmap_bench.report.live import Live
from offmap_bench.runner.plan import Cell
from offmap_bench.runner.run import Event

QUICK = [Cell("regression", "nearest", "quick", {}, seed) for seed in range(4)]
SLOW = [Cell("regression", "maxwent", "slow", {}, seed, 5) for seed in range(4)]


def drawn(live: Live) -> str:
    console = Console(file=StringIO(), width=100)
    console.print(live)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_nothing_is_promised_before_the_first_cell_is_done() -> None:
    live = Live("plan", [*QUICK, *SLOW])
    live.hear(Event("before", QUICK[0]))
    live.hear(Event("begin", SLOW[0]))
    assert live.remaining() is None
    text = drawn(live)
    assert "1 of 8 cells\n" in text
    assert "slow on regression, seed 0" in text


@pytest.mark.parametrize("jobs", [1, 2])
def test_the_rest_takes_what_cells_of_each_method_took(jobs: int) -> None:
    live = Live("plan", [*QUICK, *SLOW], jobs)
    live.hear(Event("done", QUICK[0], 1.0))
    assert live.remaining() == 7.0 / jobs  # the other method is taken for as quick
    live.hear(Event("done", SLOW[0], 100.0))
    live.hear(Event("failed", SLOW[1], 50.0))
    assert live.remaining() == (3 * 1.0 + 2 * 75.0) / jobs


def test_a_whole_run_is_drawn_with_its_failures() -> None:
    live = Live("plan", [*QUICK, *SLOW])
    for cell in QUICK:
        live.hear(Event("before", cell))
    for cell in SLOW:
        live.hear(Event("begin", cell))
        live.hear(Event("failed" if cell.seed == 3 else "done", cell, 30.0))
    text = drawn(live)
    rows = [[part.strip() for part in line.strip("│").split("│")] for line in text.splitlines() if line.startswith("│")]
    assert rows == [["quick", "4", "0", "4", "–"], ["slow", "3", "1", "4", "30.0 s"]]
    assert "8 of 8 cells, about 0:00:00 to go" in text
    assert "seed" not in text
    assert Live("empty", []).remaining() == 0.0
