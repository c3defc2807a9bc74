"""What is asked of arguments at the door: kinds and ranges, which Python's annotations do not enforce."""

from __future__ import annotations

import inspect
import numbers
import operator
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from offmap.errors import ConfigError, DataError, nearest


def tensor(name: str, value: Any, *, seen: bool = True) -> Tensor:
    """A tensor of real numbers, and if they must be `seen`, of some that are there: the device "meta" has none.

    >>> tensor("scores", [1.0, 2.0])
    Traceback (most recent call last):
    offmap.errors.DataError: Expected `scores` to be a tensor of real numbers, but got list; pass `torch.as_tensor(scores)`.
    """
    if not isinstance(value, Tensor):
        hint = f"; pass `torch.as_tensor({name})`" if isinstance(value, list | tuple) or hasattr(value, "__array__") else ""
        raise DataError(f"Expected `{name}` to be a tensor of real numbers, but got {type(value).__name__}{hint}.")
    hollow = seen and value.is_meta
    if value.is_complex() or hollow or value.layout != torch.strided:
        kind = "one without values" if hollow else f"{value.dtype}, {value.layout}"
        raise DataError(f"Expected `{name}` to be a tensor of real numbers, but got {kind}.")
    return value


def share(name: str, value: Any) -> float:
    """A number strictly between 0 and 1, of whatever library.

    >>> share("level", 0.95)
    0.95
    """
    if not isinstance(value, numbers.Real) or not 0 < float(value) < 1:
        raise ConfigError(f"Expected `{name}` strictly between 0 and 1, such as 0.95, but got {value!r}.")
    return float(value)


def alarms(value: Any) -> float:
    """The share of in-distribution data that may be called OOD."""
    if not isinstance(value, numbers.Real) or not 0 < float(value) < 1:
        raise ConfigError(f"Expected `false_alarms` between 0 and 1, but got {value!r}.")
    return float(value)


def whole(name: str, value: Any, least: int | None = None, most: int | None = None) -> int:
    """A plain whole number, whatever library it comes from; truth values are none.

    >>> whole("seed", torch.tensor(3)), whole("draws", 5, 2)
    (3, 5)
    """
    bound = "" if least is None else f" ≥ {least}" if most is None else f" from {least} to {most}"
    try:
        found = operator.index(value)
    except (TypeError, ValueError):
        found = None
    if found is None or isinstance(value, bool) or (least is not None and found < least) or (most is not None and found > most):
        raise ConfigError(f"Expected `{name}` to be a whole number{bound}, but got {value!r}.")
    return found


def word(name: str, value: Any, valid: Iterable[str]) -> str:
    """One of some words; the nearest is named to who wrote another.

    >>> word("positive", "id", ("id", "ood"))
    'id'
    """
    known = list(valid)
    if not isinstance(value, str) or value not in known:
        raise ConfigError(f"Expected `{name}` to be {nearest(value, known)}, but got {value!r}.")
    return value


def function(name: str, value: Any, arguments: Sequence[str]) -> Any:
    """A function, refused if it cannot be called with so many arguments.

    >>> function("score", len, ["outputs", "targets"])
    Traceback (most recent call last):
    offmap.errors.ConfigError: Expected `score` to be a function of (outputs, targets), but got <built-in function len>.
    """
    try:
        fits = callable(value) and not isinstance(value, type)
        if fits:
            inspect.signature(value).bind(*arguments)
    except TypeError:
        fits = False
    except ValueError:  # it does not tell its signature
        fits = True
    if not fits:
        raise ConfigError(f"Expected `{name}` to be a function of ({', '.join(arguments)}), but got {value!r}.")
    return value


def file(name: str, value: Any) -> Path:
    """The path of a file."""
    if not isinstance(value, str | os.PathLike) or not Path(os.fsdecode(value)).name:
        raise ConfigError(f"Expected `{name}` to be the path of a file, but got {value!r}.")
    return Path(os.fsdecode(value))
