"""A progress bar for downloads and for images that pass through a backbone."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager


@contextmanager
def bar(title: str, total: int | None, *, show: bool | None, size: bool = False) -> Generator[Callable[[int, int | None], None]]:
    """Yields `advance(done, total)`. `show=None`: on a terminal, and only in the first process of several; `size`: in bytes."""
    if show is None:
        show = sys.stderr.isatty() and os.environ.get("RANK", "0") == "0"
    if not show:
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    amount = DownloadColumn() if size else MofNCompleteColumn()
    columns = (TextColumn("{task.description}"), BarColumn(), amount, TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as display:
        task = display.add_task(title, total=total)
        yield lambda done, total: display.update(task, completed=done, total=total)
