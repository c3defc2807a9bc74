"""The `offmap` command: each sub-command is a few lines that call a lower room."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live as RichLive
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
    jobs: Annotated[int | None, typer.Option(min=1, help="Processes to use; by default two, or one on a single core.")] = None,
) -> None:
    """Compare methods on three data sets: print tables, write one self-contained page."""
    from offmap.demo import show, story

    console, screen = Console(), Console(stderr=True)
    count = jobs or (1 if quick else min(2, show.cores()))
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


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="For machines: one JSON object.")] = False,
) -> None:
    """Show versions, devices, threads and optional packages, and try a small fit. Example: offmap doctor --json"""
    from offmap.doctor import examine_installation

    health = examine_installation()
    typer.echo(json.dumps(health.record(), indent=2) if as_json else str(health.table()))
    if not health.well:
        raise typer.Exit(1)


bench = typer.Typer(no_args_is_help=True, help="Run and tabulate experiments that a plan describes.", rich_markup_mode=None)
app.add_typer(bench, name="bench")

ROOM = Path("benchmarks/records")

PlanName = Annotated[str, typer.Argument(metavar="PLAN", help="A plan that comes with offmap, such as `uci`, or a .toml file.")]
Quick = Annotated[bool, typer.Option("--quick", help="The plan's own shortcut, only to see that it runs.")]
Room = Annotated[Path, typer.Option(help="Folder that holds a folder of records for every plan.")]
Records = Annotated[Path | None, typer.Option(help="Folder of the records; by default benchmarks/records/PLAN.")]


@bench.command("run")
def bench_run(
    plan: PlanName,
    quick: Quick = False,
    seeds: Annotated[list[int] | None, typer.Option(min=0, help="These seeds only; may be given several times.")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Processes, each with one thread.")] = 1,
    only: Annotated[str | None, typer.Option(help="Methods with this label only; * and ? match.")] = None,
    records: Records = None,
) -> None:
    """Run the cells that have no record yet. Stop it at any time: what is done stays done."""
    from offmap.bench.plan import cells, narrowed
    from offmap.bench.reading import read_plan
    from offmap.bench.run import run
    from offmap.report.live import Live

    whole = read_plan(plan, quick=quick)
    wanted = cells(narrowed(whole, label=only, seeds=seeds))
    folder = records or ROOM / whole.name
    live = Live(whole.name, wanted, jobs)
    screen = Console(stderr=True)
    with RichLive(live, console=screen, transient=True) if screen.is_terminal else nullcontext():
        outcome = run(wanted, folder, jobs=jobs, report=live.hear)
    for why in outcome.damaged.values():
        typer.echo(f"Warning: {why}", err=True)
    for reason, count in outcome.failures.items():
        typer.echo(f"{count} failed: {reason}", err=True)
    typer.echo(f"{outcome.done} cells done, {outcome.failed} failed, {outcome.before} were there before. Records: {folder}")
    if outcome.failed:
        raise typer.Exit(1)


@bench.command("table")
def bench_table(
    plan: PlanName,
    quick: Quick = False,
    records: Records = None,
    out: Annotated[Path | None, typer.Option(help="Where to write the page; by default docs/PLAN.md.")] = None,
) -> None:
    """Write the records of a plan as Markdown tables."""
    from offmap.bench.reading import read_plan
    from offmap.bench.store import read_all
    from offmap.bench.table import markdown
    from offmap.files import write_whole

    whole = read_plan(plan, quick=quick)
    page = out or Path("docs") / f"{whole.name}.md"
    write_whole(page, markdown(whole, read_all(records or ROOM / whole.name)).encode())
    typer.echo(f"The tables are at {page}")


@bench.command("compare")
def bench_compare(
    plan: PlanName,
    quick: Quick = False,
    room: Room = ROOM,
    out: Annotated[Path | None, typer.Option(help="Where to write the page; by default docs/PLAN-compare.md.")] = None,
) -> None:
    """Write our numbers beside those that the paper prints, marked where they are better or worse."""
    from offmap.bench.compare import answers, compare_markdown
    from offmap.bench.printed import sheet
    from offmap.files import write_whole

    printed = sheet(plan)
    page = out or Path("docs") / f"{plan}{'-quick' * quick}-compare.md"
    write_whole(page, compare_markdown(f"{plan}{' --quick' * quick}", printed, answers(printed, room, quick=quick)).encode())
    typer.echo(f"The comparison is at {page}")


@bench.command("figures")
def bench_figures(
    plan: PlanName,
    quick: Quick = False,
    room: Room = ROOM,
    out: Annotated[Path | None, typer.Option(help="Folder of the SVG files; by default docs/figures/PLAN.")] = None,
) -> None:
    """Draw the records of a plan as SVG files; a fit that has to be looked at is made once more."""
    from offmap.report.experiment import experiment, write_figures

    whole = experiment(plan, room, quick=quick)
    folder = out or Path("docs/figures") / whole.results.plan.name
    with Console(stderr=True).status("Drawing") as status:
        paths = write_figures(whole, folder, say=status.update)
    names = ", ".join(path.name for path in paths)
    typer.echo(f"{len(paths)} figures are in {folder}" + (f": {names}" if names else ""))


@bench.command("page")
def bench_page(
    plan: PlanName,
    quick: Quick = False,
    room: Room = ROOM,
    out: Annotated[Path | None, typer.Option(help="Where to write the page; by default PLAN.html.")] = None,
) -> None:
    """Write tables, comparison and figures of a plan as one self-contained HTML page."""
    from offmap.report.experiment import experiment, write_experiment

    whole = experiment(plan, room, quick=quick)
    with Console(stderr=True).status("Drawing") as status:
        page = write_experiment(whole, out or Path(f"{whole.results.plan.name}.html"), say=status.update)
    typer.echo(f"The page is at {page}")


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
