"""Checks of arguments: types and ranges, which Python's annotations do not enforce.

Functions take the argument's name and value and return the value in plain Python, or raise a ConfigError. Fields of a dataclass
declare their documentation and bounds with `option`; `validate` checks them all. `require` imports an optional package.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import inspect
import math
import numbers
import operator
import os
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from offmap.errors import ConfigError, DataError, nearest

LARGEST = 3e38
"""Options beyond it are infinite in single precision."""


MOST_BITS = 4096
"""Python does not print much longer whole numbers."""


def option(default: Any, doc: str, *, check: Callable[[Any], Any] | None = None, **bounds: float) -> Any:
    """Declare a dataclass field with its documentation, and with what `validate` asks of it beside its type.

    Args:
        default: The default value.
        doc: One or two sentences for the API page.
        check: A function that raises for a wrong value, instead of what the type asks for.
        **bounds: `above`, `at_least` and `at_most` of numbers.

    >>> @dataclasses.dataclass
    ... class Adam:
    ...     lr: float = option(0.02, "Learning rate.", above=0)
    >>> validate(Adam(lr=-1.0))
    Traceback (most recent call last):
    offmap.errors.ConfigError: Expected `lr` to be a number above 0, but got -1.0.
    """
    return dataclasses.field(default=default, metadata={"doc": doc, "check": check, "bounds": bounds})


def validate(options: Any) -> None:
    """Raise a ConfigError for the first field of a dataclass whose value its type and its `option` do not allow."""
    for f, kinds in _find_options(type(options)):
        name, value, check, optional = f.name, getattr(options, f.name), f.metadata["check"], NoneType in kinds
        words = [word for kind in kinds if get_origin(kind) is Literal for word in get_args(kind)]
        if value is None and optional:
            continue
        if check is not None:
            check(value)
        elif words:
            one_of(name, value, words)
        elif bool in kinds:
            flag(name, value)
        elif int in kinds or float in kinds:
            several: Any = isinstance(value, list | tuple) and any(get_origin(kind) is Sequence for kind in kinds) and value
            for entry in several or [value]:
                (number if float in kinds else integer)(name, entry, **f.metadata["bounds"], optional=optional)


@cache
def _find_options(kind: type) -> list[tuple[dataclasses.Field[Any], tuple[Any, ...]]]:
    """Return the fields made by `option`, each with the members of its type."""
    hints = get_type_hints(kind)
    unions = {name: get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,) for name, hint in hints.items()}
    return [(f, unions[f.name]) for f in dataclasses.fields(kind) if "bounds" in f.metadata]


def flag(name: str, value: Any) -> bool:
    """Return a truth value; other values, such as 1 or "yes", are refused."""
    if not isinstance(value, bool):
        raise ConfigError(f"Expected `{name}` to be True or False, but got {value!r}.")
    return value


def integer(name: str, value: Any, at_least: float | None = None, at_most: float | None = None, **bounds: Any) -> int:
    """Return a whole number of any library as a plain int; truth values are refused.

    >>> integer("seed", torch.tensor(3)), integer("draws", 5, 2)
    (3, 5)
    """
    try:
        result = None if isinstance(value, bool) else operator.index(value)
    except (TypeError, ValueError):
        result = None
    if result is not None and result.bit_length() > MOST_BITS:
        raise ConfigError(f"Expected `{name}` to be a whole number of at most {MOST_BITS} bits, but got {result.bit_length()}.")
    return int(_check_range(result, "a whole number", name, value, at_least, at_most, **bounds))


def number(name: str, value: Any, at_least: float | None = None, at_most: float | None = None, **bounds: Any) -> float:
    """Return a finite number as a plain float."""
    bounded = at_least is not None or bounds.get("above") is not None
    value = value if not isinstance(value, int) or isinstance(value, bool) else integer(name, value)
    result = math.nan
    with contextlib.suppress(OverflowError):
        result = float(value) if isinstance(value, numbers.Real) and not isinstance(value, bool) else math.nan
    finite = math.isfinite(result) and (bounded or abs(result) <= LARGEST)
    _check_range(result if finite else None, f"a{'' if bounded else ' finite'} number", name, value, at_least, at_most, **bounds)
    if result > LARGEST:
        raise ConfigError(f"Expected `{name}` to be at most {LARGEST:g}, but got {value!r}.")
    return result


def _check_range(
    result: float | None, kind: str, name: str, value: Any, at_least: float | None, at_most: float | None,
    above: float | None = None, optional: bool = False,
) -> float:  # fmt: skip
    """Return the result, or raise with what was expected: "a whole number ≥ 2 or None" and the like."""
    low = -math.inf if at_least is None else at_least
    if result is not None and result >= low and (above is None or result > above) and (at_most is None or result <= at_most):
        return result
    bound = "" if at_least is None else f" ≥ {at_least:g}"
    if at_least is not None and at_most is not None:
        bound = f" from {at_least:g} to {at_most:g}"
    elif above is not None:
        bound = f" above {above:g}" + ("" if at_most is None else f" and at most {at_most:g}")
    raise ConfigError(f"Expected `{name}` to be {kind}{bound}{' or None' if optional else ''}, but got {value!r}.")


def fraction(name: str, value: Any, *, example: float = 0.95) -> float:
    """Return a number strictly between 0 and 1, of any library, as a plain float."""
    value = integer(name, value) if isinstance(value, int) and not isinstance(value, bool) else value
    if not isinstance(value, numbers.Real) or not 0 < float(value) < 1:
        raise ConfigError(f"Expected `{name}` strictly between 0 and 1, such as {example:g}, but got {value!r}.")
    return float(value)


def one_of(name: str, value: Any, valid: Iterable[str], also: str = "") -> str:
    """Return `value` if it is in `valid`, else raise with a suggestion; `also` says what else is accepted."""
    words = list(valid)
    if not isinstance(value, str) or value not in words:
        raise ConfigError(f"Expected `{name}` to be {nearest(value, words)}{also}, but got {value!r}.")
    return value


def function(name: str, value: Any, arguments: Sequence[str]) -> Any:
    """Return a function, refused if it cannot be called with so many arguments.

    >>> function("score", len, ["outputs", "targets"])
    Traceback (most recent call last):
    offmap.errors.ConfigError: Expected `score` to be a function of (outputs, targets), but got <built-in function len>.
    """
    try:
        if not callable(value) or isinstance(value, type):
            raise TypeError
        with contextlib.suppress(ValueError):  # it has no signature to inspect
            inspect.signature(value).bind(*arguments)
    except TypeError:
        raise ConfigError(f"Expected `{name}` to be a function of ({', '.join(arguments)}), but got {value!r}.") from None
    return value


def path(name: str, value: Any) -> Path:
    """Return the path of a file."""
    if not isinstance(value, str | os.PathLike) or not Path(os.fsdecode(value)).name:
        raise ConfigError(f"Expected `{name}` to be the path of a file, but got {value!r}.")
    return Path(os.fsdecode(value))


def tensor(name: str, value: Any) -> Tensor:
    """Return a dense tensor of real numbers, with values: not on the device "meta".

    >>> tensor("scores", [1.0, 2.0])
    Traceback (most recent call last):
    offmap.errors.DataError: Expected `scores` to be a tensor of real numbers, but got list; pass `torch.as_tensor(scores)`.
    """
    if not isinstance(value, Tensor):
        hint = f"; pass `torch.as_tensor({name})`" if isinstance(value, list | tuple) or hasattr(value, "__array__") else ""
        raise DataError(f"Expected `{name}` to be a tensor of real numbers, but got {type(value).__name__}{hint}.")
    if value.is_complex() or value.is_meta or value.layout != torch.strided:
        kind = "one without values" if value.is_meta else f"{value.dtype}, {value.layout}"
        raise DataError(f"Expected `{name}` to be a tensor of real numbers, but got {kind}.")
    return value


def require(module: str, extra: str, *, package: str = "offmap", no_deps: str = "") -> Any:
    """Import an optional module, or raise a ConfigError that says what to install: the `extra` of a `package`.

    Packages in `no_deps` are to be installed without their dependencies, since these would bring another torch.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        root = module.partition(".")[0]
        if (error.name or "").partition(".")[0] != root:
            raise
        command = f"pip install '{package}[{extra}]'" + (f" && pip install --no-deps {no_deps}" if no_deps else "")
        packages = {"sklearn": "scikit-learn", "PIL": "pillow", "laplace": "laplace-torch"}  # modules called otherwise
        raise ConfigError(f"{packages.get(root, root)} is needed here and is not installed: {command}") from error
