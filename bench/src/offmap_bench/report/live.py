"""A run while it runs: a table of methods with what is done, and how long the rest will take."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from statistics import fmean

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text

from offmap_bench.runner.plan import Cell
from offmap_bench.runner.run import Event


@dataclass
class Live:
    """Hears the events of a run, and draws it whenever asked."""

    name: str
    cells: Sequence[Cell]
    jobs: int = 1
    ends: list[Event] = field(default_factory=list[Event])
    running: dict[str, Cell] = field(default_factory=dict[str, Cell])

    def hear(self, event: Event) -> None:
        """Take note of one event."""
        if event.kind == "begin":
            self.running[event.cell.hash] = event.cell
        else:
            self.running.pop(event.cell.hash, None)
            self.ends.append(event)

    def seconds(self, label: str | None = None) -> list[float]:
        """Return what cells of a method, or all cells, took."""
        return [end.seconds for end in self.ends if end.kind != "before" and label in (None, end.cell.label)]

    def remaining(self) -> float | None:
        """Estimate the seconds that the rest takes: as cells of the same method did, or else as all did; None: unknown."""
        left = Counter(cell.label for cell in self.cells) - Counter(end.cell.label for end in self.ends)
        if left and not self.seconds():
            return None
        return sum(count * fmean(self.seconds(label) or self.seconds()) for label, count in left.items()) / self.jobs

    def __rich__(self) -> RenderableType:
        columns = [Column(name, justify="right", no_wrap=True) for name in ("done", "failed", "of", "a cell")]
        table = Table("method", *columns, title=self.name, title_justify="left", title_style="bold")
        for label, total in Counter(cell.label for cell in self.cells).items():
            kinds, own = Counter(end.kind for end in self.ends if end.cell.label == label), self.seconds(label)
            failed = Text(str(kinds["failed"]), style="bold red" if kinds["failed"] else "")
            each = f"{fmean(own):.1f} s" if own else "–"
            table.add_row(label, str(kinds["before"] + kinds["done"]), failed, str(total), each)
        left = self.remaining()
        words = "" if left is None else f", about {timedelta(seconds=round(left))} to go"
        now = [f"  {cell.label} on {cell.task}, seed {cell.seed}" for cell in self.running.values()]
        bar = ProgressBar(total=max(1, len(self.cells)), completed=len(self.ends), width=60)
        lines = [f" {len(self.ends)} of {len(self.cells)} cells{words}", *now]
        return Group(bar, Text("\n".join(lines)), table)  # a low screen cuts off the end
