"""The header of a guard file, declared field by field: kinds, ranges and shapes are checked before anything is built.

A checksum tells of accidents, not of intent: whoever writes a file can compute it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from torch import Tensor

from offmap import checks
from offmap._types import Weights
from offmap.checks import option
from offmap.data.image_spec import ImageSpec
from offmap.errors import FileError, OffmapError
from offmap.guard import MOST_DRAWS, check_clip
from offmap.model.matrix_view import MatrixView
from offmap.posterior.predictive import History

LARGEST_SIZE = 1 << 40


@dataclass(frozen=True)
class ModelHeader:
    """How the models run."""

    chunk_size: int = option(1, "Draws at once.", at_least=1, at_most=LARGEST_SIZE)
    batch_size: int = option(1, "Rows at once.", at_least=1, at_most=LARGEST_SIZE)
    output_numbers: int = option(1, "Numbers in one output row.", at_least=1, at_most=LARGEST_SIZE)
    output_axes: int | None = option(None, "Axes of one output row.", at_least=0, at_most=64)
    last_layer: str | None = None


@dataclass(frozen=True)
class GuardHeader:
    """Options of the guard."""

    draws: int = option(50, "Draws of every member.", at_least=2, at_most=MOST_DRAWS)
    clip: float | None = option(None, "Bound on the draws that predict.", check=check_clip)
    seed: int = 0
    target: str = "labels"
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class CalibrationHeader:
    """Options of the calibration; its tensors are in the file."""

    false_alarms: float = option(0.05, "Rate of false alarms.", check=lambda value: checks.fraction("false_alarms", value))
    exact: bool = True


@dataclass(frozen=True)
class Registered:
    """A registered score or likelihood and its plain values; its tensors are in the file."""

    name: str
    config: dict[str, Any]


@dataclass(frozen=True)
class Header:
    """All that a guard file says beside its tensors."""

    format: str
    models: list[dict[str, tuple[tuple[int, ...], str, str]]]  # shape, dtype and SHA-256 of every tensor
    modules: dict[str, str]
    views: dict[str, MatrixView]
    why: dict[str, str]
    restore_state: list[str]
    noise: dict[str, Any]
    likelihood: Registered
    score: Registered
    model: ModelHeader
    guard: GuardHeader
    calibration: CalibrationHeader
    history: History
    custom_output_fn: bool
    about: dict[str, Any]
    image_spec: ImageSpec | None


def parse_header(header: Any, path: object) -> Header:
    """Build the header; a FileError names the first field that is missing, unknown or of another kind."""
    hints, values = get_type_hints(Header), header if isinstance(header, dict) else {}
    parsed: dict[str, Any] = {}
    for key in [*hints, *values]:
        try:
            parsed[key] = parse(values[key], hints[key])
        except (KeyError, ValueError, OverflowError, OffmapError) as error:
            raise FileError(
                f"{path} is damaged or not a guard file: invalid header field {key!r}. Save the guard again."
            ) from error
    return Header(**parsed)


def parse(value: Any, hint: Any) -> Any:
    """Return a value of JSON as the type says; a ValueError if it is another.

    >>> parse({"view": [2, 3], "outs": [0], "axes": [1], "blocks": []}, MatrixView)
    MatrixView(view=(2, 3), outs=(0,), axes=(1,), blocks=())
    """
    kind, kinds = get_origin(hint), get_args(hint)
    if hint is Any:
        return value
    if kind in (Union, UnionType):
        if value is None and NoneType in kinds:
            return None
        return parse(value, next(k for k in kinds if k is not NoneType))
    if is_dataclass(hint) and isinstance(value, dict) and set(value) == {f.name for f in fields(hint)}:
        hints = get_type_hints(hint)
        built: Any = hint(**{name: parse(entry, hints[name]) for name, entry in value.items()})  # pyright: ignore
        checks.validate(built)
        return built
    if kind is dict and isinstance(value, dict):
        return {name: parse(entry, kinds[1]) for name, entry in value.items()}
    if kind is list and isinstance(value, list):
        return [parse(entry, kinds[0]) for entry in value]
    if kind is tuple and isinstance(value, list):
        several = [kinds[0]] * len(value) if kinds[-1] is ... else kinds
        return tuple(parse(entry, k) for entry, k in zip(value, several, strict=True))
    if hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if type(value) is not hint:
        raise ValueError(value)
    return value


def check_tensors(tensors: Weights, mean: Mapping[str, Tensor], views: Mapping[str, MatrixView], path: object) -> None:
    """Raise a FileError that names the first tensor that does not fit the models or its matrix view, or is NaN."""
    for name, tensor in tensors.items():
        if (tensor.is_floating_point() and bool(tensor.isnan().any())) or not _fits(name, tensor, mean, views):
            raise misfit(path, name, tensor)


def misfit(path: object, name: str, tensor: Tensor | None) -> FileError:
    """Return the error for a tensor that does not fit."""
    shape = "missing" if tensor is None else tuple(tensor.shape)
    return FileError(f"{path} is damaged or not a guard file: `{name}`, {shape}, does not fit. Save the guard again.")


def _fits(name: str, tensor: Tensor, mean: Mapping[str, Tensor], views: Mapping[str, MatrixView]) -> bool:
    kind, _, rest = name.partition(".")
    if kind in ("score", "likelihood"):  # checked by what is built of them
        return True
    if not tensor.is_floating_point():
        return False
    if kind in ("raw_scale", "rotation"):
        if rest not in mean or not bool(tensor.isfinite().all()):
            return False
        return tensor.shape == mean[rest].shape if kind == "raw_scale" else _rotates(tensor, views.get(rest), mean[rest])
    axes = {"calibration.scores": (1,), "calibration.residuals": (1, 2)}
    return name in axes and tensor.ndim in axes[name] and tensor.numel() > 0


def _rotates(matrix: Tensor, view: MatrixView | None, mean: Tensor) -> bool:
    """Whether matrices (M, G, N, d, d) rotate the rows of a parameter (M, ...) under this view."""
    if view is None or sorted((*view.outs, *view.axes)) != list(range(len(view.view))):
        return False
    if math.prod(view.view) != mean[0].numel() or sum(view.blocks) != view.outputs or 0 in view.blocks:
        return False
    if matrix.ndim != 5 or matrix.shape[:2] != (len(mean), max(1, len(view.blocks))):
        return False
    pieces, width = matrix.shape[2], matrix.shape[3]
    return matrix.shape[4] == width and (pieces - 1) * width < view.fan_in <= pieces * width
