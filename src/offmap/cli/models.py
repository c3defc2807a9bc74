"""From `module:callable` and files of weights to nets."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from offmap.cli.options import Misuse
from offmap.errors import FileError, ModelError, nearest


def nets_of(spec: str, weights: Sequence[Path]) -> list[nn.Module]:
    """A net for each file of weights; without files the net or nets that the callable gives, as they are."""
    make = callable_of(spec)
    if not weights:
        given = _made(make, spec)
        return [_checked(net, spec) for net in (given if isinstance(given, list | tuple) else [given])]
    return [filled(_checked(_made(make, spec), spec), path, spec) for path in weights]


def callable_of(spec: str) -> Callable[[], Any]:
    """What `module:callable` names; the current folder is looked in first."""
    module_name, mark, name = spec.partition(":")
    if not mark or not module_name or not name:
        raise Misuse(f"Expected --net as MODULE:CALLABLE, such as my_module:make_net, but got {spec!r}.")
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise ModelError(
                f"Cannot import {module_name!r} for --net: it needs {error.name!r}, which is not installed."
            ) from error
        raise ModelError(
            f"Cannot import {module_name!r} for --net: there is no such module in {here} or among the installed ones."
        ) from error
    except (Exception, SystemExit) as error:
        raise ModelError(f"Cannot import {module_name!r} for --net: {_reason(error)}") from error
    for part in name.split("."):
        if not hasattr(found, part):
            raise ModelError(f"Expected {name!r} of --net to be {nearest(part, _callables(found))}, but {module_name} has none.")
        found = getattr(found, part)
    if not callable(found):
        raise ModelError(
            f"Expected {spec!r} to be a function or class that makes a net, but it is of type {type(found).__name__}."
        )
    return found


def filled(net: nn.Module, path: Path, spec: str) -> nn.Module:
    """The net with the weights of a file, which must be all that it has."""
    state, own = read_weights(path), net.state_dict()
    for name in [*own, *state]:
        where = "the file" if name in state else "the net"
        if name not in state or name not in own:
            raise ModelError(f"The weights of {path} do not fit the net of {spec}: {name!r} is in {where} only.")
        if state[name].shape != own[name].shape:
            raise ModelError(
                f"The weights of {path} do not fit the net of {spec}: {name!r} is {tuple(state[name].shape)} in the file and "
                f"{tuple(own[name].shape)} in the net."
            )
    net.load_state_dict(dict(state))
    return net


def read_weights(path: Path) -> Mapping[str, Tensor]:
    """A state dict, read as plain tensors: nothing in the file is run."""
    if not path.is_file():
        raise FileError(f"Expected weights at {path}, but there is no such file.")
    try:
        safe = path.suffix == ".safetensors"
        state: Any = load_file(path) if safe else torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever the bytes are, they are no weights
        raise FileError(f"Expected weights at {path}, but the file cannot be read: {_reason(error)}") from error
    if isinstance(state, Mapping) and isinstance(state.get("state_dict"), Mapping):
        state = state["state_dict"]  # a checkpoint
    if not isinstance(state, Mapping) or not all(isinstance(tensor, Tensor) for tensor in state.values()):
        raise FileError(f"Expected a dict of tensors at {path}, but it holds something else. Save `net.state_dict()`.")
    return state


def _made(make: Callable[[], Any], spec: str) -> Any:
    try:
        return make()
    except (Exception, SystemExit) as error:
        raise ModelError(
            f"Expected {spec} to make a net when called without arguments, but it failed: {_reason(error)}"
        ) from error


def _checked(net: Any, spec: str) -> nn.Module:
    if not isinstance(net, nn.Module):
        raise ModelError(f"Expected {spec} to give a torch.nn.Module, but it gave {type(net).__name__}.")
    return net.eval()


def _callables(module: Any) -> list[str]:
    return [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]


def _reason(error: BaseException) -> str:
    """An error of someone else's code in one line."""
    told = (str(error).strip().splitlines() or [""])[0].rstrip(".")
    return f"{type(error).__name__}{f': {told}' if told else ''}."
