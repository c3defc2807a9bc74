"""The `offmap` command: each sub-command is a few lines that call a lower room."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table as RichTable

import offmap
from offmap.errors import OffmapError
from offmap.table import Table

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"offmap {offmap.__version__}")
        raise typer.Exit


@app.callback()
def offmap_command(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Tell when a neural network is off the map of its training data."""


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Where to write the page.")] = Path("offmap-demo.html"),
    seed: Annotated[int, typer.Option(help="Starts of the nets, order of the data, draws of the guards.")] = 0,
    quick: Annotated[bool, typer.Option("--quick", help="A few seconds, only to see that it runs.")] = False,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes to use; by default two, or one on a single core.")] = None,
) -> None:
    """Compare methods on three data sets: print tables, write one self-contained page."""
    from offmap.demo import show, story

    console, screen = Console(), Console(stderr=True)
    count = workers or (1 if quick else min(2, show.cores()))
    titles = [plan.title for plan in show.PLANS]
    with _progress(screen) as progress:
        bars = {title: progress.add_task(title, total=show.STAGES, doing="waiting") for title in titles}

        def report(title: str, doing: str) -> None:
            progress.update(bars[title], advance=1, doing=doing)

        shown = show.demo(out, seed=seed, fast=quick, workers=count, report=report)
    for result in shown.results:
        console.print(_rich(story.rows(result), result.plan.title))
    console.print("FPR@95: strange inputs unnoticed while 95 % of familiar ones pass.\n+: seconds on top of trained nets.")
    typer.echo(f"The page is at {shown.page}")


def _progress(screen: Console) -> Progress:
    words = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TextColumn("{task.fields[doing]}"))
    return Progress(SpinnerColumn(), *words, console=screen, transient=True, disable=not screen.is_terminal)


def _rich(table: Table, title: str) -> RichTable:
    drawn = RichTable(title=title, title_justify="left", title_style="bold")
    for position, column in enumerate(table.columns):
        drawn.add_column(column, justify="right" if position else "left", no_wrap=not position)
    for row in table.rows:
        drawn.add_row(*(str(row.get(column, "")) for column in table.columns))
    return drawn


def main() -> None:
    """Run the command; what goes wrong on purpose is one sentence and exit code 1."""
    try:
        app()
    except OffmapError as error:
        typer.echo(f"offmap: {error}", err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
