"""The rows of lowest and highest score of every set: as images where they are images, else as a table."""

from __future__ import annotations

import base64
import html
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from offmap._types import Inputs
from offmap.evaluation import Evaluation, Example
from offmap.guard import Guard
from offmap.report.figures import Array, format_number
from offmap.report.page import table
from offmap.table import Table

COLUMNS, CHARACTERS = 8, 60
"""Columns of a table of examples, and characters of what is not a number."""

IMAGE_BYTES, IMAGE_SIDES = 700_000, (16, 96)
"""Bytes that all images of a page may take before compression; the least and the most pixels along the longer side."""

HEADINGS = {"test": ("Least OOD", "Most OOD"), "": ("Most OOD", "Least OOD")}


@dataclass(frozen=True)
class Names:
    """The user's names of columns and classes, and the shape of images that come as flat rows."""

    columns: Sequence[str] = ()
    classes: Sequence[str] = ()
    image: tuple[int, ...] | None = None

    def column(self, position: int) -> str:
        """Return a column's name, or its number."""
        return str(self.columns[position]) if position < len(self.columns) else f"x{position}"

    def label(self, position: int) -> str:
        """Return a class's name, or its number."""
        return str(self.classes[position]) if 0 <= position < len(self.classes) else str(position)


def examples(evaluation: Evaluation, name: str, names: Names) -> str:
    """Return the HTML of all sets of one scorer, the test data first."""
    sets = evaluation.details[name].examples if name in evaluation.details else {}
    guard = evaluation.detectors.get(name)
    everything = [e for seen in evaluation.details.values() for rows in seen.examples.values() for e in rows]
    images = [image for e in everything if (image := as_image(e.inputs, names.image)) is not None]
    ends, side = (pixel_range(images), side_for(len(images))) if images else ((0.0, 1.0), 0)
    parts: list[str] = []
    for label, rows in sets.items():
        low, high = rows[: len(rows) // 2], rows[len(rows) // 2 :][::-1]
        halves = (low, high) if label == "test" else (high, low)
        blocks: list[str] = []
        for title, half in zip(HEADINGS.get(label, HEADINGS[""]), halves, strict=True):
            predictions = [describe_prediction(guard, e.inputs, names) for e in half]
            if half and as_image(half[0].inputs, names.image) is not None:
                body = _images(half, predictions, names, ends, side)
            else:
                body = table(Table([_row(e, p, names) for e, p in zip(half, predictions, strict=True)]))
            blocks.append(f"<div><h4>{title}</h4>{body}</div>")
        heading = html.escape("In-distribution data: test" if label == "test" else f"OOD data: {label}")
        parts.append(f'<h3>{heading}</h3>\n<div class="halves">{"".join(blocks)}</div>')
    return "\n".join(parts)


def describe_prediction(guard: object, inputs: Inputs, names: Names) -> str:
    """Describe what a guard predicts for one row; nothing for other scorers."""
    if not isinstance(guard, Guard):
        return ""
    prediction = guard.predict(inputs)
    if prediction.probs is not None and prediction.label is not None:
        if prediction.label.numel() > 1:
            return ""
        return f"{names.label(int(prediction.label))} ({100 * float(prediction.probs.max()):.0f}\u00a0%)"
    if prediction.mean is None or prediction.std is None or prediction.mean.numel() > 1:
        return ""
    return f"{format_number(float(prediction.mean))} ± {format_number(float(prediction.std))}"


def _truth(target: Tensor | None, names: Names) -> str:
    if target is None or target.numel() > 1:
        return ""
    return format_number(float(target)) if target.is_floating_point() else names.label(int(target))


def _row(example: Example, prediction: str, names: Names) -> Mapping[str, Any]:
    """Return one line of a table."""
    row: dict[str, Any] = {"row": example.index, "score": format_number(example.score)}
    row |= {"truth": truth} if (truth := _truth(example.target, names)) else {}
    row |= {"predicted": prediction} if prediction else {}
    return row | {key: value for key, value in cells(example.inputs, names).items() if key not in row}


def cells(inputs: Inputs, names: Names) -> dict[str, str]:
    """Return the inputs of one row by column, or shortened, by argument.

    >>> import torch
    >>> cells(torch.tensor([[0.5, 2.0]]), Names(["a"]))
    {'a': '0.5', 'x1': '2'}
    """
    if isinstance(inputs, Tensor) and inputs.ndim == 2:
        values = inputs[0].double().tolist()
        shown = {names.column(i): format_number(v) for i, v in enumerate(values[:COLUMNS])}
        return shown | ({"…": f"{len(values) - COLUMNS} more"} if len(values) > COLUMNS else {})
    pairs = inputs.items() if isinstance(inputs, Mapping) else enumerate(inputs if isinstance(inputs, tuple | list) else [inputs])
    return {names.column(k) if isinstance(k, int) else str(k): _shortened(v) for k, v in pairs}


def _shortened(value: Any) -> str:
    if not isinstance(value, Tensor):
        return str(value)[:CHARACTERS]
    numbers = value.flatten()[: CHARACTERS // 2].double().tolist()
    text = " ".join(map(format_number, numbers))
    return text if len(text) <= CHARACTERS and value.numel() == len(numbers) else f"{text[: CHARACTERS - 1].rsplit(' ', 1)[0]} …"


# ------------------------------------------------------------------------------------------------------- images


def _images(rows: Sequence[Example], predictions: Sequence[str], names: Names, ends: tuple[float, float], side: int) -> str:
    """Set images side by side, with score, prediction and truth below each."""
    items: list[str] = []
    for example, prediction in zip(rows, predictions, strict=True):
        image = as_image(example.inputs, names.image)
        assert image is not None
        truth = _truth(example.target, names)
        facts = [f"score {format_number(example.score)}"]
        facts += ([f"says {prediction}"] if prediction else []) + ([f"is {truth}"] if truth else [])
        alt = html.escape(f"Row {example.index}: {', '.join(facts)}.")
        lines = "".join(f"<span>{html.escape(fact)}</span>" for fact in facts)
        source = data_uri(np.asarray(image), ends, side)
        items.append(f'<li><img src="{source}" alt="{alt}" width="96" height="96">{lines}</li>')
    return f'<ul class="images">{"".join(items)}</ul>'


def as_image(inputs: Inputs, shape: tuple[int, ...] | None) -> Array | None:
    """Return one row as (height, width, 1 or 3), if it is an image: (1, 1 or 3, h, w), or flat numbers that `shape` folds.

    >>> import torch
    >>> as_image(torch.zeros(1, 6), (2, 3)).shape, as_image(torch.zeros(1, 6), None)
    ((2, 3, 1), None)
    """
    if not isinstance(inputs, Tensor):
        return None
    row = inputs[0].double().numpy()
    if shape is not None and row.size == np.prod(shape):
        row = row.reshape(shape if len(shape) == 3 else (1, *shape))
    return row.transpose(1, 2, 0) if row.ndim == 3 and row.shape[0] in (1, 3) else None


def side_for(count: int) -> int:
    """Return how many pixels the longer side of `count` images may have, so that all fit the budget.

    >>> side_for(10), side_for(400), side_for(10**6)
    (96, 24, 16)
    """
    return int(np.clip((IMAGE_BYTES / (3 * max(1, count))) ** 0.5, *IMAGE_SIDES))


def pixel_range(images: Sequence[Array]) -> tuple[float, float]:
    """Return the values of black and white, the same for all images: 0 and 1, 0 and 255, or the least and the largest."""
    low, high = min(float(i.min()) for i in images), max(float(i.max()) for i in images)
    ends = next(((a, b) for a, b in ((0.0, 1.0), (0.0, 255.0)) if low >= a and high <= b), (low, high))
    return ends if ends[1] > ends[0] else (low - 0.5, low + 0.5)


def data_uri(image: Array, ends: tuple[float, float], side: int) -> str:
    """Encode an image as the address of a PNG, sub-sampled if it is larger than `side`."""
    step = -(-max(image.shape[:2]) // side)
    shares = (np.nan_to_num(image[::step, ::step], nan=ends[0]) - ends[0]) / (ends[1] - ends[0])
    return "data:image/png;base64," + base64.b64encode(png((np.clip(shares, 0, 1) * 255).round().astype(np.uint8))).decode()


def png(pixels: NDArray[np.uint8]) -> bytes:
    r"""Encode (height, width, 1 or 3) bytes as a PNG file.

    >>> png(np.zeros((1, 1, 1), np.uint8))[:8]
    b'\x89PNG\r\n\x1a\n'
    """
    height, width, channels = pixels.shape
    lines = b"".join(b"\0" + line.tobytes() for line in pixels)  # 0: no filter
    head = struct.pack(">IIBBBBB", width, height, 8, 0 if channels == 1 else 2, 0, 0, 0)
    parts = ((b"IHDR", head), (b"IDAT", zlib.compress(lines, 9)), (b"IEND", b""))
    chunks = (struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in parts)
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)
