"""Checks of image batches against the training images: shape and dtype are enforced, an unusual value range is logged."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from offmap._torch_private import tree_leaves
from offmap._types import Inputs
from offmap.data.batch import is_image
from offmap.errors import DataError, ShapeError

logger: logging.Logger = logging.getLogger("offmap")


@dataclass(frozen=True)
class ImageSpec:
    """The shape of one image (None if inputs are no images (B, channels, height, width)) and the range of training values."""

    shape: tuple[int, ...] | None
    low: float
    high: float
    integral: bool  # all values are whole numbers so far

    @property
    def span(self) -> float:
        """Width of the training range."""
        return self.high - self.low

    @staticmethod
    def of(x: Inputs) -> ImageSpec:
        """Describe a first batch."""
        image = is_image(x)
        if image and not x.is_floating_point():
            raise DataError(
                f"Expected images in floating-point numbers, but got {x.dtype} from {x.min()} to {x.max()}. Scale them as in the "
                "model's training, for example with `x.float() / 255`."
            )
        return ImageSpec(tuple(x.shape[1:]) if image else None, *_value_range(x))

    def widen(self, x: Inputs) -> ImageSpec:
        """Extend the range by another training batch."""
        low, high, integral = _value_range(x)
        return replace(self, low=min(low, self.low), high=max(high, self.high), integral=integral and self.integral)

    def check_shape(self, x: Inputs, name: str) -> None:
        """Refuse images of another shape or dtype."""
        if self.shape is None:
            return
        if not is_image(x) or tuple(x.shape[1:]) != self.shape:
            remedy = "Resize them, for example with `torch.nn.functional.interpolate`."
            if not is_image(x):
                remedy = "Pass a batch of images, (B, channels, height, width)."
            elif tuple(x.movedim(3, 1).shape[1:]) == self.shape:
                remedy = "Channels come first: `x.movedim(3, 1)`."
            elif x.shape[1] != self.shape[0]:
                remedy = f"Bring them to {self.shape[0]} channels: repeat grey ones, or weigh colours into one."
            raise ShapeError(
                f"Expected images of shape {self.shape}, (channels, height, width), as in training, but {name} have "
                f"{tuple(x.shape[1:]) if isinstance(x, Tensor) else type(x).__name__}. {remedy}"
            )
        if not x.is_floating_point():
            raise DataError(
                f"Expected images in floating-point numbers from about {self.low:.3g} to {self.high:.3g}, as in training, but "
                f"{name} are {x.dtype}. Scale them alike, for example with `x.float() / 255`."
            )

    def check(self, x: Inputs, name: str) -> None:
        """Refuse images of another shape or dtype, and log a warning if their values range far outside of training."""
        self.check_shape(x, name)
        if self.shape is None:
            return
        low, high, _ = _value_range(x)
        outside = max(high - self.high, self.low - low)  # bytes, 0 to 255, are 254 outside of 0 to 1
        if outside > 10 * self.span or (len(x) > 1 and 0 < 100 * (high - low) < self.span):
            logger.warning(
                "%s range from %.3g to %.3g, training inputs from %.3g to %.3g: were they scaled alike? Else scores mean little.",
                name[:1].upper() + name[1:], low, high, self.low, self.high,
            )  # fmt: skip


def warn_if_inaccurate(spec: ImageSpec, logits: Tensor, labels: Tensor, split: str = "training") -> None:
    """Log a warning if the net is no better than guessing on in-distribution rows, or little better on what look like bytes."""
    accuracy = float((logits.argmax(1) == labels).float().mean())
    guessing = float(torch.bincount(labels).max() / len(labels))
    raw_bytes = spec.shape is not None and spec.integral and spec.low >= 0 and 1 < spec.high <= 255
    if len(labels) >= 2 * logits.shape[1] and (accuracy <= guessing or (raw_bytes and accuracy < 0.5)):
        scaled = f" Inputs range from {spec.low:.3g} to {spec.high:.3g}: were they scaled so in training?" if spec.span else ""
        logger.warning(
            "The model is right on %.1f %% of the %s rows, the most frequent class makes up %.1f %%.%s Are the classes "
            "numbered as the model's outputs?", 100 * accuracy, split, 100 * guessing, scaled,
        )  # fmt: skip


def _value_range(x: Inputs) -> tuple[float, float, bool]:
    """Smallest and largest floating-point value, and whether the values of the first two rows are whole numbers."""
    leaves = [leaf for leaf in tree_leaves(x) if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.numel()]
    ends = [torch.aminmax(leaf) for leaf in leaves]
    low, high = min((float(e.min) for e in ends), default=0.0), max((float(e.max) for e in ends), default=0.0)
    return low, high, all(bool((leaf[:2] == leaf[:2].round()).all()) for leaf in leaves)
