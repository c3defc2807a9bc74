"""Fits made again to be looked at: how detection, risk and entropy move with the steps (the paper's appendix B), and what a
method predicts all over the input space of a synthetic task. Both are cached beside the records.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from offmap import Guard, Likelihood, Prediction
from offmap.errors import ConfigError
from offmap.evaluation import measure_separation
from offmap.likelihoods.classification import predictive_entropy
from offmap.maxwent import solve as maxwent
from offmap.maxwent.config import CONFIGS, Config
from offmap.posterior.predictive import Stochastic
from offmap.report.page import Array
from offmap_bench.cache import Entry, read_or_make
from offmap_bench.runner.base_models import SILENT, likelihood_of, prepare
from offmap_bench.runner.methods import FitContext, Fitted, Member, config_of
from offmap_bench.runner.plan import METHODS, Cell, digest
from offmap_bench.runner.run import build_guard, single_thread
from offmap_bench.runner.store import Record, settings_of
from offmap_bench.tasks.catalog import task as task_of
from offmap_bench.tasks.synthetic import SQUARE
from offmap_bench.tasks.task import Task

View = dict[str, Array]
"""What a guard says on the grid: "mean" and "std" (n,), or the "entropy" of its prediction (n, n)."""

Seen = TypeVar("Seen")

LOOKS, ROWS = 100, 500  # measurements of detection in one fit, at the most, and rows of each set that they take
POINTS = {1: 300, 2: 64}  # per axis of a view, by the number of inputs


def course(
    nets: Sequence[nn.Module], task: Task, config: Config, seed: int, look: Callable[[Stochastic], Seen], *, batch_size: int = 128
) -> tuple[Stochastic, list[tuple[int, Seen]]]:
    """Fit as `maxwent.fit` does, with one λ, and call `look` at every check and at the start: [(step, what was seen)]."""
    train, valid, likelihood = prepare(nets, task, batch_size)
    observed: list[Seen] = []
    looking = torch.no_grad()(look)
    fitted = maxwent.fit(
        nets, train, valid, likelihood=likelihood, config=config, seed=seed, runtime=SILENT,
        watch=lambda predictive: observed.append(looking(predictive)),
    )  # fmt: skip
    return fitted, list(zip(fitted.history.step, observed, strict=True))


def watch(
    cell: Cell, look: Callable[[Stochastic, Likelihood, Task], Seen], **changes: Any
) -> tuple[Stochastic, list[tuple[int, Seen]]]:
    """Make the fit of a cell again around the first of its base models, with changed settings, and look at it on the way."""
    task = task_of(cell.task, cell.seed)
    net = FitContext(task, cell.seed, cell.source).models()[0]
    config: Config = config_of(maxwent, cell.config | changes, "config", CONFIGS)
    likelihood, batch_size = likelihood_of(task, net), cell.config.get("batch_size", 128)
    return course([net], task, config, cell.seed, lambda p: look(p, likelihood, task), batch_size=batch_size)


def trace(cell: Cell, folder: Path) -> dict[str, Array]:
    """Return loss, validation risk, entropy, AUROC and FPR@95 (NaN between looks) at every step of a fit, τ and the step kept."""

    def make() -> Entry:
        config: Config = config_of(maxwent, cell.config, "config", CONFIGS)
        every, count = max(1, config.steps // config.check_every // LOOKS), [0]

        def look(predictive: Stochastic, likelihood: Likelihood, task: Task) -> tuple[float, float]:
            count[0] += 1
            is_due = count[0] % every == 1 or every == 1
            return detection_of(predictive, likelihood, task, cell.seed) if is_due else (math.nan, math.nan)

        with single_thread():
            fitted, observed = watch(cell, look)
        h, pairs = fitted.history, [pair for _, pair in observed]
        values = {"loss": h.loss, "risk": [r[0] for r in h.risk], "entropy": [e[0] for e in h.entropy]}
        values |= {name: [pair[i] for pair in pairs] for i, name in enumerate(("auroc", "fpr95"))}
        values |= {"step": h.step, "max_risk": h.max_risk[0], "kept": h.kept[0]}
        return None, {name: torch.tensor(value, dtype=torch.float64) for name, value in values.items()}

    _, tensors = read_or_make(folder / "traces" / f"{cell.hash}-{digest(settings_of(cell))}.safetensors", make)
    return {name: values.numpy() for name, values in tensors.items()}


def detection_of(predictive: Stochastic, likelihood: Likelihood, task: Task, seed: int, draws: int = 50) -> tuple[float, float]:
    """Return AUROC and FPR@95 of the paper's score, on the first rows of the test data and of the first OOD set."""
    id_scores, ood_scores = (
        likelihood.score(predictive.outputs(x[:ROWS], draws, clip=None, seed=seed)).nan_to_num(nan=torch.inf, posinf=torch.inf)
        for x in (task.test[0], next(iter(task.ood.values())))
    )
    measures = measure_separation(id_scores, ood_scores)
    return measures["auroc"], measures["fpr95"]


def grid(inputs: int, points: int) -> Tensor | None:
    """Return the inputs of a view: a line for one input, a square for two, None for more.

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


def view_of(prediction: Prediction) -> View:
    """Return a prediction on the grid as it is drawn."""
    if prediction.probs is None:
        assert prediction.mean is not None
        assert prediction.std is not None
        return {"mean": prediction.mean.float().numpy(), "std": prediction.std.float().numpy()}
    side = round(math.sqrt(len(prediction.probs)))
    return {"entropy": predictive_entropy(prediction.probs[None]).reshape(side, side).float().numpy()}


def refit(cell: Cell, record: Record, task: Task) -> Fitted:
    """Make the fit behind a record again; of a grid only what was chosen."""
    chosen = {key: record.chosen[key] for key in cell.grid}
    return METHODS[cell.method].fit(FitContext(task, cell.seed, cell.source), {**cell.fit_config, **chosen})


def read_as(cell: Cell, fitted: Fitted, task: Task) -> Guard:
    """Return the fit as the cell reads it: all members, or the first of them for a cell of one net."""
    if fitted.predictive is None:
        raise ConfigError(f"Expected a method that predicts, but {cell.label!r} only scores. Leave it out of the figures.")
    alone = cell.members == 1 and fitted.predictive.members > 1
    return build_guard(Member(fitted.predictive, 0) if alone else fitted.predictive, fitted, task, cell)


def views(cell: Cell, record: Record, folder: Path, clips: Sequence[float | None] = (None,)) -> list[View]:
    """Return one view for every clip, read from `folder`/views if the same fit was looked at so before."""

    def make() -> Entry:
        task = task_of(cell.task, cell.seed)
        x = grid(task.inputs, POINTS.get(task.inputs, 0))
        if x is None:
            raise ConfigError(f"Expected a task of one or two inputs to draw, but {cell.task!r} has {task.inputs}.")
        guard = read_as(cell, refit(cell, record, task), task)
        by_clip = {clip: view_of(guard.predict(x, clip=clip)) for clip in clips}
        return None, {f"{kind} {clip}": torch.from_numpy(v) for clip, view in by_clip.items() for kind, v in view.items()}

    chosen = {key: record.chosen[key] for key in cell.grid}
    name = f"{cell.hash}-{digest({'settings': record.settings, 'chosen': chosen, 'clips': list(clips)})}.safetensors"
    _, tensors = read_or_make(folder / "views" / name, make)
    return [{k.partition(" ")[0]: v.numpy() for k, v in tensors.items() if k.endswith(f" {clip}")} for clip in clips]
