"""A run while it runs: a table of methods with what is done, and how long the rest will take."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from offmap_bench.runner.plan import Cell
from offmap_bench.runner.run import Event

ENDS = ("before", "done", "failed")


@dataclass
class Live:
    """Hears the events of a run, and draws it whenever asked."""

    name: str
    cells: Sequence[Cell]
    jobs: int = 1
    ends: dict[str, Counter[str]] = field(default_factory=dict[str, Counter[str]])
    seconds: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    running: dict[str, Cell] = field(default_factory=dict[str, Cell])

    def __post_init__(self) -> None:
        self.total = Counter(cell.label for cell in self.cells)
        self.ends = {label: Counter() for label in self.total}
        self.seconds = {label: [] for label in self.total}

    def hear(self, event: Event) -> None:
        """One event."""
        label = event.cell.label
        if event.kind == "begin":
            self.running[event.cell.hash] = event.cell
            return
        self.running.pop(event.cell.hash, None)
        self.ends[label][event.kind] += 1
        if event.kind != "before":
            self.seconds[label].append(event.seconds)

    @property
    def ended(self) -> int:
        """How many cells have an end."""
        return sum(sum(ends.values()) for ends in self.ends.values())

    def remaining(self) -> float | None:
        """Seconds that the rest will take: cells of a method take what its cells took so far, others the mean; None: unknown."""
        known = [seconds for own in self.seconds.values() for seconds in own]
        if not known:
            return None if self.ended < len(self.cells) else 0.0
        left = {label: total - sum(self.ends[label].values()) for label, total in self.total.items()}
        return sum(count * fmean(self.seconds[label] or known) for label, count in left.items()) / self.jobs

    def __rich__(self) -> RenderableType:
        table = Table(title=self.name, title_justify="left", title_style="bold")
        for column in ("method", "done", "failed", "of", "a cell"):
            table.add_column(column, justify="left" if column == "method" else "right", no_wrap=column != "method")
        for label, ends in self.ends.items():
            each = duration(fmean(self.seconds[label])) if self.seconds[label] else "–"
            failed = Text(str(ends["failed"]), style="bold red" if ends["failed"] else "")
            table.add_row(label, str(ends["before"] + ends["done"]), failed, str(self.total[label]), each)
        left = self.remaining()
        words = f"{self.ended} of {len(self.cells)} cells, " + ("" if left is None else f"about {duration(left)} to go")
        now = [f"  {cell.label} on {cell.task}, seed {cell.seed}" for cell in self.running.values()]
        bar = ProgressBar(total=max(1, len(self.cells)), completed=self.ended, width=60)
        return Group(bar, Text("\n".join([f" {words.removesuffix(', ')}", *now])), table)  # a low screen cuts off the end


def duration(seconds: float) -> str:
    """A time in two units at the most.

    >>> duration(0.4), duration(75), duration(7300)
    ('0.4 s', '1 min 15 s', '2 h 1 min')
    """
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
