"""Fits made again to be looked at: how detection, risk and entropy move with the steps (the paper's appendix B), and what a
method predicts all over the input space of a synthetic task. Both are cached beside the records.
"""

from __future__ import annotations

import io
import json
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from offmap.atomic import write_whole
from offmap.errors import ConfigError
from offmap.evaluation import measure_separation
from offmap.guard import Guard
from offmap.likelihoods import Likelihood, Prediction
from offmap.likelihoods.classification import predictive_entropy
from offmap.maxwent import solve as maxwent
from offmap.maxwent.config import CONFIGS, Config
from offmap.maxwent.risk import Validation, as_risk
from offmap.model.params import choose, stack_models
from offmap.posterior.distribution import WeightDistribution
from offmap.posterior.predictive import Member, Stochastic
from offmap_bench.runner.base_models import SILENT, likelihood_of, prepare
from offmap_bench.runner.cell import build_guard
from offmap_bench.runner.context import FitContext, Fitted, config_of
from offmap_bench.runner.methods import METHODS
from offmap_bench.runner.plan import Cell, digest
from offmap_bench.runner.store import Record, settings_of, short
from offmap_bench.tasks.catalog import task as task_of
from offmap_bench.tasks.synthetic import SQUARE
from offmap_bench.tasks.task import Task

logger = logging.getLogger("offmap")

Array = NDArray[np.float32]
Seen = TypeVar("Seen")

LOOKS, ROWS = 100, 500
"""Measurements of detection in one fit, at the most, and rows of each set that they take."""

POINTS = {1: 300, 2: 64}
"""Points per axis of a view, by the number of inputs."""

KINDS = ("mean", "std", "entropy")


@dataclass(frozen=True)
class WatchedValidation(Validation):
    """Validation that shows the distribution to a function whenever the fit measures its risk."""

    watch: Callable[[WeightDistribution], None] = field(default=lambda q: None, compare=False)

    def evaluate(self, q: WeightDistribution) -> tuple[Tensor, Tensor]:
        """The risk and the uncertainty."""
        self.watch(q)
        return super().evaluate(q)


@dataclass(frozen=True)
class Course(Generic[Seen]):
    """A fitted distribution, and what was observed of it on the way, [(step, what)]."""

    fitted: Stochastic
    observed: list[tuple[int, Seen]]


def course(
    nets: Sequence[nn.Module], task: Task, config: Config, seed: int, look: Callable[[Stochastic], Seen], *, batch_size: int = 128
) -> Course[Seen]:
    """Fit as `maxwent.fit` does, with one λ, and call `look` at every check and at the start."""
    train, valid, likelihood = prepare(nets, task, batch_size)
    at = choose(stack_models(nets), valid.inputs, config.params, SILENT.output_fn)
    model = SILENT.model(at.module, at.mean | at.fixed, valid.inputs)
    inputs = maxwent.observe_inputs(at, train, config, SILENT)
    observed: list[Seen] = []
    looking = torch.no_grad()(look)
    validation = WatchedValidation(
        model, likelihood, valid, as_risk(config.risk), config.risk_draws, seed,
        watch=lambda q: observed.append(looking(Stochastic(model, q))),
    )  # fmt: skip
    if config.clip_loss and config.max_risk is None:
        validation = validation.clip_losses(at.mean | at.fixed)
    (one,) = maxwent.as_floats(config.entropy_weight)
    config = replace(config, entropy_weight=one)
    q, history = maxwent.SOLVERS[config.solver](
        maxwent.Task(at, model, train, likelihood, config, validation, inputs, seed, SILENT)
    )
    q.requires_grad_(False)
    if not observed:  # a closed form is searched by parts of it
        validation.evaluate(q)
    # the start may have been looked at several times, every check once
    return Course(Stochastic(model, q, history), list(zip(history.step, observed[-len(history.step) :], strict=True)))


@dataclass(frozen=True)
class Trace:
    """One fit of one net: at every step, AUROC and FPR@95 (None between looks), loss, validation risk, entropy."""

    step: Sequence[int]
    loss: Sequence[float | None]
    risk: Sequence[float | None]
    entropy: Sequence[float | None]
    auroc: Sequence[float | None]
    fpr95: Sequence[float | None]
    max_risk: float
    kept: int


def load_trace(cell: Cell, folder: Path) -> Trace:
    """The trace of a cell's fit for its first net, read from `folder`/traces if it was made before."""
    path = folder / "traces" / f"{cell.hash}-{digest(settings_of(cell))}.json"
    cached = _read_trace(path)
    if cached is not None:
        return cached
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        made = trace(cell, task_of(cell.task, cell.seed))
    finally:
        torch.set_num_threads(threads)
    content = short(asdict(made))
    write_whole(path, (json.dumps({**content, "checksum": digest(content)}) + "\n").encode())
    return made


def _read_trace(path: Path) -> Trace | None:
    """A cached trace; None when there is none, or when the file is damaged, with a warning."""
    if not path.exists():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content.pop("checksum", None) != digest(content):
            raise ValueError("its checksum does not match")
        return Trace(**content)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        logger.warning("The trace at %s cannot be read (%s) and is made again.", path, error)
        return None


def trace(cell: Cell, task: Task) -> Trace:
    """Fit around the first of the cell's base models, and measure its detection up to a hundred times."""
    net = FitContext(task, cell.seed, cell.source).models().nets[0]
    config: Config = config_of(maxwent, cell.config, "config", CONFIGS)
    every, count = max(1, config.steps // config.check_every // LOOKS), [0]
    likelihood = likelihood_of(task, net)

    def look(predictive: Stochastic) -> tuple[float, float] | None:
        count[0] += 1
        return detection_of(predictive, likelihood, task, cell.seed) if count[0] % every == 1 or every == 1 else None

    watched = course([net], task, config, cell.seed, look, batch_size=cell.config.get("batch_size", 128))
    history, pairs = watched.fitted.history, [pair for _, pair in watched.observed]
    return Trace(
        history.step, history.loss, [r[0] for r in history.risk], [e[0] for e in history.entropy],
        [p and p[0] for p in pairs], [p and p[1] for p in pairs], history.max_risk[0], history.kept[0],
    )  # fmt: skip


def detection_of(predictive: Stochastic, likelihood: Likelihood, task: Task, seed: int, draws: int = 50) -> tuple[float, float]:
    """AUROC and FPR@95 of the paper's score, on the first rows of the test data and of the first OOD set."""
    id_scores, ood_scores = (
        likelihood.score(predictive.outputs(x[:ROWS], draws, clip=None, seed=seed)).nan_to_num(nan=torch.inf, posinf=torch.inf)
        for x in (task.test[0], next(iter(task.ood.values())))
    )
    measures = measure_separation(id_scores, ood_scores)
    return measures["auroc"], measures["fpr95"]


# ------------------------------------------------------------------------------------------------ views


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
    return View(entropy=predictive_entropy(prediction.probs[None]).reshape(side, side))


def refit(cell: Cell, record: Record, task: Task) -> Fitted:
    """The fit behind a record, made again; of a grid only what was chosen."""
    chosen = {key: record.chosen[key] for key in cell.grid}
    return METHODS[cell.method].fit(FitContext(task, cell.seed, cell.source), {**cell.fit_config, **chosen})


def read_as(cell: Cell, fitted: Fitted, task: Task) -> Guard:
    """The fit as the cell reads it: all members, or the first of them for a cell of one net."""
    if fitted.predictive is None:
        raise ConfigError(f"Expected a method that predicts, but {cell.label!r} only scores. Leave it out of the figures.")
    alone = cell.members == 1 and fitted.predictive.members > 1
    return build_guard(Member(fitted.predictive, 0) if alone else fitted.predictive, fitted, task, cell)


def views(cell: Cell, record: Record, folder: Path, clips: Sequence[float | None] = (None,)) -> list[View]:
    """One view for every clip, read from `folder`/views if the same fit was looked at before."""
    chosen = {key: record.chosen[key] for key in cell.grid}
    path = folder / "views" / f"{cell.hash}-{digest({'settings': record.settings, 'chosen': chosen})}.npz"
    arrays = _read_views(path)
    if not {f"{kind} {clip}" for clip in clips for kind in KINDS} <= arrays.keys():
        arrays |= make_views(cell, record, clips)
        buffer = io.BytesIO()
        np.savez_compressed(buffer, allow_pickle=False, **arrays)
        write_whole(path, buffer.getvalue())
    return [View(**{kind: _tensor(arrays[f"{kind} {clip}"]) for kind in KINDS}) for clip in clips]


def make_views(cell: Cell, record: Record, clips: Sequence[float | None]) -> dict[str, Array]:
    """Fit again and predict, with every clip; an array that a task does not have is empty."""
    task = task_of(cell.task, cell.seed)
    x = grid(task.inputs, POINTS.get(task.inputs, 0))
    if x is None:
        raise ConfigError(f"Expected a task of one or two inputs to draw, but {cell.task!r} has {task.inputs}.")
    guard = read_as(cell, refit(cell, record, task), task)
    by_clip = {clip: view(guard, x, clip) for clip in clips}
    return {f"{kind} {clip}": _array(getattr(v, kind)) for clip, v in by_clip.items() for kind in KINDS}


def _read_views(path: Path) -> dict[str, Array]:
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
