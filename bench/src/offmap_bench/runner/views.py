"""What a method says all over the picture of a synthetic task: fitted again as its record chose, and kept beside the records."""

from __future__ import annotations

import io
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from offmap.errors import ConfigError
from offmap.guard import Guard
from offmap.io.atomic import write_whole
from offmap.likelihoods import Prediction
from offmap.posterior.predictive import Member
from offmap.scores import uncertainty as scores
from offmap_bench.runner.cell import guarded
from offmap_bench.runner.context import FitContext, Fitted
from offmap_bench.runner.methods import METHODS
from offmap_bench.runner.plan import Cell, digest
from offmap_bench.runner.store import Record
from offmap_bench.tasks.catalog import task as task_of
from offmap_bench.tasks.synthetic import SQUARE
from offmap_bench.tasks.task import Task

logger = logging.getLogger("offmap")

Array = NDArray[np.float32]
POINTS = {1: 300, 2: 64}
"""Points per axis, by the number of inputs."""

KINDS = ("mean", "std", "entropy")


@dataclass(frozen=True)
class View:
    """What a guard says on the grid: mean and standard deviation (n,), or the entropy of its prediction (n, n)."""

    mean: Tensor | None = None
    std: Tensor | None = None
    entropy: Tensor | None = None

    def band(self) -> tuple[Array, Array]:
        """Mean and standard deviation along the line."""
        assert self.mean is not None
        assert self.std is not None
        return self.mean.numpy(), self.std.numpy()

    def map(self) -> Array:
        """Entropy on the square."""
        assert self.entropy is not None
        return self.entropy.numpy()


def grid(inputs: int, points: int) -> Tensor | None:
    """Inputs of the picture: a line for one input, a square for two, None for more.

    >>> grid(1, 3).flatten(), grid(2, 4).shape
    (tensor([-1.5000,  0.0000,  1.5000]), torch.Size([16, 2]))
    """
    if inputs == 1:
        return torch.linspace(-1.5, 1.5, points, device="cpu")[:, None]
    if inputs > 2:
        return None
    axis = torch.linspace(-SQUARE, SQUARE, points, device="cpu")
    y, x = torch.meshgrid(axis, axis, indexing="ij")
    return torch.stack([x, y], -1).flatten(0, 1)


def view(guard: Guard, x: Tensor, clip: float | None) -> View:
    """What is drawn of one guard."""
    return view_of(guard.predict(x, clip=clip))


def view_of(prediction: Prediction) -> View:
    """A prediction on the grid as it is drawn."""
    if prediction.probs is None:
        return View(mean=prediction.mean, std=prediction.std)
    side = round(math.sqrt(len(prediction.probs)))
    return View(entropy=scores.predictive_entropy(prediction.probs[None]).reshape(side, side))


def refitted(cell: Cell, record: Record, task: Task) -> Fitted:
    """The fit behind a record, made again; of a grid only what was chosen."""
    chosen = {key: record.chosen[key] for key in cell.grid}
    return METHODS[cell.method].fit(FitContext.of(task, cell.seed, cell.source), {**cell.fit_config, **chosen})


def read_as(cell: Cell, fitted: Fitted, task: Task) -> Guard:
    """The fit as the cell reads it: all members, or the first of them for a cell of one net."""
    if fitted.predictive is None:
        raise ConfigError(f"Expected a method that predicts, but {cell.label!r} only scores. Leave it out of the figures.")
    alone = cell.members == 1 and fitted.predictive.members > 1
    return guarded(Member(fitted.predictive, 0) if alone else fitted.predictive, fitted, task, cell)


def views(cell: Cell, record: Record, folder: Path, clips: Sequence[float | None] = (None,)) -> list[View]:
    """One view for every clip, read from `folder`/views if the same fit was looked at before."""
    chosen = {key: record.chosen[key] for key in cell.grid}
    path = folder / "views" / f"{cell.hash}-{digest({'settings': record.settings, 'chosen': chosen})}.npz"
    known = _read(path)
    if not {_name(kind, clip) for clip in clips for kind in KINDS} <= known.keys():
        known |= look(cell, record, clips)
        buffer = io.BytesIO()
        np.savez_compressed(buffer, allow_pickle=False, **known)
        write_whole(path, buffer.getvalue())
    return [View(**{kind: _tensor(known[_name(kind, clip)]) for kind in KINDS}) for clip in clips]


def look(cell: Cell, record: Record, clips: Sequence[float | None]) -> dict[str, Array]:
    """Fit again and look, with every clip; an array that a task does not have is empty."""
    task = task_of(cell.task, cell.seed)
    x = grid(task.inputs, POINTS.get(task.inputs, 0))
    if x is None:
        raise ConfigError(f"Expected a task of one or two inputs to draw, but {cell.task!r} has {task.inputs}.")
    guard = read_as(cell, refitted(cell, record, task), task)
    made = {clip: view(guard, x, clip) for clip in clips}
    return {_name(kind, clip): _array(getattr(seen, kind)) for clip, seen in made.items() for kind in KINDS}


def _name(kind: str, clip: float | None) -> str:
    return f"{kind} {clip}"


def _read(path: Path) -> dict[str, Array]:
    if not path.exists():
        return {}
    try:
        with path.open("rb") as content, np.load(content) as file:
            return {name: np.asarray(file[name], np.float32) for name in file.files}
    except Exception as error:  # decoders raise all kinds of errors on damaged files
        logger.warning("The views at %s cannot be read (%s) and are made again.", path, error)
        return {}


def _array(values: Tensor | None) -> Array:
    return np.zeros(0, np.float32) if values is None else values.float().numpy()


def _tensor(values: Array) -> Tensor | None:
    return torch.from_numpy(values) if values.size else None
