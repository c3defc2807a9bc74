"""A progress bar for long work."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TypeAlias

Advance: TypeAlias = Callable[..., None]
"""`advance(done, text="", total=None)`: how much is done, the text beside the bar, and a new total."""


@contextmanager
def bar(title: str, total: int | None, *, show: bool | None, size: bool = False) -> Generator[Advance]:
    """Show a bar; `show=None`: on a terminal, and only in the first process of several; `size`: it counts bytes."""
    if show is False or (show is None and not (sys.stderr.isatty() and os.environ.get("RANK", "0") == "0")):
        yield lambda *_, **__: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    amount = DownloadColumn() if size else MofNCompleteColumn()
    columns = (TextColumn("{task.description}"), BarColumn(), amount, TimeRemainingColumn(), TextColumn("{task.fields[text]}"))
    with Progress(*columns, console=Console(stderr=True)) as display:
        task = display.add_task(title, total=total, text="")
        yield lambda done, text="", *, total=None: display.update(task, completed=done, text=text, total=total)
