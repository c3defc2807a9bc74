"""The `offmap` command: its sub-commands, error messages and exit codes."""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from importlib.metadata import entry_points
from typing import Annotated

import typer

import offmap
from offmap.cli.assess import assess
from offmap.cli.doctor import doctor
from offmap.cli.evaluate import evaluate
from offmap.cli.export import export
from offmap.cli.fit import fit
from offmap.cli.options import UsageError
from offmap.cli.score import score
from offmap.cli.serve import serve
from offmap.errors import OffmapError

DEBUG = "--debug"


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"offmap {offmap.__version__}")
        raise typer.Exit


def offmap_command(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    debug: Annotated[bool, typer.Option(DEBUG, help="Print the traceback of an error; works after any command.")] = False,
) -> None:
    """Tell when a neural network is off the map of its training data.

    \b
    First steps:
      offmap doctor
      offmap fit --model my_module:make_model --weights w.pt --train train.csv --valid valid.csv -o guard.safetensors
      offmap score guard.safetensors new.csv --model my_module:make_model -o scores.csv

    Exit codes: 0 done, 1 failed, 2 bad usage.
    """  # noqa: D301


def main() -> None:
    """Run the command. An error is one sentence and exit code 1, or 2 for wrong usage; with `--debug` also the traceback."""
    debug = DEBUG in sys.argv[1:] or bool(os.environ.get("OFFMAP_DEBUG"))
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # `finally` removes half-written files
    try:
        create_app()(args=[word for word in sys.argv[1:] if word != DEBUG], prog_name="offmap")
    except Exception as error:
        if debug:
            traceback.print_exc()
        reason = f"{type(error).__name__}: {error}".strip().partition("\n")[0]
        text = str(error) if isinstance(error, OffmapError) else f"Unexpected {reason} (add {DEBUG} to see where)"
        typer.echo(f"offmap: {text}", err=True)
        sys.exit(2 if isinstance(error, UsageError) else 1)


def create_app() -> typer.Typer:
    """Return the command with its sub-commands, also those that other packages declare as entry points of `offmap.commands`."""
    app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.callback()(offmap_command)
    for command in (fit, score, assess, evaluate, export, serve, doctor):
        app.command()(command)
    points = {point.name: point for point in entry_points(group="offmap.commands")}
    for name, point in points.items():
        command = point.load()
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name)
        else:
            app.command(name)(command)
    for name in {"bench", "demo"} - points.keys():  # of the package `offmap-bench`
        settings = {"allow_extra_args": True, "ignore_unknown_options": True}
        app.command(name, hidden=True, context_settings=settings, add_help_option=False)(_refuse_experiment)
    return app


def _refuse_experiment(context: typer.Context) -> None:
    command = "`pip install ./bench` in a clone of the repository"
    raise UsageError(f"`offmap {context.info_name}` belongs to the experiments: install them with {command}.")
