"""Options that several sub-commands share, the error for wrong usage, and how results are printed."""

from __future__ import annotations

import json
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from offmap.errors import ConfigError


class UsageError(ConfigError):
    """The command was called in a way that cannot work: exit code 2."""


@contextmanager
def usage_errors(kind: type[ConfigError] = ConfigError) -> Generator[None]:
    """Turn errors about options into usage errors."""
    try:
        yield
    except kind as error:
        raise UsageError(str(error)) from error


def option(text: str, metavar: str | None = None, *names: str, **bounds: float) -> Any:
    """Declare an option by its help text; a default is said in the text."""
    return typer.Option(*names, help=text, metavar=metavar, **bounds)  # pyright: ignore[reportArgumentType]


_MODEL = (
    "Function or class that makes the model, called without arguments; found in the current folder or installed. Runs its code."
)

GuardFile = Annotated[Path, typer.Argument(metavar="GUARD", help="A file that `offmap fit` or `Guard.save` wrote.")]
Model = Annotated[str | None, option(_MODEL, "MODULE:CALLABLE")]
RequiredModel = Annotated[str, option(_MODEL, "MODULE:CALLABLE")]
Weights = Annotated[
    list[Path] | None, option("Trained weights, .safetensors or .pt. Repeat for the members of an ensemble, in order.", "FILE")
]
TrustModel = Annotated[
    bool, option("Import the MODULE:CALLABLE that the guard file names. Only for files you trust.", None, "--trust-model")
]
Separator = Annotated[str | None, option("CSV delimiter (default: detected from the header).", "CHARACTER")]
Drop = Annotated[
    list[str] | None, option("Column to exclude from the inputs, for guards fitted in Python (repeatable).", "COLUMN")
]
Jobs = Annotated[int, option("Number of processes, each with one thread.", min=1)]
EngineName = Annotated[
    Literal["local", "ray"], option("Run jobs on this machine, or on Ray (pip install 'offmap[ray]').", None, "--engine")
]
Address = Annotated[str | None, option("Ray cluster to join (default: start Ray on this machine).", "HOST:PORT")]
Json = Annotated[bool, option("Print one JSON object.", None, "--json")]
Quiet = Annotated[bool, option("Print no progress bar and no notes.", None, "--quiet", "-q")]


def print_result(as_json: bool, record: dict[str, Any], text: str) -> None:
    """Print the result on standard output, as JSON or as text."""
    typer.echo(json.dumps(to_json(record), indent=2, ensure_ascii=False) if as_json else text)


def print_note(text: str, quiet: bool = False) -> None:
    """Print a note on standard error."""
    if not quiet:
        typer.echo(f"Note: {text}", err=True)


def to_json(value: Any) -> Any:
    """Replace what JSON does not have: NaN and infinity become null, paths text.

    >>> to_json({"a": [1.0, float("inf")], "b": Path("x")})
    {'a': [1.0, None], 'b': 'x'}
    """
    if isinstance(value, dict):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    if isinstance(value, float):
        return value if abs(value) < float("inf") else None
    return str(value) if isinstance(value, Path) else value
