"""Choose the layers whose inputs a score compares, and read them: fit time only."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from offmap._types import Inputs
from offmap.data.batch import take_rows
from offmap.model.capture import features as read_features
from offmap.model.params import floating
from offmap.scores.score import Sampler

TABLE_LAYERS = 3
"""Hidden layers to compare in, spread over the depth, the last among them."""

IMAGE_LAYERS = 6
"""Layers of image classifiers to compare in beside the last, spread over the depth."""


def find_layers(sampler: Sampler, rows: Sequence[Inputs], vectors: Tensor | None, *, pooled: bool = False) -> list[str]:
    """Name the parameters whose layers get one vector per row, whatever the rest of the batch, in order of execution.

    Args:
        sampler: Its predictive has the models.
        rows: Inputs, in parts of one shape each.
        vectors: The inputs as rows (N, D), if they are; layers that get these are left out.
        pooled: Whether convolutions count, too: of an image they get mean and standard deviation of every channel.
    """
    model, weights = sampler.predictive.model, sampler.predictive.mean_weights(0)
    if model is None or weights is None:
        return []
    # one member alone has its fixed weights in the model itself
    base = floating(model.module) | weights
    few, many = (
        read_features(model.module, base, take_rows(rows[0], slice(0, n)), model.output_fn, maps=pooled)
        for n in (2, model.batch_size)
    )
    return [n for n in few if n in many and _alike(few[n], many[n][: len(few[n])]) and not _equal_rows(many[n], vectors)]


def choose_image_layers(sampler: Sampler, names: list[str]) -> list[str]:
    """Choose some of the layers spread over the depth, and the last; none if no convolution is among them.

    The first convolution gets the image itself, whose colours tell little, and is left out.
    """
    model = sampler.predictive.model
    params = floating(model.module) if model else {}
    convolutions = [name for name in names if params[name].ndim > 2]
    if not convolutions:
        return []
    inner = [name for name in names if name != convolutions[0]] or convolutions
    return [*spread_out(inner[:-1], IMAGE_LAYERS), inner[-1]]


def concat_rows(parts: Sequence[Tensor | None]) -> Tensor | None:
    """Concatenate matrices, if none is missing and they are equally wide."""
    matrices = [part for part in parts if part is not None]
    return torch.cat(matrices) if len(matrices) == len(parts) and len({m.shape[1] for m in matrices}) == 1 else None


def spread_out(names: list[str], most: int) -> list[str]:
    """Take at most so many of them, evenly spaced, the last among them.

    >>> spread_out(["a", "b", "c", "d", "e"], 2)
    ['b', 'e']
    """
    if len(names) <= most:
        return names
    return [names[(i + 1) * len(names) // most - 1] for i in range(most)]


def _equal_rows(inputs: Tensor, vectors: Tensor | None) -> bool:
    """Whether these are the first of the vectors themselves."""
    return vectors is not None and inputs.shape[1] == vectors.shape[1] and torch.equal(inputs, vectors[: len(inputs)].to(inputs))


def _alike(a: Tensor, b: Tensor) -> bool:
    """Whether numbers are the same up to rounding, in half precision as well."""
    if a.shape != b.shape:
        return False
    return bool(((a.double() - b.double()).abs() <= 0.05 * b.double().abs().amax()).all())
