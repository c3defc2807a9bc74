"""Image files as blocks of rows, in the form that the net takes. What cannot be read is left out, and told."""

from __future__ import annotations

import struct
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from offmap.data.tables.block import DAMAGED, Block, rows_for
from offmap.errors import ConfigError, DataError
from offmap.extras import require

SUFFIXES = (".jpg", ".jpeg", ".png")
MODES = {"1": "L", "L": "L", "LA": "L", "P": "RGB", "RGB": "RGB", "RGBA": "RGB", "CMYK": "RGB", "YCbCr": "RGB"}
"""Of eight bits; to what they are brought: grey or colour. What is transparent loses that."""

IMAGE, FILE = "image", "file"
GREY = (0.299, 0.587, 0.114)


@dataclass(frozen=True)
class Form:
    """What the net takes: (channels, height, width), pixels from 0 to 1, less `mean`, over `std`, one for each channel."""

    shape: tuple[int, int, int]
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.shape[0] not in (1, 3) or min(self.shape) < 1:
            raise ConfigError(f"Expected images of 1 or 3 channels and a height and width of at least 1, but got {self.shape}.")
        for name, values in (("mean", self.mean), ("std", self.std)):
            if len(values) not in (0, self.shape[0]) or (name == "std" and not all(value > 0 for value in values)):
                raise ConfigError(f"Expected a {name} for each of {self.shape[0]} channels, std above 0, but got {values}.")

    def tensor(self, pixels: NDArray[Any]) -> Tensor:
        """Bytes (H, W) or (H, W, 3) to (channels, height, width)."""
        x = shaped(torch.from_numpy(pixels)[None], self.shape)[0]
        if self.mean:
            x = x - torch.tensor(self.mean).view(-1, 1, 1)
        return x / torch.tensor(self.std).view(-1, 1, 1) if self.std else x


@dataclass
class Pictures:
    """Image files of a folder as a table with the columns `image` and `file`; `failed` says why some were left out."""

    path: Path
    files: Sequence[str]
    form: Form
    names: list[str] = field(default_factory=lambda: [IMAGE, FILE])
    failed: dict[str, str] = field(default_factory=dict[str, str])

    def rows(self, done: int) -> int | None:
        """As many as files, unless some cannot be read."""
        return len(self.files)

    def blocks(self, numbers: Sequence[str], raw: Sequence[str] = ()) -> Iterator[Block]:
        """Blocks of consecutive files, fixed by their list and the form."""
        step = rows_for(int(np.prod(self.form.shape)))
        for start in range(0, len(self.files), step):
            read: dict[str, Tensor] = {}
            for file in self.files[start : start + step]:
                try:
                    read[file] = self.form.tensor(pixels(self.path / file))
                except DataError as error:
                    self.failed[file] = str(error)
            if read:
                yield Block(torch.stack(list(read.values())).numpy(), {name: list(read) for name in raw})


def pixels(path: Path) -> NDArray[Any]:
    """Bytes (H, W) of a grey image, (H, W, 3) of a coloured one."""
    image = require("PIL.Image", "images")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", image.DecompressionBombWarning)
            with image.open(path) as file:
                if file.mode not in MODES:
                    raise ValueError(f"its mode is {file.mode}, not one of {sorted(MODES)}")
                return np.array(file.convert(MODES[file.mode]))
    except (*DAMAGED, SyntaxError, struct.error, image.DecompressionBombWarning, image.DecompressionBombError) as error:
        told = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        reason = (told.strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        raise DataError(f"Expected an image of eight bits at {path}, but it cannot be read: {reason}.") from error


def shaped(x: Tensor, form: tuple[int, int, int], step: int = 1024) -> Tensor:
    """Bytes (N, H, W) or (N, H, W, 3) as float32 from 0 to 1 in the form (channels, height, width): (N, *form).

    >>> shaped(torch.full((2, 4, 4, 3), 255, dtype=torch.uint8), (1, 2, 2)).flatten()
    tensor([1., 1., 1., 1., 1., 1., 1., 1.])
    """
    whole = torch.empty((len(x), *form))
    for start in range(0, len(x), step):
        part = x[start : start + step].float() / 255
        part = part.unsqueeze(1) if part.ndim == 3 else part.movedim(3, 1)
        if part.shape[1] != form[0]:
            part = (part * torch.tensor(GREY).view(1, 3, 1, 1)).sum(1, keepdim=True) if form[0] == 1 else part
        if part.shape[2:] != form[1:]:
            part = F.interpolate(part, form[1:], mode="bilinear", antialias=True)
        whole[start : start + step] = part.expand(-1, *form)
    return whole
