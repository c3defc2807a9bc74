"""`offmap demo`: methods compared on three data sets."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table as RichTable

from offmap.cli.options import Json, print_result
from offmap.table import Table

BARS = (
    SpinnerColumn(),
    TextColumn("{task.description}"),
    BarColumn(),
    TimeElapsedColumn(),
    TextColumn("{task.fields[doing]}"),
)


def demo(
    out: Annotated[Path, typer.Option("--out", "-o", help="Where to write the page.")] = Path("offmap-demo.html"),
    seed: Annotated[int, typer.Option(help="Starts of the nets, order of the data, draws of the guards.")] = 0,
    quick: Annotated[bool, typer.Option("--quick", help="A few seconds, only to see that it runs.")] = False,
    jobs: Annotated[int | None, typer.Option(min=1, help="Processes to use; by default two, or one on a single core.")] = None,
    as_json: Json = False,
) -> None:
    """Compare methods on three data sets: print tables, write one self-contained page.

    Example: offmap demo --quick --out demo.html
    """
    from offmap_bench.demo import show, story

    console, screen = Console(), Console(stderr=True)
    count = jobs or (1 if quick else min(2, show.cores()))
    titles = [plan.title for plan in show.PLANS]
    with Progress(*BARS, console=screen, transient=True, disable=not screen.is_terminal) as progress:
        bars = {title: progress.add_task(title, total=show.STAGES, doing="waiting") for title in titles}

        def report(title: str, doing: str) -> None:
            progress.update(bars[title], advance=1, doing=doing)

        shown = show.demo(out, seed=seed, fast=quick, workers=count, report=report)
    tables = {result.plan.title: story.rows(result) for result in shown.results}
    if not as_json:
        for title, table in tables.items():
            console.print(rich_table(table, title))
        console.print("FPR@95: OOD inputs unnoticed while 95 % of in-distribution ones pass.\n+: seconds on top of trained nets.")
    record = {"page": shown.page, "tables": {title: [dict(row) for row in table.rows] for title, table in tables.items()}}
    print_result(as_json, record, f"The page is at {shown.page}")


def rich_table(table: Table, title: str) -> RichTable:
    """Convert a table for the terminal."""
    result = RichTable(title=title, title_justify="left", title_style="bold")
    for position, column in enumerate(table.columns):
        result.add_column(column, justify="right" if position else "left", no_wrap=not position)
    for row in table.rows:
        result.add_row(*(str(row.get(column, "")) for column in table.columns))
    return result
