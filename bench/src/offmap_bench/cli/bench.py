"""`offmap bench`: run and tabulate experiments."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live as RichLive

from offmap.cli.options import Address, EngineName, Jobs, Json, print_result, usage_errors

bench = typer.Typer(no_args_is_help=True, help="Run and tabulate experiments that a plan describes.", rich_markup_mode=None)

FOLDER = Path("bench/records")

PlanName = Annotated[str, typer.Argument(metavar="PLAN", help="A plan that comes with offmap, such as `uci`, or a .toml file.")]
Quick = Annotated[bool, typer.Option("--quick", help="The plan's own shortcut, only to see that it runs.")]
Folder = Annotated[Path, typer.Option(help="Folder of the records of all plans.")]
Records = Annotated[Path | None, typer.Option(help="File of the records; by default bench/records/PLAN.jsonl.")]


@bench.command("run")
def bench_run(
    plan: PlanName,
    quick: Quick = False,
    seeds: Annotated[list[int] | None, typer.Option(min=0, help="These seeds only; may be given several times.")] = None,
    jobs: Jobs = 1,
    engine: EngineName = "local",
    address: Address = None,
    only: Annotated[str | None, typer.Option(help="Methods with this label only; * and ? match.")] = None,
    tasks: Annotated[list[str] | None, typer.Option(help="These tasks only; * and ? match; may be given several times.")] = None,
    records: Records = None,
    as_json: Json = False,
) -> None:
    """Run the cells that have no record yet. Stop it at any time: what is done stays done.

    \b
    Examples:
      offmap bench run uci --quick --only "MaxWEnt*"
      offmap bench run uci --engine ray --jobs 8 --address 10.0.0.1:6379
    """  # noqa: D301
    from offmap.distributed.jobs import Pool
    from offmap_bench.report.live import Live
    from offmap_bench.runner.plan import cells, narrow_plan, read_plan
    from offmap_bench.runner.run import run

    selected = read_plan(plan, quick=quick)
    wanted = cells(narrow_plan(selected, label=only, seeds=seeds, tasks=tasks))
    path = records or FOLDER / f"{selected.name}.jsonl"
    with usage_errors():
        pool = Pool(engine, jobs, address)
    live = Live(selected.name, wanted, jobs)
    screen = Console(stderr=True)
    with RichLive(live, console=screen, transient=True) if screen.is_terminal else nullcontext():
        outcome = run(wanted, path, pool=pool, report=live.hear)
    for why in outcome.damaged.values():
        typer.echo(f"Warning: {why}", err=True)
    for reason, count in outcome.failures.items():
        typer.echo(f"{count} failed: {reason}", err=True)
    counts = {"done": outcome.done, "failed": outcome.failed, "before": outcome.before}
    text = f"{outcome.done} cells done, {outcome.failed} failed, {outcome.before} were there before. Records: {path}"
    print_result(as_json, {**counts, "records": path, "failures": outcome.failures, "damaged": outcome.damaged}, text)
    if outcome.failed:
        raise typer.Exit(1)


@bench.command("table")
def bench_table(
    plan: PlanName,
    quick: Quick = False,
    records: Records = None,
    out: Annotated[Path | None, typer.Option(help="Where to write the page; by default docs/PLAN.md.")] = None,
    as_json: Json = False,
) -> None:
    """Write the records of a plan as Markdown tables.

    Example: offmap bench table uci
    """
    from offmap.atomic import write_whole
    from offmap_bench.runner.plan import read_plan
    from offmap_bench.runner.ranks import ranks_markdown
    from offmap_bench.runner.store import read_records
    from offmap_bench.runner.table import markdown

    selected = read_plan(plan, quick=quick)
    page = out or Path("docs") / f"{selected.name}.md"
    written = {"means": markdown, "ranks": ranks_markdown}[selected.page]
    write_whole(page, written(selected, read_records(records or FOLDER / f"{selected.name}.jsonl")).encode())
    print_result(as_json, {"page": page}, f"The tables are at {page}")


@bench.command("compare")
def bench_compare(
    plan: PlanName,
    quick: Quick = False,
    folder: Folder = FOLDER,
    out: Annotated[Path | None, typer.Option(help="Where to write the page; by default docs/PLAN-compare.md.")] = None,
    as_json: Json = False,
) -> None:
    """Write our numbers beside those that the paper prints, marked where they are better or worse.

    Example: offmap bench compare uci
    """
    from offmap.atomic import write_whole
    from offmap_bench.runner.compare import answers, compare_markdown, sheet

    printed = sheet(plan)
    page = out or Path("docs") / f"{plan}{'-quick' * quick}-compare.md"
    write_whole(page, compare_markdown(f"{plan}{' --quick' * quick}", printed, answers(printed, folder, quick=quick)).encode())
    print_result(as_json, {"page": page}, f"The comparison is at {page}")


@bench.command("figures")
def bench_figures(
    plan: PlanName,
    quick: Quick = False,
    folder: Folder = FOLDER,
    out: Annotated[Path | None, typer.Option(help="Folder of the SVG files; by default docs/figures/PLAN.")] = None,
    as_json: Json = False,
) -> None:
    """Draw the records of a plan as SVG files; a fit that has to be looked at is made once more.

    Example: offmap bench figures uci
    """
    from offmap_bench.report.experiment import experiment, write_figures

    results = experiment(plan, folder, quick=quick)
    target = out or Path("docs/figures") / results.results.plan.name
    with Console(stderr=True).status("Drawing") as status:
        paths = write_figures(results, target, say=status.update)
    names = ", ".join(path.name for path in paths)
    text = f"{len(paths)} figures are in {target}" + (f": {names}" if names else "")
    print_result(as_json, {"folder": target, "figures": [path.name for path in paths]}, text)


@bench.command("page")
def bench_page(
    plan: PlanName,
    quick: Quick = False,
    folder: Folder = FOLDER,
    out: Annotated[Path | None, typer.Option(help="Where to write the page; by default PLAN.html.")] = None,
    as_json: Json = False,
) -> None:
    """Write tables, comparison and figures of a plan as one self-contained HTML page.

    Example: offmap bench page uci
    """
    from offmap_bench.report.experiment import experiment, write_experiment

    results = experiment(plan, folder, quick=quick)
    with Console(stderr=True).status("Drawing") as status:
        page = write_experiment(results, out or Path(f"{results.results.plan.name}.html"), say=status.update)
    print_result(as_json, {"page": page}, f"The page is at {page}")
