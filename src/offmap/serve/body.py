"""Bytes that anyone may send become arrays that the model takes, or a refusal that says why."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offmap.serve.model import Arrays, Wanted


class Refused(Exception):
    """A request that gets no answer: the HTTP status, and a sentence."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status, self.reason = status, reason


def arrays_of(kind: str, body: bytes, wanted: Sequence[Wanted], most_rows: int) -> Arrays:
    """The inputs in a body of some content type; 415 for other types, 422 for other forms, 413 for too many rows."""
    reader = READERS.get(kind)
    if reader is None:
        raise Refused(415, f"Expected Content-Type {' or '.join(READERS)}, but got {kind or 'none'!r}.")
    given = reader(body, wanted)
    checked = {each.name: _checked(given[each.name], each) for each in wanted}
    counts = {name: len(array) for name, array in checked.items()}
    rows = next(iter(counts.values()))
    if len(set(counts.values())) > 1:
        raise Refused(422, f"Expected one row per example in every input, but got {counts}.")
    if rows == 0:
        raise Refused(422, "Expected at least one row, but got none.")
    if rows > most_rows:
        raise Refused(413, f"Expected at most {most_rows} rows, but got {rows}. Send them in parts.")
    return checked


def _json(body: bytes, wanted: Sequence[Wanted]) -> dict[str, Any]:
    try:
        told = json.loads(body, parse_constant=_constant)
    except (ValueError, RecursionError) as error:
        raise Refused(422, f"Expected JSON, but the body is none: {str(error)[:200]}.") from error
    inputs = told.get("inputs") if isinstance(told, dict) else None
    if isinstance(inputs, list) and len(wanted) == 1:
        inputs = {wanted[0].name: inputs}
    names = [each.name for each in wanted]
    if not isinstance(inputs, dict) or set(inputs) != set(names):
        form = "[[…], …]" if len(wanted) == 1 else "{" + ", ".join(f'"{name}": [[…], …]' for name in names) + "}"
        raise Refused(422, f'Expected {{"inputs": {form}}} with a row per example.')
    return {name: _numbers(values, name) for name, values in inputs.items()}


def _constant(word: str) -> float:
    raise ValueError(f"{word} is no JSON number")


def _numbers(values: Any, name: str) -> NDArray[Any]:
    try:
        array = np.asarray(values)
    except (ValueError, RecursionError, OverflowError) as error:  # rows of different lengths
        raise Refused(422, f"Expected rows of one length in `{name}`.") from error
    if array.dtype.kind == "O" and all(type(each) in (int, float) for each in array.flat):  # whole numbers past 64 bits
        try:
            array = array.astype(np.float64)
        except OverflowError as error:
            raise Refused(422, f"Expected finite numbers in `{name}`.") from error
    if array.dtype.kind not in "iuf" and array.size:
        raise Refused(422, f"Expected numbers in `{name}`, in rows of one length.")
    return array


def _npy(body: bytes, wanted: Sequence[Wanted]) -> dict[str, Any]:
    """One array; its header is believed only as far as there are bytes."""
    if len(wanted) != 1:
        raise Refused(415, f"Expected application/json for the inputs {', '.join(each.name for each in wanted)}.")
    file = io.BytesIO(body)
    try:
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, columns_first, dtype = read(file)
    except Exception as error:
        raise Refused(422, "Expected an array as numpy.save writes it, but its header cannot be read.") from error
    if dtype.kind not in "iuf" or any(size < 0 for size in shape):
        raise Refused(422, f"Expected an array of numbers, but got {dtype}.")
    rest = body[file.tell() :]
    if math.prod(shape) * dtype.itemsize != len(rest):
        raise Refused(422, f"Expected {math.prod(shape) * dtype.itemsize} bytes after the header, but got {len(rest)}.")
    array = np.frombuffer(rest, dtype)
    return {wanted[0].name: array.reshape(shape, order="F" if columns_first else "C")}


READERS: dict[str, Callable[[bytes, Sequence[Wanted]], dict[str, Any]]] = {
    "application/json": _json,
    "application/x-npy": _npy,
}
"""Content types, and how each is read."""


def _checked(array: NDArray[Any], wanted: Wanted) -> NDArray[Any]:
    """The array in the model's numbers, if it has its form and is finite."""
    fits = array.ndim == 1 + len(wanted.shape) and all(
        size is None or size == got for size, got in zip(wanted.shape, array.shape[1:], strict=True)
    )
    if not fits:
        raise Refused(422, f"Expected {wanted}, but got an array of shape {array.shape}.")
    if array.dtype.kind == "f" and np.dtype(wanted.dtype).kind == "i":
        raise Refused(422, f"Expected whole numbers in `{wanted.name}`.")
    with np.errstate(over="ignore"):
        made = np.ascontiguousarray(array, dtype=wanted.dtype)
    if not bool(np.isfinite(made).all()):
        raise Refused(422, f"Expected finite {np.dtype(wanted.dtype).name} numbers in `{wanted.name}`.")
    return made
