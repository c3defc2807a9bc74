"""Parse the body of a request, which anyone may send, to arrays that the model takes, or refuse it with a reason."""

from __future__ import annotations

import difflib
import io
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Arrays: TypeAlias = dict[str, NDArray[Any]]
"""Rows of every input or output, by name."""

MAX_LISTS = 1 << 18  # of a body, where the shape of a row does not tell how many it has
MARGIN = 1000  # lists, objects and commas beside those of the rows


class RequestError(Exception):
    """A request that is refused, with the HTTP status and a sentence."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status: int = status
        self.reason: str = reason


@dataclass(frozen=True)
class InputSpec:
    """An input of the model: its name, the shape of one row (None: any length), its type, and whether values may be missing."""

    name: str
    shape: tuple[int | None, ...]
    dtype: type[np.generic]
    allow_nan: bool = False

    def check_shape(self, shape: tuple[int, ...]) -> None:
        """Refuse arrays of another shape than rows of this input have."""
        if len(shape) != 1 + len(self.shape) or any(n not in (None, size) for n, size in zip(self.shape, shape[1:], strict=True)):
            axes = "".join(f", {'any' if size is None else size}" for size in self.shape)
            raise RequestError(422, f"Expected `{self.name}` of shape (rows{axes}), but got {str(shape)[:100]}.")

    def convert(self, array: NDArray[Any]) -> NDArray[Any]:
        """Convert an array of numbers to the type of this input, if it can hold them and they are finite."""
        dtype = np.dtype(self.dtype)
        if dtype.kind == "i":
            bounds = np.iinfo(dtype.name)
            if array.dtype.kind == "f":
                raise RequestError(422, f"Expected whole numbers in `{self.name}`.")
            if bool((array < bounds.min).any() or (array > bounds.max).any()):
                raise RequestError(422, f"Expected {dtype.name} numbers in `{self.name}`, {bounds.min} to {bounds.max}.")
        with np.errstate(over="ignore"):
            result = np.ascontiguousarray(array, dtype=dtype)
        if not bool((np.isfinite(result) | (np.isnan(result) & self.allow_nan)).all()):
            raise RequestError(422, f"Expected finite {dtype.name} numbers in `{self.name}`.")
        return result


def parse_inputs(
    content_type: str, body: bytes, specs: Sequence[InputSpec], max_rows: int, columns: Sequence[str] | None = None
) -> Arrays:
    """Parse a body; raise 415 for another content type, 422 for another shape, 413 for too many rows.

    With `columns`, the names of the only input's columns, JSON rows may be objects.
    """
    parse = PARSERS.get(content_type)
    if parse is None:
        raise RequestError(415, f"Expected Content-Type {' or '.join(PARSERS)}, but got {content_type[:100] or 'none'!r}.")
    arrays = parse(body, specs, max_rows, columns)
    for spec in specs:
        spec.check_shape(arrays[spec.name].shape)
    counts = {name: len(array) for name, array in arrays.items()}
    rows = next(iter(counts.values()))
    if len(set(counts.values())) > 1:
        raise RequestError(422, f"Expected one row per example in every input, but got {counts}.")
    if rows == 0:
        raise RequestError(422, "Expected at least one row, but got none.")
    if rows > max_rows:
        raise RequestError(413, f"Expected at most {max_rows} rows, but got {rows}. Send them in parts.")
    return {spec.name: spec.convert(arrays[spec.name]) for spec in specs}


def _parse_json(body: bytes, specs: Sequence[InputSpec], max_rows: int, columns: Sequence[str] | None) -> Arrays:
    _count_json(body, specs, max_rows, columns or ())

    missing = any(spec.allow_nan for spec in specs)

    def read_constant(word: str) -> float:
        if missing and word == "NaN":
            return math.nan
        raise ValueError(f"{word} is not a JSON number")

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) < len(pairs):
            raise ValueError("a name comes twice in one object")
        return result

    try:
        # UTF-8 alone: what is counted and looked for in the bytes is not seen in others
        content = json.loads(body.decode("utf-8-sig"), parse_constant=read_constant, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise RequestError(422, f"Expected JSON, but the body cannot be parsed: {str(error)[:200]}.") from error
    content = content if isinstance(content, dict) else {}
    names, inputs = [spec.name for spec in specs], content.get("inputs")
    if columns is not None and "rows" in content and "inputs" not in content:
        inputs = _order_columns(content["rows"], columns)
    if isinstance(inputs, list) and len(names) == 1:
        inputs = {names[0]: inputs}
    if not isinstance(inputs, dict) or set(inputs) != set(names) or {"inputs", "rows"} <= content.keys():
        shape = "[[…], …]" if len(names) == 1 else "{" + ", ".join(f'"{name}": [[…], …]' for name in names) + "}"
        named = "" if columns is None else f' or {{"rows": [{{{json.dumps(columns[0])}: …}}, …]}}'
        raise RequestError(422, f'Expected {{"inputs": {shape}}}{named} with a row per example.')
    truths = b"true" in body or b"false" in body
    return {name: _to_array(values, name, truths, missing) for name, values in inputs.items()}


def _count_json(body: bytes, specs: Sequence[InputSpec], max_rows: int, columns: Sequence[str]) -> None:
    """Refuse a body with more values or lists than its rows may have before it is parsed: that takes 100 times as long."""
    values = lists = 0.0
    for shape in (spec.shape for spec in specs):
        values += math.prod(math.inf if size is None else size for size in shape)
        lists += sum(math.prod(math.inf if size is None else size for size in shape[:axis]) for axis in range(len(shape)))
    text = "".join(columns)
    most_lists = min(max_rows * (lists + text.count("[") + text.count("{")), max(MAX_LISTS, max_rows)) + MARGIN
    most_commas = max_rows * (values + text.count(",")) + MARGIN
    openings, commas = body.count(b"[") + body.count(b"{"), body.count(b",")
    if openings > most_lists or commas > most_commas:
        raise RequestError(
            413, f"Expected at most {max_rows} rows, but the body has {openings} lists or objects and {commas} commas, too "
            "many for that. Send the rows in parts.",
        )  # fmt: skip


def _order_columns(rows: Any, columns: Sequence[str]) -> list[list[Any]]:
    """Return the values of rows that are objects in the order of the model's columns; each must have these and no others."""
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise RequestError(422, f'Expected {{"rows": [{{{json.dumps(columns[0])}: …}}, …]}}, an object for each row.')
    names = set(columns)
    for i, row in enumerate(rows):
        unknown = next((name for name in row if name not in names), None)
        if unknown is not None:
            close = difflib.get_close_matches(unknown[:60], columns[:1000], n=1, cutoff=0.5)
            hint = f" (did you mean {close[0]!r}?)" if close else ". GET /info lists the columns"
            raise RequestError(422, f"Expected the columns of the model, but row {i + 1} has {unknown[:60]!r}{hint}.")
        if len(row) < len(names):
            missing = [name for name in columns if name not in row]
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise RequestError(422, f"Expected all {len(names)} columns, but row {i + 1} lacks {missing[0]!r}{more}.")
    return [[row[name] for name in columns] for row in rows]


def _to_array(values: Any, name: str, truths: bool, missing: bool) -> NDArray[Any]:
    """Make an array of nested lists of numbers; `truths`: there may be truth values among them, which are none.

    A null is no number either, but NaN if values may be `missing`.
    """
    try:
        array = np.asarray(values)
    except (ValueError, RecursionError, OverflowError) as error:  # rows of different lengths
        raise RequestError(422, f"Expected rows of one length in `{name}`.") from error
    kinds = {int, float, NoneType} if missing else {int, float}
    if array.dtype.kind == "O" and all(type(value) in kinds for value in array.flat):  # nulls, or integers past 64 bits
        try:
            array = array.astype(np.float64)
        except OverflowError as error:
            raise RequestError(422, f"Expected finite numbers in `{name}`.") from error
    numeric = array.dtype.kind in "iuf" or not array.size
    if not numeric or (truths and any(type(value) is bool for value in np.asarray(values, dtype=object).flat)):
        raise RequestError(422, f"Expected numbers in `{name}`, in rows of one length.")
    return array


def _parse_npy(body: bytes, specs: Sequence[InputSpec], max_rows: int, columns: Sequence[str] | None) -> Arrays:
    """Parse one array; its header is believed only if it fits the model and the bytes that follow."""
    if len(specs) != 1:
        raise RequestError(415, f"Expected application/json for the inputs {', '.join(spec.name for spec in specs)}.")
    file = io.BytesIO(body)
    try:
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = read(file)
    except Exception as error:
        raise RequestError(422, "Expected an array as numpy.save writes it, but its header cannot be read.") from error
    if dtype.kind not in "iuf" or any(type(size) is not int or size < 0 for size in shape):  # a bool is an int to numpy
        raise RequestError(422, f"Expected an array of numbers, but got {dtype} of shape {str(shape)[:100]}.")
    specs[0].check_shape(shape)
    content, size = body[file.tell() :], math.prod(shape) * dtype.itemsize
    if size != len(content) or size == 0:
        raise RequestError(422, f"Expected {size} bytes after the header, and at least one row, but got {len(content)}.")
    return {specs[0].name: np.frombuffer(content, dtype).reshape(shape, order="F" if fortran else "C")}


PARSERS = {"application/json": _parse_json, "application/x-npy": _parse_npy}
"""By content type."""
