"""Models from `module:callable` and files of weights, and guards from their file."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from offmap.cli.options import UsageError
from offmap.data.tables.schema import Schema
from offmap.errors import FileError, ModelError, first_line, nearest
from offmap.guard import Guard
from offmap.io.guard_file import GuardFile


@dataclass(frozen=True)
class GuardSource:
    """A guard file, and what the user says of its model: `module:callable` and weights, or to trust what the file says."""

    path: Path
    model: str | None
    weights: Sequence[Path]
    trust_model: bool

    def load(self) -> tuple[Guard, Schema]:
        """Load the guard and the columns that its file stores.

        Importing a module runs its code, so a guard file, which anyone may have made, does not decide on it. Weights are read as
        plain tensors and compared with the digests in the guard, so those that the file names are used if none are given.
        """
        file = GuardFile.read(self.path)
        stored = file.header.about
        named = stored.get("model") if isinstance(stored.get("model"), str) else None
        if self.model is None and not (self.trust_model and named):
            again = f"--model {named}, with which it was fitted, or --trust-model to import that because the file says so"
            raise UsageError(f"{self.path} needs the model that it guards: pass {again if named else '--model MODULE:CALLABLE'}.")
        files, names = list(self.weights), stored.get("weights")
        if not files and isinstance(names, list):
            files = [self.path.absolute().parent / str(name) for name in names]
            missing = [file for file in files if not file.is_file()]
            if missing:
                raise FileError(f"Expected the weights of fit time at {missing[0]}, but there is no such file. Pass --weights.")
        models = load_models(self.model or str(named), files)
        return file.build(models), Schema.from_dict(stored, self.path)


def load_models(spec: str, weights: Sequence[Path]) -> list[nn.Module]:
    """Make a model for each file of weights; without files, the model or models that the callable returns."""
    make = import_callable(spec)
    if not weights:
        result = _call(make, spec)
        return [_check_module(model, spec) for model in (result if isinstance(result, list | tuple) else [result])]
    return [load_weights(_check_module(_call(make, spec), spec), path, spec) for path in weights]


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
        raise ModelError(
            f"Expected {spec!r} to be a function or class that makes a model, but it is of type {type(value).__name__}."
        )
    return value


def load_weights(model: nn.Module, path: Path, spec: str) -> nn.Module:
    """Load the weights of a file into a model; names and shapes must agree."""
    state, expected = read_weights(path), model.state_dict()
    for name in [*expected, *state]:
        if name not in state or name not in expected:
            place = "the file" if name in state else "the model"
            raise ModelError(f"The weights of {path} do not fit the model of {spec}: {name!r} is in {place} only.")
        if state[name].shape != expected[name].shape:
            raise ModelError(
                f"The weights of {path} do not fit the model of {spec}: {name!r} is {tuple(state[name].shape)} in the file and "
                f"{tuple(expected[name].shape)} in the model."
            )
    model.load_state_dict(dict(state))
    return model


def read_weights(path: Path) -> Mapping[str, Tensor]:
    """Read a state dict as plain tensors: nothing in the file is executed."""
    if not path.is_file():
        raise FileError(f"Expected weights at {path}, but there is no such file.")
    try:
        safe = path.suffix == ".safetensors"
        state: Any = load_file(path) if safe else torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # readers raise errors of many kinds on arbitrary bytes
        raise FileError(f"Expected weights at {path}, but the file cannot be read: {first_line(error)}.") from error
    if isinstance(state, Mapping) and isinstance(state.get("state_dict"), Mapping):
        state = state["state_dict"]  # a checkpoint
    if not isinstance(state, Mapping) or not all(isinstance(tensor, Tensor) for tensor in state.values()):
        raise FileError(f"Expected a dict of tensors at {path}, but it holds something else. Save `model.state_dict()`.")
    return state


def _call(make: Callable[[], Any], spec: str) -> Any:
    try:
        return make()
    except (Exception, SystemExit) as error:
        raise ModelError(
            f"Expected {spec} to make a model when called without arguments, but it failed: "
            f"{type(error).__name__}: {first_line(error)}."
        ) from error


def _check_module(model: Any, spec: str) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise ModelError(f"Expected {spec} to give a torch.nn.Module, but it gave {type(model).__name__}.")
    return model.eval()
