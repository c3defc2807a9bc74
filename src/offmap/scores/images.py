"""What image classifiers are told by: what is random in them, and what their scores are compared with.

There are four parts, in standard deviations over validation images, because nets know their training images by heart:

    disagreement   log u(x), the mean over members
    logits         −log Σ_c exp z_c of the plain members' logits, the energy
    last layer     the log distance to the nearest directions of training images in what the last matrix meets
    layers         log ratio(x) of directions in what convolutions meet, mean and deviation of every channel; the mean over them

Their soft maximum, log mean exp, is the score: what one part finds OOD is, and parts that tell nothing do little harm.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from offmap._types import IGNORED, Inputs
from offmap.data import Batches, Rows
from offmap.data.image_spec import ImageSpec, is_image, warn_if_inaccurate
from offmap.data.inputs import rows_of, take_rows
from offmap.likelihoods import Categorical, Likelihood
from offmap.maxwent.config import Config
from offmap.model.params import LAST_LAYER, floating
from offmap.posterior.predictive import Predictive
from offmap.scores.combine import JUDGED, CombinedScore
from offmap.scores.features import blocks, hidden, layers_of, spread_out
from offmap.scores.neighbours import LEAST, KNNDistance, Scale

MAPS = 6
"""Layers to compare in beside the last, spread over the depth."""


def are_images(law: Likelihood, held: Rows) -> bool:
    """Whether these are images (B, channels, height, width) of one class each."""
    return isinstance(law, Categorical) and is_image(held.inputs) and held.targets.ndim == 1


def image_spec(law: Likelihood, train: Batches, held: Rows, plain: Callable[[Inputs], Tensor]) -> ImageSpec | None:
    """Describe validation images in floating-point numbers, and check training images against them; None for other inputs."""
    if not are_images(law, held) or not floating_images(held.inputs):
        return None
    spec = ImageSpec.of(held.inputs)
    first, _ = next(iter(train))
    spec.check(first, "the training inputs")
    few = held.take((held.targets != IGNORED).nonzero().flatten()[:JUDGED])
    if few.rows:
        warn_if_inaccurate(spec, plain(few.inputs), few.targets, "validation")
    return spec


def floating_images(x: Inputs) -> bool:
    """Whether inputs are images whose numbers are no bytes; a net that scales bytes itself may be given those."""
    return isinstance(x, Tensor) and is_image(x) and x.is_floating_point()


def for_images(settings: Config, *, trained: bool) -> Config:
    """What is random in a classifier of images unless said otherwise: its last layer, by the closed form unless to be `trained`.

    Draws of convolutions cost accuracy and disagree no better; all draws of the last layer cost one pass of the rest.
    """
    params = LAST_LAYER if settings.params is None else settings.params
    return replace(settings, params=params, solver=settings.solver if trained or params != LAST_LAYER else "closed-form")


def pictured(
    predictive: Predictive,
    rows: Sequence[Inputs],
    fresh: Inputs,
    log_uncertainty: Callable[[Inputs], Tensor],
    energy: Callable[[Inputs], Tensor],
) -> CombinedScore | None:
    """Where training images lie in some layers of a classifier, and the scales of all parts on images that it has not seen in
    training, `fresh`; None if no convolution meets them, or they are too few.
    """
    if len(rows) != 1 or rows_of(rows[0]) < LEAST:
        return None
    few = take_rows(fresh, slice(None, None, -(-rows_of(fresh) // JUDGED)))
    met = hidden(predictive, rows, None, lambda names: _asked(predictive, names))
    if not met:
        return None
    names = list(met)
    told = [layers_of(predictive, block, names, pictures=True) for block in blocks(predictive, few)]
    spaces: dict[str, KNNDistance] = {}
    for name in names:
        space = KNNDistance.of(met[name], standardized=False, even=name == names[-1])
        if space is not None:
            spaces[name] = space.rescaled(torch.cat([block[name] for block in told]))
    if names[-1] not in spaces:
        return None
    scales = Scale.of(log_uncertainty(few)), Scale.of(energy(few))
    return CombinedScore(None, tuple(spaces.values()), tuple(spaces), *scales)


def _asked(predictive: Predictive, names: list[str]) -> list[str]:
    """Of matrices in order of execution, some spread over the depth and the last; none if no convolution is among them.

    The first convolution meets the image itself, whose colours tell little, and is left out.
    """
    parameters = floating(predictive.model.net)  # pyright: ignore[reportAttributeAccessIssue]
    maps = [name for name in names if parameters[name].ndim > 2]
    if not maps:
        return []
    inner = [name for name in names if name != maps[0]] or maps
    return [*spread_out(inner[:-1], MAPS), inner[-1]]


def plain_energy(logits: Tensor, members: int) -> Tensor:
    """−log Σ_c exp z_c of the mean logits of every member, the mean over members: (M·P, B, C) -> (B,), in float64.

    >>> plain_energy(torch.tensor([[[0.0, 0.0]], [[2.0, 2.0]]]), members=2)
    tensor([-1.6931], dtype=torch.float64)
    """
    return -logits.double().unflatten(0, (members, -1)).mean(1).logsumexp(2).mean(0)
