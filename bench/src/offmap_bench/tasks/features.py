"""Features of images by a backbone, in batches, cached on disk."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from offmap.checks import require
from offmap.errors import ConfigError, DataError
from offmap_bench.cache import Entry, read_or_make
from offmap_bench.nets.resnet import MEAN, STD


def standard(image: Any) -> Tensor:
    """A colour image as nets trained on ImageNet expect it: 224 × 224, each channel centred and scaled, (3, 224, 224)."""
    small = image.resize((224, 224), require("PIL.Image", "images").Resampling.LANCZOS)
    values = (np.asarray(small, dtype=np.float32) / 255 - np.array(MEAN, np.float32)) / np.array(STD, np.float32)
    return torch.from_numpy(values.transpose(2, 0, 1).copy())


@dataclass(frozen=True)
class Extractor:
    """`backbone` maps a batch of what `preprocess` makes of Pillow's RGB images to features: (B, D), or (B, D, h, w), averaged.

    Features are kept below `folder`, one file for each list of images, under a name that changes with the images (name, size
    and time of change), with the backbone (its structure and weights) and with the preprocessing (what it makes of a sample).
    """

    backbone: nn.Module
    folder: Path
    preprocess: Callable[[Any], Tensor] = standard
    batch_size: int = 64

    def __call__(self, images: Sequence[Path], name: str) -> tuple[Tensor, dict[int, str]]:
        """Features (n, D) of the readable images, in order; and what is wrong with the others, by their place."""
        failures, tensors = read_or_make(self.path(images, name), lambda: self.compute(images))
        return tensors["features"], {int(place): reason for place, reason in failures.items()}

    def path(self, images: Sequence[Path], name: str) -> Path:
        """Return the file of the features of a list of images."""
        return self.folder / f"{name}-{self.key(images)}.safetensors"

    def key(self, images: Sequence[Path]) -> str:
        """Twenty hexadecimal digits that tell these images, this backbone and this preprocessing apart from others."""
        files = [(path.name, stat.st_size, stat.st_mtime_ns) for path in images for stat in [path.stat()]]
        return hashlib.sha256(json.dumps([1, self.digest, files]).encode()).hexdigest()[:20]

    @cached_property
    def digest(self) -> str:
        """Of the structure and weights of the backbone, and of what the preprocessing makes of one image."""
        total = hashlib.sha256(f"{type(self.backbone).__qualname__} {self.backbone!r}".encode())
        for name, value in self.backbone.state_dict().items():
            total.update(f"{name} {tuple(value.shape)} {value.dtype}".encode())
            total.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        noise = np.random.RandomState(0).randint(0, 256, (240, 352, 3)).astype(np.uint8)
        once, again = (self.preprocess_image(require("PIL.Image", "images").fromarray(noise)) for _ in range(2))
        if not torch.equal(once, again):
            raise ConfigError(
                "Expected `preprocess` to give the same for the same image, but two calls differ: remove randomness."
            )
        total.update(f"{tuple(once.shape)} {once.dtype}".encode() + once.contiguous().numpy().tobytes())
        return total.hexdigest()

    def preprocess_image(self, image: Any) -> Tensor:
        """What the backbone is given of one image."""
        value = self.preprocess(image)
        if not isinstance(value, Tensor):
            raise ConfigError(f"Expected `preprocess` to give a tensor for a Pillow image, but got {type(value).__name__}.")
        return value

    def compute(self, images: Sequence[Path]) -> Entry:
        """Failures and features, without the cache."""
        parts: list[Tensor] = []
        failures: dict[int, str] = {}
        for start in range(0, len(images), self.batch_size):
            batch: list[Tensor] = []
            for place, path in enumerate(images[start : start + self.batch_size], start):
                image = open_image(path)
                if isinstance(image, str):
                    failures[place] = image
                else:
                    batch.append(self.preprocess_image(image))
            if batch:
                parts.append(run(self.backbone, torch.stack(batch)))
        return failures, {"features": torch.cat(parts) if parts else torch.zeros(0, 0)}


def run(backbone: nn.Module, batch: Tensor) -> Tensor:
    """Features of a batch, (B, ...) -> (B, D), on the CPU as float32; the backbone is in evaluation mode meanwhile."""
    place = next((p for p in backbone.parameters()), torch.zeros(()))
    modes = {module: module.training for module in backbone.modules()}
    try:
        with torch.no_grad():
            out = backbone.eval()(batch.to(place.device, place.dtype))
    finally:
        for module, mode in modes.items():
            module.training = mode
    if not isinstance(out, Tensor) or out.ndim < 2 or len(out) != len(batch):
        came = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
        raise ConfigError(f"Expected the backbone to give a tensor (B, D) for a batch of {len(batch)} images, but got {came}.")
    out = out.flatten(2).mean(2) if out.ndim > 2 else out
    if not bool(out.isfinite().all()):
        raise DataError("Expected finite features, but the backbone gave some that are not: check its weights and `preprocess`.")
    return out.float().cpu().contiguous()


def open_image(path: Path) -> Any:
    """The image in memory as RGB, or in words why it cannot be had. Only JPEG and PNG are tried."""
    image = require("PIL.Image", "images")
    try:
        with warnings.catch_warnings(action="ignore"), image.open(path, formats=("JPEG", "PNG")) as file:
            if file.width * file.height > 50_000_000:  # not one of a webcam
                return f"claims {file.width} × {file.height} pixels"
            return file.convert("RGB")
    except Exception as error:  # decoders raise all kinds of errors on damaged files
        return f"cannot be read ({str(error) or type(error).__name__})"


def cached_features(path: Path, compute: Callable[[], Tensor]) -> Tensor:
    """Features from a file, computed and written there when there are none."""
    return read_or_make(path, lambda: ({}, {"features": compute()}))[1]["features"]
