"""The command itself: its sub-commands, and what becomes of mistakes."""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from importlib.metadata import entry_points
from types import FrameType
from typing import Annotated

import typer

import offmap
from offmap.cli.doctor import doctor
from offmap.cli.evaluate import evaluate
from offmap.cli.fit import fit
from offmap.cli.options import Misuse
from offmap.cli.score import score
from offmap.cli.serve import serve
from offmap.errors import OffmapError

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)
for command in (fit, score, evaluate, serve, doctor):
    app.command()(command)


def _add_commands() -> None:
    """Add the sub-commands that other packages declare as entry points of the group `offmap.commands`."""
    for point in entry_points(group="offmap.commands"):
        command = point.load()
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=point.name)
        else:
            app.command(point.name)(command)
    for name in EXPERIMENTS - {point.name for point in entry_points(group="offmap.commands")}:
        app.command(name, hidden=True, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(_missing)


def _missing(context: typer.Context) -> None:
    raise Misuse(f"`offmap {context.info_name}` belongs to the experiments: install them with `pip install offmap-bench`.")


DEBUG = "--debug"
EXPERIMENTS = {"bench", "demo"}
"""Sub-commands of the package `offmap-bench`."""


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"offmap {offmap.__version__}")
        raise typer.Exit


@app.callback()
def offmap_command(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    debug: Annotated[bool, typer.Option(DEBUG, help="Show where an error comes from; may stand anywhere.")] = False,
) -> None:
    """Tell when a neural network is off the map of its training data.

    \b
    First steps:
      offmap demo
      offmap fit --net my_module:make_net --weights w.safetensors --train train.parquet -o guard.safetensors
      offmap score guard.safetensors new.parquet --net my_module:make_net -o scores.parquet

    Exit codes: 0 done, 1 failed, 2 bad usage.
    """  # noqa: D301


def main() -> None:
    """Run the command. What goes wrong is one sentence and exit code 1, or 2 if the command was misused; with `--debug` also the
    traceback.
    """
    words = [word for word in sys.argv[1:] if word != DEBUG]
    debug = DEBUG in sys.argv[1:] or bool(os.environ.get("OFFMAP_DEBUG"))
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _leave)  # through `finally`: what is half-written goes
    try:
        _add_commands()
        app(args=words, prog_name="offmap")
    except Exception as error:
        if debug:
            traceback.print_exc()
        known = isinstance(error, OffmapError)
        reason = f"{type(error).__name__}: {error}".strip().partition("\n")[0]
        told = str(error) if known else f"Unexpected {reason} (add {DEBUG} to see where)"
        typer.echo(f"offmap: {told}", err=True)
        sys.exit(2 if isinstance(error, Misuse) else 1)


def _leave(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)
