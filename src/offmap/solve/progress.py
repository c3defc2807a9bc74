"""A progress bar for fits that take a while: validation risk, τ and entropy beside it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager

from offmap.solve.monitors import History


def wanted(progress: bool | None) -> bool:
    """None means: on a terminal, and only in the first process of several."""
    if progress is not None:
        return progress
    return sys.stderr.isatty() and os.environ.get("RANK", "0") == "0"


@contextmanager
def bar(title: str, total: int, *, show: bool | None) -> Generator[Callable[[int, str], None]]:
    """Yields `advance(done, text)`; draws on the terminal only if `show` says so."""
    if not wanted(show):
        yield lambda done, text: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"),
               TimeRemainingColumn(), TextColumn("{task.fields[text]}"))  # fmt: skip
    with Progress(*columns, console=Console(stderr=True)) as display:
        task = display.add_task(title, total=total, text="")
        yield lambda done, text: display.update(task, completed=done, text=text)


def describe(history: History) -> str:
    """The last check in words: mean over members."""
    if not history.step:
        return ""
    risk, entropy = history.risk[-1], history.entropy[-1]
    mean = [sum(v) / len(v) for v in (risk, history.threshold, entropy)]
    return f"risk {mean[0]:.3f}  τ {mean[1]:.3f}  entropy {mean[2]:.2f}"
