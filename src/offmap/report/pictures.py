"""Images as small PNG files inside the page, written with the standard library alone."""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from offmap._types import Inputs
from offmap.report.figures import Array

BUDGET = 700_000
"""Bytes that all pictures of a page may take before they are compressed."""

SIDES = (16, 96)
"""Pixels along the longer side: at least, and at the most."""


def image_of(inputs: Inputs, shape: tuple[int, ...] | None) -> Array | None:
    """One row as (height, width, 1 or 3), if it is an image: (1, 1 or 3, h, w), or flat numbers that `shape` folds.

    >>> import torch
    >>> image_of(torch.zeros(1, 6), (2, 3)).shape, image_of(torch.zeros(1, 6), None)
    ((2, 3, 1), None)
    """
    if not isinstance(inputs, Tensor):
        return None
    row = inputs[0].double().numpy()
    if shape is not None and row.size == np.prod(shape):
        row = row.reshape(shape if len(shape) == 3 else (1, *shape))
    return row.transpose(1, 2, 0) if row.ndim == 3 and row.shape[0] in (1, 3) else None


def side_of(count: int) -> int:
    """How many pixels the longer side of so many pictures may have, that all fit the budget.

    >>> side_of(10), side_of(400), side_of(10**6)
    (96, 24, 16)
    """
    return int(np.clip((BUDGET / (3 * max(1, count))) ** 0.5, *SIDES))


def levels(images: Sequence[Array]) -> tuple[float, float]:
    """What is black and what is white: 0 and 1, 0 and 255, or the ends of what there is, the same for all."""
    low, high = min(float(i.min()) for i in images), max(float(i.max()) for i in images)
    ends = next(((a, b) for a, b in ((0.0, 1.0), (0.0, 255.0)) if low >= a and high <= b), (low, high))
    return ends if ends[1] > ends[0] else (low - 0.5, low + 0.5)


def data_uri(image: Array, ends: tuple[float, float], side: int) -> str:
    """A PNG as an address: every so-manieth pixel of what is larger than `side`."""
    step = -(-max(image.shape[:2]) // side)
    small = image[::step, ::step]
    shares = (np.nan_to_num(small, nan=ends[0]) - ends[0]) / (ends[1] - ends[0])
    return "data:image/png;base64," + base64.b64encode(png((np.clip(shares, 0, 1) * 255).round().astype(np.uint8))).decode()


def png(pixels: NDArray[np.uint8]) -> bytes:
    r"""A PNG file of (height, width, 1 or 3) bytes.

    >>> png(np.zeros((1, 1, 1), np.uint8))[:8]
    b'\x89PNG\r\n\x1a\n'
    """
    height, width, channels = pixels.shape
    lines = b"".join(b"\0" + line.tobytes() for line in pixels)  # 0: no filter
    head = struct.pack(">IIBBBBB", width, height, 8, 0 if channels == 1 else 2, 0, 0, 0)
    parts = ((b"IHDR", head), (b"IDAT", zlib.compress(lines, 9)), (b"IEND", b""))
    chunks = (struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in parts)
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)
