"""A fit of MaxWEnt looked at while it goes: how detection, risk and entropy move with the steps (the paper's appendix B)."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

from offmap.data import Place, as_batches, load_rows
from offmap.evaluation import measure_separation
from offmap.io.atomic import write_whole
from offmap.likelihoods import Likelihood
from offmap.maxwent import solve as maxwent
from offmap.maxwent.risk import Validation, as_risk
from offmap.model.select import choose, stack_models
from offmap.posterior.construct import Observed, observe
from offmap.posterior.distribution import WeightDistribution
from offmap.posterior.predictive import Stochastic
from offmap.posterior.protocol import Runtime, override
from offmap_bench.runner.context import BATCH, FitContext, likelihood_of
from offmap_bench.runner.plan import Cell, digest
from offmap_bench.runner.pretrained import maxwent_settings
from offmap_bench.runner.store import settings_of, short
from offmap_bench.tasks.catalog import task as task_of
from offmap_bench.tasks.task import Task

logger = logging.getLogger("offmap")

Seen = TypeVar("Seen")

LOOKS, ROWS = 100, 500
"""Looks at detection in one fit, at the most, and rows of each set that they take."""


@dataclass(frozen=True)
class Watched(Validation):
    """Validation that shows the distribution to someone whenever the fit looks at its risk."""

    watch: Callable[[WeightDistribution], None] = field(default=lambda q: None, compare=False)

    def look(self, q: WeightDistribution) -> tuple[Tensor, Tensor]:
        """The risk and the uncertainty, as ever."""
        self.watch(q)
        return super().look(q)


@dataclass(frozen=True)
class Course(Generic[Seen]):
    """A fitted distribution, and what was seen of it on the way, [(step, what)]."""

    fitted: Stochastic
    seen: list[tuple[int, Seen]]


def course(
    nets: Sequence[nn.Module],
    task: Task,
    config: maxwent.Config,
    seed: int,
    look: Callable[[Stochastic], Seen],
    *,
    batch_size: int = BATCH,
) -> Course[Seen]:
    """Fit as `maxwent.fit` does, with one λ, and look at every check and at the start."""
    place, runtime = Place.of(nets[0]), Runtime(progress=False)
    train = as_batches(task.train, place, name="train", batch_size=batch_size)
    held = load_rows(as_batches(task.valid, place, name="valid"))
    law = likelihood_of(task, nets[0])
    at = choose(stack_models(nets), held.inputs, config.params, runtime.output_fn)
    model = runtime.model(at.net, at.mean | at.fixed, held.inputs)
    needed, rotated = config.basis == "svd" or config.solver != "sgd", config.basis == "svd"
    seen = observe(at, lambda rows: (x for x, _ in train), rotated=rotated) if needed else Observed()
    found: list[Seen] = []
    seeing = torch.no_grad()(look)
    validation = Watched(
        model,
        law,
        held,
        as_risk(config.risk),
        config.risk_draws,
        seed,
        watch=lambda q: found.append(seeing(Stochastic(model, q))),
    )
    if config.clip_loss and config.max_risk is None:
        validation = validation.bounded(at.mean | at.fixed)
    (one,) = maxwent.several(config.entropy_weight)
    prepared = maxwent.Task(at, model, train, law, replace(config, entropy_weight=one), validation, seen, seed, runtime)
    q, history = maxwent.SOLVERS[config.solver](prepared)
    q.requires_grad_(False)
    if not found:  # a closed form is sought by looks at parts of it
        validation.look(q)
    # the start may have been looked at several times, every check once
    return Course(Stochastic(model, q, history), list(zip(history.step, found[-len(history.step) :], strict=True)))


@dataclass(frozen=True)
class Trace:
    """The course of one fit of one net: at every step, AUROC and FPR@95 (None between looks), loss, validation risk, entropy."""

    step: Sequence[int]
    loss: Sequence[float | None]
    risk: Sequence[float | None]
    entropy: Sequence[float | None]
    auroc: Sequence[float | None]
    fpr95: Sequence[float | None]
    threshold: float
    kept: int


def traced(cell: Cell, folder: Path) -> Trace:
    """The trace of a cell's fit for its first net, read from `folder`/traces if it was made before."""
    path = folder / "traces" / f"{cell.hash}-{digest(settings_of(cell))}.json"
    known = _known(path)
    if known is not None:
        return known
    task = task_of(cell.task, cell.seed)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        made = trace(cell, task)
    finally:
        torch.set_num_threads(threads)
    told = short(asdict(made))
    write_whole(path, (json.dumps({**told, "checksum": digest(told)}) + "\n").encode())
    return made


def _known(path: Path) -> Trace | None:
    """What was kept; None when there is nothing, or when the file is damaged, said so. Older ones have no checksum."""
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
        if told.pop("checksum", None) not in (None, digest(told)):
            raise ValueError("its checksum does not fit")
        return Trace(**told)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, AttributeError) as error:
        logger.warning("The trace at %s cannot be read (%s) and is made again.", path, error)
        return None


def trace(cell: Cell, task: Task) -> Trace:
    """Fit the first of the cell's models, and look at its detection a hundred times."""
    net = FitContext.of(task, cell.seed, cell.source).models().nets[0]
    known = {name: value for name, value in maxwent_settings(cell.config).items() if name in maxwent.Config.__dataclass_fields__}
    config = override(maxwent.Config(), known)
    every, count = max(1, config.steps // config.check_every // LOOKS), [0]
    law = likelihood_of(task, net)

    def look(predictive: Stochastic) -> tuple[float, float] | None:
        count[0] += 1
        return told_apart(predictive, law, task, cell.seed) if count[0] % every == 1 or every == 1 else None

    watched = course([net], task, config, cell.seed, look, batch_size=cell.config.get("batch_size", BATCH))
    history = watched.fitted.history
    pairs = [seen for _, seen in watched.seen]
    return Trace(
        history.step, history.loss, [r[0] for r in history.risk], [e[0] for e in history.entropy],
        [p and p[0] for p in pairs], [p and p[1] for p in pairs], history.max_risk[0], history.kept[0],
    )  # fmt: skip


def told_apart(predictive: Stochastic, law: Likelihood, task: Task, seed: int, draws: int = 50) -> tuple[float, float]:
    """AUROC and FPR@95 of the paper's score, on the first rows of the test data and of the first OOD set."""
    strange = next(iter(task.ood.values()))
    familiar, odd = (
        law.score(predictive.outputs(x[:ROWS], draws, clip=None, seed=seed)).nan_to_num(nan=torch.inf, posinf=torch.inf)
        for x in (task.test[0], strange)
    )
    found = measure_separation(familiar, odd)
    return found["auroc"], found["fpr95"]
