"""Parse the body of a request, which anyone may send, to arrays that the model takes, or refuse it with a reason."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Arrays: TypeAlias = dict[str, NDArray[Any]]
"""Rows of every input or output, by name."""


class RequestError(Exception):
    """A request that is refused, with the HTTP status and a sentence."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status, self.reason = status, reason


@dataclass(frozen=True)
class InputSpec:
    """An input of the model: its name, the shape of one row (None: any length), and its type."""

    name: str
    shape: tuple[int | None, ...]
    dtype: type[np.generic]

    def convert(self, array: NDArray[Any]) -> NDArray[Any]:
        """Convert an array of numbers to the type of this input, if it has its shape and is finite."""
        got, dtype = array.shape[1:], np.dtype(self.dtype)
        if array.ndim != 1 + len(self.shape) or any(n not in (None, size) for n, size in zip(self.shape, got, strict=True)):
            axes = "".join(f", {'any' if size is None else size}" for size in self.shape)
            raise RequestError(422, f"Expected {self.name} (rows{axes}), but got an array of shape {array.shape}.")
        if array.dtype.kind == "f" and dtype.kind == "i":
            raise RequestError(422, f"Expected whole numbers in `{self.name}`.")
        with np.errstate(over="ignore"):
            result = np.ascontiguousarray(array, dtype=dtype)
        if not bool(np.isfinite(result).all()):
            raise RequestError(422, f"Expected finite {dtype.name} numbers in `{self.name}`.")
        return result


def parse_inputs(content_type: str, body: bytes, specs: Sequence[InputSpec], max_rows: int) -> Arrays:
    """Parse a body; raise 415 for another content type, 422 for another shape, 413 for too many rows."""
    parse = PARSERS.get(content_type)
    if parse is None:
        raise RequestError(415, f"Expected Content-Type {' or '.join(PARSERS)}, but got {content_type or 'none'!r}.")
    parsed = parse(body, [spec.name for spec in specs])
    arrays = {spec.name: spec.convert(parsed[spec.name]) for spec in specs}
    counts = {name: len(array) for name, array in arrays.items()}
    rows = next(iter(counts.values()))
    if len(set(counts.values())) > 1:
        raise RequestError(422, f"Expected one row per example in every input, but got {counts}.")
    if rows == 0:
        raise RequestError(422, "Expected at least one row, but got none.")
    if rows > max_rows:
        raise RequestError(413, f"Expected at most {max_rows} rows, but got {rows}. Send them in parts.")
    return arrays


def _parse_json(body: bytes, names: list[str]) -> Arrays:
    def refuse_constant(word: str) -> float:
        raise ValueError(f"{word} is no JSON number")

    try:
        content = json.loads(body, parse_constant=refuse_constant)
    except (ValueError, RecursionError) as error:
        raise RequestError(422, f"Expected JSON, but the body is none: {str(error)[:200]}.") from error
    inputs = content.get("inputs") if isinstance(content, dict) else None
    if isinstance(inputs, list) and len(names) == 1:
        inputs = {names[0]: inputs}
    if not isinstance(inputs, dict) or set(inputs) != set(names):
        shape = "[[…], …]" if len(names) == 1 else "{" + ", ".join(f'"{name}": [[…], …]' for name in names) + "}"
        raise RequestError(422, f'Expected {{"inputs": {shape}}} with a row per example.')
    return {name: _to_array(values, name) for name, values in inputs.items()}


def _to_array(values: Any, name: str) -> NDArray[Any]:
    try:
        array = np.asarray(values)
    except (ValueError, RecursionError, OverflowError) as error:  # rows of different lengths
        raise RequestError(422, f"Expected rows of one length in `{name}`.") from error
    if array.dtype.kind == "O" and all(type(value) in (int, float) for value in array.flat):  # integers past 64 bits
        try:
            array = array.astype(np.float64)
        except OverflowError as error:
            raise RequestError(422, f"Expected finite numbers in `{name}`.") from error
    if array.dtype.kind not in "iuf" and array.size:
        raise RequestError(422, f"Expected numbers in `{name}`, in rows of one length.")
    return array


def _parse_npy(body: bytes, names: list[str]) -> Arrays:
    """Parse one array; its header is believed only if it fits the bytes that follow."""
    if len(names) != 1:
        raise RequestError(415, f"Expected application/json for the inputs {', '.join(names)}.")
    file = io.BytesIO(body)
    try:
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = read(file)
    except Exception as error:
        raise RequestError(422, "Expected an array as numpy.save writes it, but its header cannot be read.") from error
    if dtype.kind not in "iuf" or any(size < 0 for size in shape):
        raise RequestError(422, f"Expected an array of numbers, but got {dtype}.")
    content, size = body[file.tell() :], math.prod(shape) * dtype.itemsize
    if size != len(content):
        raise RequestError(422, f"Expected {size} bytes after the header, but got {len(content)}.")
    return {names[0]: np.frombuffer(content, dtype).reshape(shape, order="F" if fortran else "C")}


PARSERS = {"application/json": _parse_json, "application/x-npy": _parse_npy}
"""By content type."""
