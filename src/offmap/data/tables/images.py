"""Image files as blocks of rows, as the model takes them. Files that cannot be read are skipped and listed."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from offmap.checks import require
from offmap.data.tables.table import Table, explain_damage, rows_per_block
from offmap.errors import ConfigError, DataError

SUFFIXES = (".jpg", ".jpeg", ".png")
IMAGE, FILE = "image", "file"
MODES = {"1": "L", "L": "L", "LA": "L", "P": "RGB", "RGB": "RGB", "RGBA": "RGB", "CMYK": "RGB", "YCbCr": "RGB"}
"""Pillow's modes of eight bits, and whether they are read as grey or colour; transparency is dropped."""


@dataclass(frozen=True)
class ImageTransform:
    """Resize images to (channels, height, width), pixels from 0 to 1, minus `mean`, divided by `std`, one for each channel."""

    shape: tuple[int, int, int]
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.shape[0] not in (1, 3) or min(self.shape) < 1:
            raise ConfigError(f"Expected images of 1 or 3 channels and a height and width of at least 1, but got {self.shape}.")
        for name, values in (("mean", self.mean), ("std", self.std)):
            if len(values) not in (0, self.shape[0]) or (name == "std" and not all(value > 0 for value in values)):
                raise ConfigError(f"Expected a {name} for each of {self.shape[0]} channels, std above 0, but got {values}.")

    def __call__(self, pixels: NDArray[Any]) -> Tensor:
        """Convert bytes (H, W) or (H, W, 3) to (channels, height, width)."""
        x = resize_images(torch.from_numpy(pixels)[None], self.shape)[0]
        if self.mean:
            x = x - torch.tensor(self.mean).view(-1, 1, 1)
        return x / torch.tensor(self.std).view(-1, 1, 1) if self.std else x


class ImageTable(Table):
    """Image files of a folder as a table with the columns `image` and `file`; `failed` says why files were skipped."""

    kind = "images"

    def __init__(self, folder: Path, files: Sequence[str], transform: ImageTransform) -> None:
        self.path: Path = folder
        self.names: list[str] = [IMAGE, FILE]
        self.files: Sequence[str] = files
        self.transform: ImageTransform = transform
        self.failed: dict[str, str] = {}

    def open(self, separator: str | None, stack: ExitStack) -> list[str]:
        """Leave the files closed: they are opened one by one."""
        return self.names

    def rows(self, done: int) -> int | None:
        """Return the number of files."""
        return len(self.files)

    def chunks(self, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
        """Yield images (n, channels, height, width) and their files; blocks depend only on the list of files and the shape."""
        step = rows_per_block(int(np.prod(self.transform.shape)))
        for start in range(0, len(self.files), step):
            images: dict[str, Tensor] = {}
            for file in self.files[start : start + step]:
                try:
                    images[file] = self.transform(read_pixels(self.path / file))
                except DataError as error:
                    self.failed[file] = str(error)
            if images:
                yield {IMAGE: torch.stack(list(images.values())).numpy(), FILE: list(images)}


def read_pixels(path: Path) -> NDArray[Any]:
    """Read an image: bytes (H, W) if it is grey, (H, W, 3) if it has colours."""
    image = require("PIL.Image", "images")
    with explain_damage(path, "an image of eight bits"), warnings.catch_warnings():
        warnings.simplefilter("error", image.DecompressionBombWarning)
        with image.open(path) as file:
            if file.mode not in MODES:
                raise ValueError(f"its mode is {file.mode}, not one of {sorted(MODES)}")
            return np.array(file.convert(MODES[file.mode]))


def resize_images(x: Tensor, shape: tuple[int, int, int], step: int = 1024) -> Tensor:
    """Resize bytes (N, H, W) or (N, H, W, 3) to float32 from 0 to 1, (N, channels, height, width).

    >>> resize_images(torch.full((2, 4, 4, 3), 255, dtype=torch.uint8), (1, 2, 2)).flatten()
    tensor([1., 1., 1., 1., 1., 1., 1., 1.])
    """
    images = torch.empty((len(x), *shape))
    for start in range(0, len(x), step):
        part = x[start : start + step].float() / 255
        part = part.unsqueeze(1) if part.ndim == 3 else part.movedim(3, 1)
        if part.shape[1] == 3 and shape[0] == 1:
            part = (part * torch.tensor((0.299, 0.587, 0.114)).view(1, 3, 1, 1)).sum(1, keepdim=True)
        if part.shape[2:] != shape[1:]:
            part = F.interpolate(part, shape[1:], mode="bilinear", antialias=True)
        images[start : start + step] = part.expand(-1, *shape)
    return images
