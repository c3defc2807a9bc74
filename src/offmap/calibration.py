"""What a guard knows of in-distribution data: rows to compare with, its clip, its threshold and its intervals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from offmap import checks
from offmap._types import Inputs
from offmap.cache import CACHE_NUMBERS
from offmap.data import Batches, Rows, map_rows, sample_rows
from offmap.data.inputs import rows_of, take_rows
from offmap.detector import Calibration
from offmap.distributed.group import SINGLE_PROCESS, Group, all_gather_concat, shard_slice
from offmap.errors import ConfigError
from offmap.guard import COMPARING, Guard, checked_clip
from offmap.likelihoods import Prediction
from offmap.maxwent.search import CLIPS, find_lowest
from offmap.posterior.predictive import CachedPredictive
from offmap.scores.combine import ROWS, fit_combined, log_uncertainty
from offmap.scores.images import are_images, pictured

ENOUGH = 50
"""Sampled nets, of all members together, by which clips are compared."""
EMPTY = Calibration(torch.zeros(1, device="cpu"), torch.zeros(1, device="cpu"))
"""Of a guard that has none yet."""


def compared(made: Guard, train: Batches, held: Rows, group: Group = SINGLE_PROCESS, *, sharded: bool = False) -> Guard:
    """The guard with the training rows that its score compares with, if it does and there is one score per example."""
    if made.score_with not in COMPARING:
        return made

    def log_u(x: Inputs) -> Tensor:
        outputs = (made.outputs(block, None) for block in made.blocks(x))
        return torch.cat([log_uncertainty(made.likelihood, each, made.predictive.members) for each in outputs])

    def plain_energy(x: Inputs) -> Tensor:
        return torch.cat([made.energy(block) for block in made.blocks(x)])

    uncertain, energy = over_ranks(log_u, group), over_ranks(plain_energy, group)
    rows, found = sample_rows(train, ROWS, made.seed, group, sharded=sharded), None
    if are_images(made.likelihood, held) and made.predictive.mean_weights() is not None:
        found = pictured(made.predictive, rows, held.inputs, uncertain, energy)
    found = found or fit_combined(made.predictive, rows, uncertain)
    if found is None and made.score_with == "distance":
        raise ConfigError("Expected three or more training rows whose inputs or layers are one vector per example, and not all "
                          "the same, for score='distance', but there are none. Pass score='paper'.")  # fmt: skip
    return replace(made, familiar=found)


def over_ranks(work: Callable[[Inputs], Tensor], group: Group) -> Callable[[Inputs], Tensor]:
    """Return the same function of rows, each process of a `group` computing its shard of them."""
    return lambda x: map_rows(lambda shard: {"values": work(shard)}, x, group)["values"]


def calibrated(
    made: Guard, held: Rows, familiar: Rows, clip: float | str | None, false_alarms: float, group: Group = SINGLE_PROCESS
) -> Guard:
    """The guard with its clip chosen on `held`, and threshold and intervals from `familiar`."""
    asked = replace(
        made, predictive=CachedPredictive(made.predictive, CACHE_NUMBERS)
    )  # clip, threshold and intervals ask for the same
    asked = replace(asked, clip=choose_clip(asked, held, group) if clip == "choose" else checked_clip(clip))
    calibration = calibration_of(asked, familiar, false_alarms, exact=familiar is not held, group=group)
    return replace(made, clip=asked.clip, calibration=calibration)


def choose_clip(made: Guard, held: Rows, group: Group = SINGLE_PROCESS) -> float | None:
    """The clip of the paper's grid with the lowest validation NLL; None stands for no clip. ENOUGH nets in all tell."""
    few = replace(made, draws=min(made.draws, -(-ENOUGH // made.predictive.members)))
    own = shard_slice(group, held.rows)
    mine = replace(held, inputs=take_rows(held.inputs, own), targets=held.targets[own])

    def risk(clip: float) -> float:
        return float(all_gather_concat(group, nll(few, mine, clip=clip) if mine.rows else None).mean())

    best = find_lowest({clip: risk(clip) for clip in CLIPS})
    return None if best == float("inf") else best


def calibration_of(guard: Guard, rows: Rows, false_alarms: float, *, exact: bool, group: Group = SINGLE_PROCESS) -> Calibration:
    """Scores and residuals of the guard on in-distribution rows, each process of a `group` on some of them."""
    false_alarms = checks.fraction("false_alarms", false_alarms, example=0.05)
    guard.check_targets(rows)
    fields = map_rows(lambda x: {n: t for n, t in vars(guard.predict(x)).items() if t is not None}, rows.inputs, group)
    missed = guard.likelihood.residual(Prediction(**fields), rows.targets)
    calibration = Calibration(over_ranks(guard.score, group)(rows.inputs), missed, false_alarms, exact)
    calibration.warn_if_infinite(rows.rows, rows.name)
    return calibration


def nll(guard: Guard, rows: Rows, *, clip: float | None) -> Tensor:
    """NLL of the guard's prediction at the targets, (n,), nats."""
    parts: list[Tensor] = []
    start = 0
    for block in guard.blocks(rows.inputs):
        y = rows.targets[start : start + rows_of(block)]
        start += rows_of(block)
        parts.append(guard.likelihood.predictive_nll(guard.outputs(block, clip), y))
    return torch.cat(parts)
