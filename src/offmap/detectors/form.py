"""The form of a classifier's inputs: images of another shape are refused, numbers of another range are noticed and said."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from offmap._types import Inputs
from offmap.errors import DataError, ShapeError

logger = logging.getLogger("offmap")

BEYOND = 10.0
"""Numbers that lie so many training ranges outside of it are said: pixels from 0 to 255 lie 254 outside of 0 to 1."""


@dataclass(frozen=True)
class Form:
    """The shape of one image, if inputs are images (B, channels, height, width), and the range of the training inputs."""

    image: tuple[int, ...] | None
    low: float
    high: float
    whole: bool  # all numbers seen so far are whole ones

    @property
    def span(self) -> float:
        """Between the smallest and the largest number."""
        return self.high - self.low

    @staticmethod
    def of(x: Inputs) -> Form:
        """The form of a first batch."""
        image = is_image(x)
        if image and not x.is_floating_point():
            raise DataError(
                f"Expected images in floating-point numbers, but got {x.dtype} from {x.min()} to {x.max()}. Scale them as in the "
                "net's training, for example with `x.float() / 255`."
            )
        low, high, whole = _range(x)
        return Form(tuple(x.shape[1:]) if image else None, low, high, whole)

    def wider(self, x: Inputs) -> Form:
        """The form with the range of another training batch."""
        low, high, whole = _range(x)
        return replace(self, low=min(low, self.low), high=max(high, self.high), whole=whole and self.whole)

    def check(self, x: Inputs, where: str) -> None:
        """Refuse images of another shape or type."""
        if self.image is None:
            return
        if not is_image(x) or tuple(x.shape[1:]) != self.image:
            raise ShapeError(
                f"Expected images of shape {self.image}, (channels, height, width), as in training, but {where} have "
                f"{tuple(x.shape[1:]) if isinstance(x, Tensor) else type(x).__name__}. {self._remedy(x)}"
            )
        if not x.is_floating_point():
            raise DataError(
                f"Expected images in floating-point numbers from about {self.low:.3g} to {self.high:.3g}, as in training, but "
                f"{where} are {x.dtype}. Scale them alike, for example with `x.float() / 255`."
            )

    def compare(self, x: Inputs, where: str) -> None:
        """Say when the numbers of images are of another range than in training."""
        if self.image is None:
            return
        low, high, _ = _range(x)
        outside = max(high - self.high, self.low - low)
        if outside > BEYOND * self.span or (len(x) > 1 and BEYOND**2 * (high - low) < self.span and high > low):
            logger.warning(
                "%s range from %.3g to %.3g, training inputs from %.3g to %.3g: were they scaled alike? Else scores mean little.",
                where[:1].upper() + where[1:], low, high, self.low, self.high,
            )  # fmt: skip

    def _remedy(self, x: Inputs) -> str:
        assert self.image is not None
        if not isinstance(x, Tensor) or x.ndim != 4:
            return "Pass a batch of images, (B, channels, height, width)."
        if tuple(x.movedim(3, 1).shape[1:]) == self.image:
            return "Channels come first: `x.movedim(3, 1)`."
        if x.shape[1] != self.image[0]:
            return f"Bring them to {self.image[0]} channels: repeat grey ones, or weigh colours into one."
        return "Resize them, for example with `torch.nn.functional.interpolate`."


def is_image(x: Inputs) -> bool:
    """Whether inputs are one tensor (B, channels, height, width)."""
    return isinstance(x, Tensor) and x.ndim == 4


def check_accuracy(form: Form, logits: Tensor, labels: Tensor, whose: str = "training") -> None:
    """Say so if the net does no better on in-distribution rows than guessing, or little better on what look like raw bytes."""
    right = float((logits.argmax(1) == labels).float().mean())
    guessing = float(torch.bincount(labels).max() / len(labels))
    raw = form.image is not None and form.whole and form.low >= 0 and 1 < form.high <= 255
    if len(labels) >= 2 * logits.shape[1] and (right <= guessing or (raw and right < 0.5)):
        scaled = f" Inputs range from {form.low:.3g} to {form.high:.3g}: were they scaled so in training?" if form.span else ""
        logger.warning(
            "The net is right on %.1f %% of the %s rows, the most frequent class makes up %.1f %%.%s Are the classes "
            "numbered as the net's outputs?", 100 * right, whose, 100 * guessing, scaled,
        )  # fmt: skip


def _range(x: Inputs) -> tuple[float, float, bool]:
    """Smallest and largest of all floating-point numbers, and whether all are whole."""
    leaves = [leaf for leaf in tree_leaves(x) if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.numel()]
    ends = [torch.aminmax(leaf) for leaf in leaves]
    low, high = min((float(e.min) for e in ends), default=0.0), max((float(e.max) for e in ends), default=0.0)
    return low, high, all(bool((leaf[:2] == leaf[:2].round()).all()) for leaf in leaves)
