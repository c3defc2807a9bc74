"""A guard's work on rows, divided among the processes that fit it together; each ends with the whole."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from offmap._types import Inputs
from offmap.data.inputs import rows_of, take_rows
from offmap.distributed.group import Group, joined, part
from offmap.guard import Guard
from offmap.likelihoods import Prediction


def spread(work: Callable[[Inputs], Tensor], group: Group) -> Callable[[Inputs], Tensor]:
    """The same function of rows, (B, ...) from B of them, each process asked for its part."""
    if group.size == 1:
        return work

    def whole(x: Inputs) -> Tensor:
        own = part(group, rows_of(x))
        return joined(group, work(take_rows(x, own)) if own.start < own.stop else None)

    return whole


def predicted(guard: Guard, x: Inputs, group: Group) -> Prediction:
    """What the guard predicts, each process for its part of the rows."""
    if group.size == 1:
        return guard.predict(x)
    own = part(group, rows_of(x))
    fields = {n: t for n, t in vars(guard.predict(take_rows(x, own))).items() if t is not None} if own.start < own.stop else {}
    names = next(told for told in group.tell(list(fields)) if told)
    parts = [each for each in group.all_gather(list(fields.values())) if each]
    found = {name: torch.cat([each[i] for each in parts]) for i, name in enumerate(names)}
    return Prediction(**{name: found.get(name) for name in ("mean", "std", "probs", "label")})


def same_everywhere(guard: Guard, group: Group) -> Guard:
    """The guard as rank 0 has it: other machines may round otherwise."""
    calibration, familiar = guard.calibration, guard.familiar
    group.copy(calibration.scores, calibration.residuals, *(familiar.state().values() if familiar else ()))
    return guard
