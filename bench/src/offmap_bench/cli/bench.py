"""`offmap bench`: run and tabulate experiments."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from offmap.cli.options import Address, EngineName, Jobs, Json, print_result, usage_errors
from offmap.progress import bar

bench = typer.Typer(no_args_is_help=True, help="Run and tabulate experiments that a plan describes.", rich_markup_mode=None)

FOLDER = Path("bench/records")

PlanName = Annotated[str, typer.Argument(metavar="PLAN", help="A plan that comes with offmap, such as `uci`, or a .toml file.")]
Quick = Annotated[bool, typer.Option("--quick", help="The plan's own shortcut, only to see that it runs.")]
Folder = Annotated[Path, typer.Option("--folder", "--records", help="Folder of the records of all plans, or one .jsonl file.")]
Records = Annotated[Path | None, typer.Option(help="File of the records; by default bench/records/PLAN.jsonl.")]
Tasks = Annotated[list[str] | None, typer.Option(help="These tasks only; * and ? match; may be given several times.")]
Out = Annotated[Path | None, typer.Option(help="Where to write.")]


@bench.command("run")
def bench_run(
    plan: PlanName,
    quick: Quick = False,
    seeds: Annotated[list[int] | None, typer.Option(min=0, help="These seeds only; may be given several times.")] = None,
    jobs: Jobs = 1,
    engine: EngineName = "local",
    address: Address = None,
    only: Annotated[str | None, typer.Option(help="Methods with this label only; * and ? match.")] = None,
    tasks: Tasks = None,
    again: Annotated[bool, typer.Option("--again", help="Also run cells whose record was made by other code of offmap.")] = False,
    records: Records = None,
    as_json: Json = False,
) -> None:
    """Run the cells that have no record yet. Stop it at any time: what is done stays done.

    \b
    Examples:
      offmap bench run uci --quick --only "MaxWEnt*"
      offmap bench run uci --engine ray --jobs 8 --address 10.0.0.1:6379
    """
    from offmap.distributed.jobs import Pool
    from offmap_bench.runner.plan import cells, narrow_plan, read_plan
    from offmap_bench.runner.run import Event, run

    selected = read_plan(plan, quick=quick)
    wanted = cells(narrow_plan(selected, label=only, seeds=seeds, tasks=tasks))
    path, seen = records or FOLDER / f"{selected.name}.jsonl", Counter[str]()
    with usage_errors():
        pool = Pool(engine, jobs, address)
    with bar("Cells", len(wanted), show=None) as advance:

        def report(event: Event) -> None:
            seen[event.kind] += 1
            now = f"{event.cell.label} on {event.cell.task}, seed {event.cell.seed}"
            advance(seen.total() - seen["begin"], now + f"; {seen['failed']} failed" * (seen["failed"] > 0))

        outcome = run(wanted, path, pool=pool, report=report, again=again)
    for why in outcome.damaged.values():
        typer.echo(f"Warning: {why}", err=True)
    for reason, count in outcome.failures.items():
        typer.echo(f"{count} failed: {reason}", err=True)
    ends = {"done": outcome.done, "failed": outcome.failed, "before": outcome.before}
    text = f"{outcome.done} cells done, {outcome.failed} failed, {outcome.before} were there before. Records: {path}"
    print_result(as_json, {**ends, "records": path, "failures": outcome.failures, "damaged": outcome.damaged}, text)
    if outcome.failed:
        raise typer.Exit(1)


@bench.command("check")
def bench_check(plan: PlanName, tasks: Tasks = None, as_json: Json = False) -> None:
    """Tell what the tasks of a plan need: data, weights and cached features, what is missing, and how to get it.

    \b
    Example:
      offmap bench check citycam
    """
    from offmap_bench.runner.plan import narrow_plan, read_plan
    from offmap_bench.tasks.check import MISSING, check_task

    selected = narrow_plan(read_plan(plan), tasks=tasks)
    by_task = {task: check_task(task, selected.seeds[0]) for task in selected.tasks}
    lines = [f"{task}\n" + "\n".join(f"  {f.what}: {f.state}, {f.text}" for f in findings) for task, findings in by_task.items()]
    lacking = [task for task, findings in by_task.items() if any(f.state == MISSING for f in findings)]
    lines.append(f"{len(by_task) - len(lacking)} of {len(by_task)} tasks can run.")
    record = {task: [vars(finding) for finding in findings] for task, findings in by_task.items()}
    print_result(as_json, {"tasks": record, "missing": lacking}, "\n".join(lines))
    if lacking:
        raise typer.Exit(1)


@bench.command("methods")
def bench_methods(as_json: Json = False) -> None:
    """List the methods that a plan may name.

    Each has its score and the keys of its config. Example: offmap bench methods
    """
    from offmap_bench.runner.plan import METHODS
    from offmap_bench.runner.table import methods_markdown

    record = {name: {"score": method.score, "keys": sorted(method.keys)} for name, method in METHODS.items()}
    print_result(as_json, record, methods_markdown())


PAGES = {  # what is written, where by default, and what is said in the end
    "table": ("the records of a plan as tables", "docs/results/PLAN.md", "The tables are at"),
    "compare": ("records beside the paper's numbers", "docs/results/PLAN-compare.md", "The comparison is at"),
    "figures": ("figures as SVG; fits again if needed", "docs/figures/PLAN", "{} figures are in"),
    "page": ("tables and figures of a plan as one page", "PLAN.html", "The page is at"),
}


def add_page(name: str, content: str, default: str, words: str) -> None:
    """Add a sub-command that writes something made of records."""

    def command(plan: PlanName, quick: Quick = False, folder: Folder = FOLDER, out: Out = None, as_json: Json = False) -> None:
        from offmap_bench.report.experiment import WRITERS, Experiment

        with Console(stderr=True).status("Drawing") as status:
            target, paths = WRITERS[name](Experiment(plan, folder, quick), out, status.update)
        names = [path.name for path in paths] if name == "figures" else []
        record = {"folder": target, "figures": names} if name == "figures" else {"page": target}
        print_result(as_json, record, f"{words.format(len(names))} {target}" + (f": {', '.join(names)}" if names else ""))

    bench.command(name, help=f"Write {content}.\n\nThe default file is {default}. Example: offmap bench {name} uci")(command)


for _name, _words in PAGES.items():
    add_page(_name, *_words)
