"""What several sub-commands are asked, in the same words; and the error for questions that cannot be answered."""

from __future__ import annotations

import json
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from offmap.errors import ConfigError


class Misuse(ConfigError):
    """The command was called in a way that cannot work: exit code 2."""


@contextmanager
def misused(kind: type[ConfigError] = ConfigError) -> Generator[None]:
    """Options that a lower room refuses are the user's mistake."""
    try:
        yield
    except kind as error:
        raise Misuse(str(error)) from error


GuardFile = Annotated[
    Path, typer.Argument(metavar="GUARD", help="A file that `offmap fit` or `Guard.save` wrote.", show_default=False)
]
Net = Annotated[
    str | None,
    typer.Option(
        metavar="MODULE:CALLABLE",
        help="What makes the net, called without arguments; modules of the current folder are found. Importing runs their code.",
    ),
]
NeededNet = Annotated[
    str,
    typer.Option(
        metavar="MODULE:CALLABLE",
        help="What makes the net, called without arguments; modules of the current folder are found. Importing runs their code.",
        show_default=False,
    ),
]
Weights = Annotated[
    list[Path] | None,
    typer.Option(
        metavar="FILE", help="Trained weights, .safetensors or .pt; once for each member of an ensemble, in the same order."
    ),
]
TrustNet = Annotated[
    bool,
    typer.Option(
        "--trust-net", help="Import the MODULE:CALLABLE that the guard file names: only for files you trust as you do code."
    ),
]
Separator = Annotated[
    str | None,
    typer.Option(
        metavar="CHARACTER", help="Of CSV files; by default the one of , ; tab | that the header has most of.", show_default=False
    ),
]
Drop = Annotated[
    list[str] | None,
    typer.Option(metavar="COLUMN", help="No input; for guards made in Python, which remember no columns. Repeatable."),
]
Jobs = Annotated[int, typer.Option(min=1, help="Processes, each with one thread.")]
EngineName = Annotated[
    Literal["local", "ray"],
    typer.Option("--engine", help="Where they run: on this machine, or on Ray (pip install 'offmap[ray]')."),
]
Address = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT", help="Of a Ray cluster to join; without it, `--engine ray` starts its own.", show_default=False
    ),
]
Json = Annotated[bool, typer.Option("--json", help="For machines: one JSON object.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress bar, no notes.")]


def tell(as_json: bool, record: dict[str, Any], text: str) -> None:
    """The result on standard output, for machines or for people."""
    typer.echo(json.dumps(plain(record), indent=2, ensure_ascii=False) if as_json else text)


def note(text: str, quiet: bool = False) -> None:
    """Something good to know, on standard error."""
    if not quiet:
        typer.echo(f"Note: {text}", err=True)


def plain(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become null.

    >>> plain({"a": [1.0, float("inf")], "b": Path("x")})
    {'a': [1.0, None], 'b': 'x'}
    """
    if isinstance(value, dict):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, float):
        return value if abs(value) < float("inf") else None
    return str(value) if isinstance(value, Path) else value
