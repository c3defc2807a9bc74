"""Progress of long work: a bar on a terminal, a line every ten seconds elsewhere."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias

Advance: TypeAlias = Callable[..., None]
"""`advance(done, text="", total=None)`: how much is done, the text beside the bar, and a new total."""

SECONDS = 10.0
"""Between two lines."""


@dataclass
class Status:
    """What is being done, for `print_status`; nothing while a bar shows it."""

    text: str = ""


@contextmanager
def print_status(status: Status) -> Generator[None]:
    """Print the status to stderr every ten seconds, from a thread, in the first process of several."""
    if sys.stderr is None or os.environ.get("RANK", "0") != "0":
        yield
        return
    start, done = time.monotonic(), threading.Event()

    def run() -> None:
        while not done.wait(SECONDS):
            if status.text:
                print(f"offmap: {status.text}, {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)

    thread = threading.Thread(target=run, name="offmap-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


@contextmanager
def bar(
    title: str, total: int | None, *, show: bool | None, size: bool = False, status: Status | None = None
) -> Generator[Advance]:
    """Show a bar; `show=None`: on a terminal, and only in the first process of several; `size`: it counts bytes.

    Where there is none, the `status` tells the same.
    """
    status = status or Status()
    if show is False or (show is None and not (sys.stderr.isatty() and os.environ.get("RANK", "0") == "0")):
        whole = total

        def advance(done: int, text: str = "", *, total: int | None = None) -> None:
            status.text = f"{title} {done}/{total or whole}, {text}".removesuffix(", ")

        yield advance
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    amount = DownloadColumn() if size else MofNCompleteColumn()
    columns = (TextColumn("{task.description}"), BarColumn(), amount, TimeRemainingColumn(), TextColumn("{task.fields[text]}"))
    status.text = ""
    with Progress(*columns, console=Console(stderr=True)) as display:
        task = display.add_task(title, total=total, text="")
        yield lambda done, text="", *, total=None: display.update(task, completed=done, text=text, total=total)
