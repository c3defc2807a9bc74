"""Build a guard, complete: fit its score, choose its clip, set threshold and intervals on in-distribution rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from offmap import checks
from offmap._types import IGNORED, Inputs, ScoreFn
from offmap.data import Batches, Place, Rows, map_rows, sample_rows
from offmap.data.batch import take_rows
from offmap.data.image_spec import ImageSpec, is_image, warn_if_inaccurate
from offmap.detector import Calibration, concat_results, merge_parts, reduce_positions
from offmap.distributed.group import SINGLE_PROCESS, Group, all_gather_concat, shard_slice
from offmap.errors import ConfigError, nearest
from offmap.guard import DrawSampler, Guard, check_clip, check_row_targets
from offmap.likelihoods import Categorical, Likelihood, Prediction
from offmap.maxwent.config import Config
from offmap.maxwent.search import CLIPS, find_lowest
from offmap.model.params import LAST_LAYER
from offmap.posterior.predictive import CachedPredictive, Predictive
from offmap.scores import combine as combine  # registers the default score
from offmap.scores.score import SCORES, FunctionScore, Score, ScoreData

REFERENCE_ROWS = 4096
"""Training rows to compare distances with: with more of them, nearer ones are found, at some cost in memory and time."""

ENOUGH = 50
"""Draws, of all members together, by which clips are compared."""


def build_guard(
    predictive: Predictive,
    likelihood: Likelihood,
    place: Place,
    train: Batches | None,
    valid: Rows,
    calibration: Rows | None = None,
    *,
    score: str | ScoreFn = "default",
    draws: int = 50,
    clip: float | str | None = "choose",
    false_alarms: float = 0.05,
    seed: int = 0,
    target: str = "labels",
    notes: tuple[str, ...] = (),
    image_spec: ImageSpec | None = None,
    group: Group = SINGLE_PROCESS,
    sharded: bool = False,
) -> Guard:
    """Build a guard over a predictive.

    Args:
        predictive: Draws outputs.
        likelihood: What outputs mean.
        place: Device and dtype of the inputs.
        train: Data whose rows the score may compare with.
        valid: Rows that choose the clip and, without `calibration`, set threshold and intervals.
        calibration: Rows that set threshold and intervals.
        score: Name of a registered score, or a function of stacked outputs.
        draws: Draws of every member.
        clip: Bound on the draws that predict; "choose" takes the one with the lowest validation NLL.
        false_alarms: Share of in-distribution rows that may be called OOD.
        seed: Seed of the draws.
        target: Key of the targets in batches that are one dict.
        notes: Findings about the model.
        image_spec: Shape and range of image inputs.
        group: Processes that divide the work.
        sharded: Whether each of them has training rows of its own.
    """
    false_alarms = checks.fraction("false_alarms", false_alarms, example=0.05)
    sampler = DrawSampler(predictive, likelihood, draws, seed)

    def read_train() -> list[Inputs]:
        return [] if train is None else sample_rows(train, REFERENCE_ROWS, seed, group, sharded=sharded)

    images = are_images(likelihood, valid)
    module = fit_score(score, ScoreData(read_train, valid.inputs, images, sampler, lambda work: share_rows(work, group)))
    # clip, threshold and intervals ask for the same outputs
    cached = replace(sampler, predictive=CachedPredictive(predictive))
    clip = choose_clip(cached, valid, group) if clip == "choose" else check_clip(clip)
    exact, reference = calibration is not None, calibration or valid
    check_row_targets(cached, reference)

    def score_rows(x: Inputs) -> Tensor:
        blocks = (cached.features(b, module.reads) for b in cached.blocks(x))
        return torch.cat([reduce_positions(module(f), "mean") for f in blocks]).to(
            torch.promote_types(place.dtype, torch.float32)
        )

    residuals = likelihood.residual(predict_rows(cached, clip, reference.inputs, group), reference.targets)
    found = Calibration(share_rows(score_rows, group)(reference.inputs), residuals, false_alarms, exact)
    found.warn_if_infinite(reference.rows, reference.name)
    group.broadcast(found.scores, residuals, *module.buffers())  # as rank 0 has them: other machines may round otherwise
    return Guard(
        predictive=predictive, likelihood=likelihood, score_module=module, clip=clip, draws=draws, notes=notes,
        calibration=found, place=place, target=target, seed=seed, image_spec=image_spec,
    )  # fmt: skip


def check_score(score: Any) -> None:
    """Raise unless this is a function or the name of a registered score."""
    if not callable(score) and (not isinstance(score, str) or score not in SCORES):
        raise ConfigError(f"Expected `score` to be {nearest(str(score), SCORES)} or a function, but got {score!r}.")


def fit_score(score: str | ScoreFn, data: ScoreData) -> Score:
    """Fit the score of that name, or wrap a function of outputs."""
    return SCORES[score].fit(data).eval() if isinstance(score, str) else FunctionScore(score)


def choose_clip(sampler: DrawSampler, valid: Rows, group: Group = SINGLE_PROCESS) -> float | None:
    """Choose the clip of the paper's grid with the lowest validation NLL; None stands for no clip."""
    few = replace(sampler, draws=min(sampler.draws, -(-ENOUGH // sampler.predictive.members)))
    rows = shard_slice(group, valid.rows)
    mine = replace(valid, inputs=take_rows(valid.inputs, rows), targets=valid.targets[rows])

    def risk(clip: float) -> float:
        return float(all_gather_concat(group, few.nll(mine, clip) if mine.rows else None).mean())

    best = find_lowest({clip: risk(clip) for clip in CLIPS})
    return None if best == float("inf") else best


def share_rows(work: Callable[[Inputs], Tensor], group: Group) -> Callable[[Inputs], Tensor]:
    """Return the same function of rows, of which each process computes its shard."""
    return work if group.size == 1 else lambda x: map_rows(lambda shard: {"values": work(shard)}, x, group)["values"]


def predict_rows(sampler: DrawSampler, clip: float | None, x: Inputs, group: Group) -> Prediction:
    """Predict rows with clipped draws, each process its shard."""

    def predict(x: Inputs) -> dict[str, Tensor]:
        blocks = (sampler.likelihood.predict(sampler.outputs(b, clip)) for b in sampler.blocks(x))
        return {name: t for name, t in vars(merge_parts(blocks, concat_results)).items() if t is not None}

    return Prediction(**map_rows(predict, x, group))


def are_images(likelihood: Likelihood, rows: Rows) -> bool:
    """Whether these are images (B, channels, height, width) of one class each."""
    return isinstance(likelihood, Categorical) and is_image(rows.inputs) and rows.targets.ndim == 1


def choose_image_config(config: Config, *, trained: bool) -> Config:
    """Make the last layer of an image classifier random unless told otherwise, by the closed form unless to be `trained`.

    Draws of convolutions cost accuracy and disagree no better; all draws of the last layer cost one pass of the rest.
    """
    params = LAST_LAYER if config.params is None else config.params
    return replace(config, params=params, solver=config.solver if trained or params != LAST_LAYER else "closed-form")


def describe_images(
    likelihood: Likelihood, train: Batches, valid: Rows, base_outputs: Callable[[Inputs], Tensor]
) -> ImageSpec | None:
    """Describe validation images in floating-point numbers, and check training images against them; None for other inputs."""
    if not are_images(likelihood, valid) or not valid.inputs.is_floating_point():
        return None
    spec = ImageSpec.of(valid.inputs)
    first, _ = next(iter(train))
    spec.check(first, "the training inputs")
    few = valid.take((valid.targets != IGNORED).nonzero().flatten()[:1000])
    if few.rows:
        warn_if_inaccurate(spec, base_outputs(few.inputs), few.targets, "validation")
    return spec
