"""`offmap demo`: methods compared on three data sets."""

from __future__ import annotations

import os
from itertools import count
from pathlib import Path
from typing import Annotated

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Column, Table

from offmap.cli.options import Json, print_result
from offmap.progress import bar


def demo(
    out: Annotated[Path, typer.Option("--out", "-o", help="HTML page to write.")] = Path("offmap-demo.html"),
    seed: Annotated[int, typer.Option(help="Random seed.")] = 0,
    quick: Annotated[bool, typer.Option("--quick", help="Run for a few seconds, only to see that it works.")] = False,
    jobs: Annotated[int | None, typer.Option(min=1, help="Number of processes (default: two, or one on a single core).")] = None,
    as_json: Json = False,
) -> None:
    """Compare methods on three data sets, as one page.

    Example: offmap demo --quick --out demo.html
    """
    from offmap_bench.demo import run, story

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    workers, done = jobs or (1 if quick else min(2, cores)), count(1)
    with bar("Demo", len(run.PLANS) * (len(run.METHODS) + 2), show=None) as advance:

        def report(title: str, doing: str) -> None:
            advance(next(done), f"{title}: {doing}")

        page, results = story.demo(out, seed=seed, fast=quick, workers=workers, report=report)
    tables = {result.plan.title: story.tabulate(result) for result in results}
    console = Console()
    for title, table in {} if as_json else tables.items():
        names, *numbers = table.columns
        columns = [Column(names, no_wrap=True), *(Column(name, justify="right") for name in numbers)]
        shown = Table(*columns, title=title, title_justify="left", title_style="bold", box=SIMPLE, padding=(0, 1, 0, 0))
        for row in table.rows:
            shown.add_row(*(str(row.get(column, "")) for column in table.columns))
        console.print(shown)
    if not as_json:
        console.print("FPR@95: OOD inputs that pass while 95 % of in-distribution ones pass.\n+: seconds beside training.")
    record = {"page": page, "tables": {title: [dict(row) for row in table.rows] for title, table in tables.items()}}
    print_result(as_json, record, f"The page is at {page}")
