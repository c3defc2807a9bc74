"""What sub-commands share: options, the models and guards they stand for, the error for wrong usage, how results are printed."""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer
from safetensors.torch import load_file
from torch import Tensor, nn

from offmap.data.tables.schema import Schema
from offmap.errors import ConfigError, FileError, ModelError, first_line, nearest
from offmap.guard import Guard
from offmap.io.guard_file import GuardFile


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


_MODEL = option(
    "Function or class that makes the model, called without arguments; found in the current folder or installed. Runs its code.",
    "MODULE:CALLABLE",
)
GuardPath = Annotated[Path, typer.Argument(metavar="GUARD", help="A file that `offmap fit` or `Guard.save` wrote.")]
Model = Annotated[str | None, _MODEL]
RequiredModel = Annotated[str, _MODEL]
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
    """Print the result on standard output, as JSON or as text; NaN and infinity, which JSON does not have, become null."""
    if as_json:
        finite = json.loads(json.dumps(record, default=str), parse_constant=lambda _: None)
        text = json.dumps(finite, indent=2, ensure_ascii=False)
    typer.echo(text)


def print_note(text: str, quiet: bool = False) -> None:
    """Print a note on standard error."""
    if not quiet:
        typer.echo(f"Note: {text}", err=True)


def load_guard(path: Path, model: str | None, weights: Sequence[Path], trust_model: bool) -> tuple[Guard, Schema]:
    """Load the guard and the columns that its file stores.

    Importing a module runs its code, so a guard file, which anyone may have made, does not decide on it. Weights are read as
    plain tensors and compared with the digests in the guard, so those that the file names are used if none are given.
    """
    file = GuardFile.read(path)
    about = file.header.about
    named = about.get("model") if isinstance(about.get("model"), str) else None
    if model is None and not (trust_model and named):
        again = f"--model {named}, with which it was fitted, or --trust-model to import that because the file says so"
        raise UsageError(f"{path} needs the model that it guards: pass {again if named else '--model MODULE:CALLABLE'}.")
    files, names = list(weights), about.get("weights")
    if not files and isinstance(names, list):
        files = [path.absolute().parent / str(name) for name in names]
        missing = [file for file in files if not file.is_file()]
        if missing:
            raise FileError(f"Expected the weights of fit time at {missing[0]}, but there is no such file. Pass --weights.")
    guard = file.build(load_models(model or str(named), files))
    return guard, replace(Schema.from_dict(about, path), allow_nan=guard.place.allow_nan)


def load_models(spec: str, weights: Sequence[Path]) -> list[nn.Module]:
    """Make a model for each file of weights; without files, the model or models that the callable returns."""
    make = import_callable(spec)
    try:
        results = [make() for _ in weights or [None]]
    except (Exception, SystemExit) as error:
        reason = f"{type(error).__name__}: {first_line(error)}."
        raise ModelError(f"Expected {spec} to make a model when called without arguments, but it failed: {reason}") from error
    models = list(results[0]) if not weights and isinstance(results[0], list | tuple) else results
    for model in models:
        if not isinstance(model, nn.Module):
            raise ModelError(f"Expected {spec} to give a torch.nn.Module, but it gave {type(model).__name__}.")
    for model, path in zip(models, weights, strict=False):
        load_weights(model, path, spec)
    return [model.eval() for model in models]


def import_callable(spec: str) -> Callable[[], Any]:
    """Import what `module:callable` names; the current folder comes first."""
    module_name, mark, name = spec.partition(":")
    if not mark or not module_name or not name:
        raise UsageError(f"Expected --model as MODULE:CALLABLE, such as my_module:make_model, but got {spec!r}.")
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        value: Any = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        reason = f"{type(error).__name__}: {first_line(error)}."
        if isinstance(error, ModuleNotFoundError):
            reason = f"it needs {error.name!r}, which is not installed."
            if error.name and f"{module_name}.".startswith(f"{error.name}."):
                reason = f"there is no such module in {here} or among the installed ones."
        raise ModelError(f"Cannot import {module_name!r} for --model: {reason}") from error
    for part in name.split("."):
        if not hasattr(value, part):
            callables = [key for key, item in vars(value).items() if callable(item) and not key.startswith("_")]
            raise ModelError(f"Expected {name!r} of --model to be {nearest(part, callables)}, but {module_name} has none.")
        value = getattr(value, part)
    if not callable(value):
        kind = type(value).__name__
        raise ModelError(f"Expected {spec!r} to be a function or class that makes a model, but it is of type {kind}.")
    return value


def load_weights(model: nn.Module, path: Path, spec: str) -> None:
    """Load the weights of a file into a model; names and shapes must agree."""
    state, expected = read_weights(path), model.state_dict()
    for name in [*expected, *state]:
        ours, theirs = (tuple(each[name].shape) if name in each else None for each in (expected, state))
        if ours != theirs:
            difference = f"{theirs} in the file and {ours} in the model"
            if ours is None or theirs is None:
                difference = f"in {'the file' if ours is None else 'the model'} only"
            raise ModelError(f"The weights of {path} do not fit the model of {spec}: {name!r} is {difference}.")
    model.load_state_dict(dict(state))


def read_weights(path: Path) -> Mapping[str, Tensor]:
    """Read a state dict as plain tensors: nothing in the file is executed."""
    if not path.is_file():
        raise FileError(f"Expected weights at {path}, but there is no such file.")
    try:
        safe = path.suffix == ".safetensors"
        state: Any = load_file(path) if safe else torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # readers raise errors of many kinds on arbitrary bytes
        raise FileError(
            f"Expected weights at {path}, a state dict as .safetensors or .pt, but the file cannot be read: {first_line(error)}."
        ) from error
    if isinstance(state, Mapping) and isinstance(state.get("state_dict"), Mapping):
        state = state["state_dict"]  # a checkpoint
    if not isinstance(state, Mapping) or not all(isinstance(tensor, Tensor) for tensor in state.values()):
        raise FileError(f"Expected a dict of tensors at {path}, but it holds something else. Save `model.state_dict()`.")
    return state
