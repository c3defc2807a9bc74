"""Every error that offmap raises on purpose: what was expected, what came, how to fix it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class OffmapError(Exception):
    """Parent of all errors of this library."""


class ModelError(OffmapError):
    """The network cannot be used as it is."""


class ShapeError(OffmapError):
    """Outputs and targets do not fit each other or the likelihood."""


class ConfigError(OffmapError):
    """An option has an unknown name or an impossible value."""


class DataError(OffmapError):
    """The data are empty, too few, not finite or out of range."""


class FileError(OffmapError):
    """A file is missing, damaged, or belongs to something else."""


class RankError(OffmapError):
    """Of several processes that fit together one died, failed or never came."""


class NotFittedError(OffmapError):
    """Something was asked of an object before it was fitted."""


def nearest(word: object, valid: Iterable[str]) -> str:
    """Return half a sentence that names the valid words and the nearest one to `word`."""
    names = sorted(valid)
    close = difflib.get_close_matches(str(word), names, n=1, cutoff=0.5)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    return f"one of {names}{hint}"


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message without its full stop, or its type if there is none."""
    message = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return (message.strip().splitlines() or [type(error).__name__])[0].rstrip(". ")
