"""Tables and progress on a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table as RichTable

from offmap.table import Table


def stages(screen: Console) -> Progress:
    """Bars of things that are done in a few steps; what is being done stands beside each."""
    words = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TextColumn("{task.fields[doing]}"))
    return Progress(SpinnerColumn(), *words, console=screen, transient=True, disable=not screen.is_terminal)


def drawn(table: Table, title: str) -> RichTable:
    """A table with lines."""
    result = RichTable(title=title, title_justify="left", title_style="bold")
    for position, column in enumerate(table.columns):
        result.add_column(column, justify="right" if position else "left", no_wrap=not position)
    for row in table.rows:
        result.add_row(*(str(row.get(column, "")) for column in table.columns))
    return result
