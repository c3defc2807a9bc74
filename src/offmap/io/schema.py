"""What a guard file may say: kinds, ranges and shapes, looked at before anything is built of it.

A checksum tells of accidents, not of intent: whoever writes a file can compute it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from offmap._types import Weights
from offmap.errors import ConfigError, FileError
from offmap.guard import MOST_DRAWS, SCORES
from offmap.model.matrix_view import MatrixView
from offmap.posterior.noise import NOISES, noise_from_state

Rule = Callable[[Any], bool]
MOST = 1 << 40


def whole(low: int, high: int = MOST) -> Rule:
    """A whole number from `low` to `high`."""
    return lambda value: type(value) is int and low <= value <= high


def listed(rule: Rule) -> Rule:
    """A list of such."""
    return lambda value: isinstance(value, list) and all(map(rule, value))


def named(rule: Rule) -> Rule:
    """Such by name."""
    return lambda value: isinstance(value, dict) and all(map(rule, value.values()))


def with_keys(rules: Mapping[str, Rule]) -> Rule:
    """A dict that has exactly these keys."""
    return lambda value: isinstance(value, dict) and set(value) == set(rules) and all(r(value[k]) for k, r in rules.items())


def either(*rules: Any) -> Rule:
    """One of several: values, or rules."""
    return lambda value: any(rule(value) if callable(rule) else value is rule for rule in rules)


def text(value: Any) -> bool:
    """Words."""
    return isinstance(value, str)


def truth(value: Any) -> bool:
    """Yes or no."""
    return isinstance(value, bool)


def number(value: Any) -> bool:
    """Any number; histories hold NaN, too."""
    return (type(value) in (int, float) and abs(value) < 1e300) or value != value or value in (math.inf, -math.inf)


def _digest(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 3 and listed(whole(0))(value[0]) and all(map(text, value[1:]))


def _noise(value: Any) -> bool:
    if not with_keys({"name": text, "state": named(number)})(value):
        return False
    if value["name"] not in NOISES:
        return True  # loading says which names there are
    try:
        noise_from_state(value)
    except (ConfigError, TypeError):
        return False
    return True


NUMBERS, SIZES = listed(number), listed(whole(0))
PER_MEMBER = listed(NUMBERS)

CLAIMS: dict[str, Rule] = {
    "format": text,
    "in-distribution": either(None, listed(text)),
    "models": listed(named(_digest)),
    "modules": named(text),
    "frames": named(with_keys(dict.fromkeys(("view", "outs", "axes", "blocks"), SIZES))),
    "why": named(text),
    "restore_state": listed(text),
    "noise": _noise,
    "likelihood": with_keys({"name": text, "fields": named(either(None, truth, whole(-1, 1 << 20)))}),
    "model": with_keys({
        "chunk_size": whole(1), "batch_size": whole(1), "output_numbers": whole(1), "output_axes": either(None, whole(0, 64)),
        "last_layer": either(None, text),
    }),
    "guard": with_keys({
        "clip": either(None, lambda value: number(value) and value >= 0),
        "score_with": lambda value: text(value) and value in SCORES,
        "draws": whole(2, MOST_DRAWS), "seed": lambda value: type(value) is int, "target": text, "notes": listed(text),
    }),
    "calibration": with_keys({"false_alarms": lambda value: number(value) and 0 < value < 1, "exact": truth}),
    "history": with_keys({
        **dict.fromkeys(("max_risk", "loss", "final_risk", "final_entropy"), NUMBERS), "step": SIZES, "kept": SIZES,
        **dict.fromkeys(("risk", "entropy", "uncertainty"), PER_MEMBER), "stop_reason": text,
        "chosen": named(either(text, number, NUMBERS)),
    }),
    "own_select": truth,
    "about": lambda value: isinstance(value, dict),
    "image_spec": either(None, with_keys({"shape": either(None, SIZES), "low": number, "high": number, "integral": truth})),
}  # fmt: skip
OPTIONAL = {"about", "image_spec"}


def check_header(header: Any, path: object) -> None:
    """Raise a FileError that names the first thing that no guard would say."""
    known = header if isinstance(header, dict) else {}
    for key in [*CLAIMS, *known]:
        if key not in CLAIMS or (key not in known and key not in OPTIONAL) or (key in known and not CLAIMS[key](known[key])):
            raise FileError(
                f"{path} is damaged or not a guard file: what it says of {key!r} makes no sense. Save the guard again."
            )


def check_tensors(tensors: Weights, mean: Mapping[str, Tensor], frames: Mapping[str, MatrixView], path: object) -> None:
    """Raise a FileError that names the first tensor that does not fit the nets, its frame or its kin, or is not finite."""
    for name, tensor in tensors.items():
        if not tensor.is_floating_point() or bool(tensor.isnan().any()) or not _fits(name, tensor, tensors, mean, frames):
            raise FileError(
                f"{path} is damaged or not a guard file: `{name}`, {tuple(tensor.shape)}, does not fit. Save the guard again."
            )


def _fits(name: str, tensor: Tensor, tensors: Weights, mean: Mapping[str, Tensor], frames: Mapping[str, MatrixView]) -> bool:
    kind, _, rest = name.partition(".")
    if kind == "raw_scale":
        return rest in mean and tensor.shape == mean[rest].shape and bool(tensor.isfinite().all())
    if kind == "rotation":
        return rest in mean and rest in frames and bool(tensor.isfinite().all()) and _turns(tensor, frames[rest], mean[rest])
    if kind == "in-distribution":
        return _is_kin(name, tensor, tensors)
    shapes = {"calibration.scores": (1,), "calibration.misses": (1, 2), "likelihood.noise": (1,), "likelihood.units": (1,)}
    return name in shapes and tensor.ndim in shapes[name] and tensor.numel() > 0


def _turns(matrix: Tensor, frame: MatrixView, mean: Tensor) -> bool:
    """Whether matrices (M, G, N, d, d) turn the rows of a parameter (M, ...) that is seen through this frame."""
    axes = sorted((*frame.outs, *frame.axes)) == list(range(len(frame.view)))
    if not axes or math.prod(frame.view) != mean[0].numel() or sum(frame.blocks) != frame.outputs or 0 in frame.blocks:
        return False
    if matrix.ndim != 5 or matrix.shape[0] != len(mean) or matrix.shape[1] != max(1, len(frame.blocks)):
        return False
    pieces, width = matrix.shape[2], matrix.shape[3]
    return matrix.shape[4] == width and (pieces - 1) * width < frame.fan_in <= pieces * width


def _is_kin(name: str, tensor: Tensor, tensors: Weights) -> bool:
    """Whether a part of a space of in-distribution rows (n, D) has its shape."""
    space, _, part = name.rpartition(".")
    if part in ("disagreement", "logits", "scale"):
        return tensor.shape == (2,)
    rows = tensors.get(f"{space}.rows")
    if rows is None or rows.ndim != 2 or 0 in rows.shape:
        return False
    shapes = {"rows": tuple(rows.shape), "centre": (rows.shape[1],), "unit": (rows.shape[1],), "spacings": (rows.shape[0],)}
    return tuple(tensor.shape) == shapes.get(part)
