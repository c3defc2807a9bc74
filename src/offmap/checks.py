"""Checks of arguments: types and ranges, which Python's annotations do not enforce.

Functions take the argument's name and value and return the value in plain Python, or raise a ConfigError. Fields of a dataclass
declare their documentation and bounds with `option`; `validate` checks them all.
"""

from __future__ import annotations

import inspect
import math
import numbers
import operator
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import Field, dataclass, field, fields
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from offmap.errors import ConfigError, DataError, nearest

LARGEST = 3e38
"""Options beyond it are infinite in single precision."""


@dataclass(frozen=True)
class Option:
    """Documentation and bounds of one field."""

    doc: str
    above: float | None = None
    at_least: float | None = None
    at_most: float | None = None
    one_of: Sequence[str] | None = None
    check: Callable[[Any], Any] | None = None


def option(
    default: Any, doc: str, *, above: float | None = None, at_least: float | None = None, at_most: float | None = None,
    one_of: Sequence[str] | None = None, check: Callable[[Any], Any] | None = None,
) -> Any:  # fmt: skip
    """Declare a dataclass field with its documentation and its bounds.

    Args:
        default: The default value.
        doc: One or two sentences for help texts and the API page.
        above: Numbers must be larger.
        at_least: Numbers must be at least this.
        at_most: Numbers must be at most this.
        one_of: The valid words; those of a `Literal` type need not be repeated.
        check: A function that raises for a wrong value, instead of what the type of the field asks for.

    >>> @dataclass(frozen=True)
    ... class Adam:
    ...     lr: float = option(0.02, "Learning rate.", above=0)
    >>> validate(Adam(lr=-1.0))
    Traceback (most recent call last):
    offmap.errors.ConfigError: Expected `lr` to be a number above 0, but got -1.0.
    """
    return field(default=default, metadata={"option": Option(doc, above, at_least, at_most, one_of, check)})


def option_docs(options: Any) -> dict[str, str]:
    """Return the documentation of the fields of a dataclass, by name."""
    return {f.name: f.metadata["option"].doc for f in fields(options) if "option" in f.metadata}


def validate(options: Any) -> None:
    """Raise a ConfigError for the first field of a dataclass whose value its type and its `option` do not allow."""
    for f, kinds in _declared(type(options)):
        _check_option(f.name, getattr(options, f.name), kinds, f.metadata["option"])


@cache
def _declared(kind: type) -> list[tuple[Field[Any], tuple[Any, ...]]]:
    """Return the fields made by `option`, each with the members of its type."""
    hints = get_type_hints(kind)
    unions = {name: get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,) for name, hint in hints.items()}
    return [(f, unions[f.name]) for f in fields(kind) if "option" in f.metadata]


def _check_option(name: str, value: Any, kinds: tuple[Any, ...], bounds: Option) -> None:
    words = bounds.one_of or [word for kind in kinds if get_origin(kind) is Literal for word in get_args(kind)]
    optional, several = NoneType in kinds, any(get_origin(kind) is Sequence for kind in kinds)
    if value is None and optional:
        return
    if bounds.check is not None:
        bounds.check(value)
    elif words and not (int in kinds and not isinstance(value, str)):
        one_of(name, value, words)
    elif bool in kinds:
        if not isinstance(value, bool):
            raise ConfigError(f"Expected `{name}` to be True or False, but got {value!r}.")
    elif int in kinds or float in kinds:
        check = integer if float not in kinds else number
        for entry in value if several and isinstance(value, list | tuple) and value else [value]:
            check(name, entry, bounds.at_least, bounds.at_most, above=bounds.above, optional=optional)


def _describe(kind: str, at_least: float | None, at_most: float | None, above: float | None, *, optional: bool) -> str:
    """Return "a whole number ≥ 2 or None" and the like."""
    both = at_least is not None and at_most is not None
    low = f" above {above:g}" if above is not None else "" if at_least is None else f" ≥ {at_least:g}"
    high = f" and at most {at_most:g}" if above is not None and at_most is not None else ""
    bound = f" from {at_least:g} to {at_most:g}" if both else low + high
    return f"{kind}{bound}{' or None' if optional else ''}"


def integer(
    name: str, value: Any, at_least: float | None = None, at_most: float | None = None, *, above: float | None = None,
    optional: bool = False,
) -> int:  # fmt: skip
    """Return a whole number of any library as a plain int; truth values are refused.

    >>> integer("seed", torch.tensor(3)), integer("draws", 5, 2)
    (3, 5)
    """
    try:
        result = None if isinstance(value, bool) else operator.index(value)
    except (TypeError, ValueError):
        result = None
    if result is None or not _within(result, at_least, at_most, above):
        expected = _describe("a whole number", at_least, at_most, above, optional=optional)
        raise ConfigError(f"Expected `{name}` to be {expected}, but got {value!r}.")
    return result


def number(
    name: str, value: Any, at_least: float | None = None, at_most: float | None = None, *, above: float | None = None,
    optional: bool = False,
) -> float:  # fmt: skip
    """Return a finite number as a plain float."""
    bounded = at_least is not None or above is not None
    result = float(value) if isinstance(value, numbers.Real) and not isinstance(value, bool) else math.nan
    if not math.isfinite(result) or not _within(result, at_least, at_most, above) or (not bounded and abs(result) > LARGEST):
        expected = _describe("a number" if bounded else "a finite number", at_least, at_most, above, optional=optional)
        raise ConfigError(f"Expected `{name}` to be {expected}, but got {value!r}.")
    if result > LARGEST:
        raise ConfigError(f"Expected `{name}` to be at most {LARGEST:g}, but got {value!r}.")
    return result


def _within(value: float, at_least: float | None, at_most: float | None, above: float | None) -> bool:
    low = (at_least is None or value >= at_least) and (above is None or value > above)
    return low and (at_most is None or value <= at_most)


def fraction(name: str, value: Any, *, example: float = 0.95) -> float:
    """Return a number strictly between 0 and 1, of any library, as a plain float.

    >>> fraction("level", 0.95)
    0.95
    """
    if not isinstance(value, numbers.Real) or not 0 < float(value) < 1:
        raise ConfigError(f"Expected `{name}` strictly between 0 and 1, such as {example:g}, but got {value!r}.")
    return float(value)


def one_of(name: str, value: Any, valid: Iterable[str]) -> str:
    """Return `value` if it is in `valid`, else raise with a suggestion.

    >>> one_of("positive", "id", ("id", "ood"))
    'id'
    """
    words = list(valid)
    if not isinstance(value, str) or value not in words:
        raise ConfigError(f"Expected `{name}` to be {nearest(value, words)}, but got {value!r}.")
    return value


def function(name: str, value: Any, arguments: Sequence[str]) -> Any:
    """Return a function, refused if it cannot be called with so many arguments.

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
    except ValueError:  # it has no signature to inspect
        fits = True
    if not fits:
        raise ConfigError(f"Expected `{name}` to be a function of ({', '.join(arguments)}), but got {value!r}.")
    return value


def path(name: str, value: Any) -> Path:
    """Return the path of a file."""
    if not isinstance(value, str | os.PathLike) or not Path(os.fsdecode(value)).name:
        raise ConfigError(f"Expected `{name}` to be the path of a file, but got {value!r}.")
    return Path(os.fsdecode(value))


def tensor(name: str, value: Any, *, meta: bool = False) -> Tensor:
    """Return a dense tensor of real numbers; without values, on the device "meta", only if so allowed.

    >>> tensor("scores", [1.0, 2.0])
    Traceback (most recent call last):
    offmap.errors.DataError: Expected `scores` to be a tensor of real numbers, but got list; pass `torch.as_tensor(scores)`.
    """
    if not isinstance(value, Tensor):
        hint = f"; pass `torch.as_tensor({name})`" if isinstance(value, list | tuple) or hasattr(value, "__array__") else ""
        raise DataError(f"Expected `{name}` to be a tensor of real numbers, but got {type(value).__name__}{hint}.")
    without_values = value.is_meta and not meta
    if value.is_complex() or without_values or value.layout != torch.strided:
        kind = "one without values" if without_values else f"{value.dtype}, {value.layout}"
        raise DataError(f"Expected `{name}` to be a tensor of real numbers, but got {kind}.")
    return value
