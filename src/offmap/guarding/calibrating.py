"""What a guard knows of familiar data: rows to compare with, its clip, its threshold and its intervals."""

from __future__ import annotations

from dataclasses import replace

import torch

from offmap._types import Inputs
from offmap.batches import Batches, Rows, sample_together
from offmap.core.distribution import REMEMBERED
from offmap.core.inputs import take_rows
from offmap.errors import ConfigError
from offmap.group import ALONE, Group, joined, part
from offmap.guarding.answer import Calibration
from offmap.guarding.familiar import ROWS, familiar_of, log_uncertainty
from offmap.guarding.guard import Guard, calibration_of, checked_clip, nll
from offmap.guarding.pictures import are_pictures, pictured
from offmap.guarding.spread import spread
from offmap.methods.predictives import Remembered
from offmap.solve.select import CLIPS, lowest

ENOUGH = 50
"""Sampled nets, of all members together, by which clips are compared."""
EMPTY = Calibration(torch.zeros(1, device="cpu"), torch.zeros(1, device="cpu"))
"""Of a guard that has none yet."""


def compared(made: Guard, train: Batches, held: Rows, group: Group = ALONE, *, sharded: bool = False) -> Guard:
    """The guard with the training rows that its score compares with, if it does and there is one score per example."""
    if made.score_with not in ("default", "distance"):
        return made

    def log_u(x: Inputs) -> torch.Tensor:
        outputs = (made.outputs(block, None) for block in made.blocks(x))
        return torch.cat([log_uncertainty(made.likelihood, each, made.predictive.members) for each in outputs])

    def plain_energy(x: Inputs) -> torch.Tensor:
        return torch.cat([made.energy(block) for block in made.blocks(x)])

    uncertain, energy = spread(log_u, group), spread(plain_energy, group)
    rows, found = sample_together(train, ROWS, made.seed, group, apart=sharded), None
    if are_pictures(made.likelihood, held) and hasattr(made.predictive, "plain"):
        found = pictured(made.predictive, rows, held.inputs, uncertain, energy)
    found = found or familiar_of(made.predictive, rows, uncertain)
    if found is None and made.score_with == "distance":
        raise ConfigError("Expected three or more training rows whose inputs or layers are one vector per example, and not all "
                          "the same, for score='distance', but there are none. Pass score='paper'.")  # fmt: skip
    return replace(made, familiar=found)


def calibrated(
    made: Guard, held: Rows, familiar: Rows, clip: float | str | None, false_alarms: float, group: Group = ALONE
) -> Guard:
    """The guard with its clip chosen on `held`, and threshold and intervals from `familiar`."""
    asked = replace(made, predictive=Remembered(made.predictive, REMEMBERED))  # clip, threshold and intervals ask for the same
    asked = replace(asked, clip=choose_clip(asked, held, group) if clip == "choose" else checked_clip(clip))
    calibration = calibration_of(asked, familiar, false_alarms, exact=familiar is not held, group=group)
    return replace(made, clip=asked.clip, calibration=calibration)


def choose_clip(made: Guard, held: Rows, group: Group = ALONE) -> float | None:
    """The clip of the paper's grid with the lowest validation NLL; None stands for no clip. ENOUGH nets in all tell."""
    few = replace(made, draws=min(made.draws, -(-ENOUGH // made.predictive.members)))
    own = part(group, held.rows)
    mine = replace(held, inputs=take_rows(held.inputs, own), targets=held.targets[own])

    def risk(clip: float) -> float:
        return float(joined(group, nll(few, mine, clip=clip) if mine.rows else None).mean())

    best, _ = lowest(CLIPS, risk)
    return None if best == float("inf") else best
