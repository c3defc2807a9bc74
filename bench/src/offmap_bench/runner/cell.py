"""One cell becomes one record: fit, or remember the fit of the cell before, then score."""

from __future__ import annotations

import logging
import math
import time
import traceback
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from offmap._version import __version__
from offmap.calibration import nll
from offmap.data import as_batches, load_rows
from offmap.evaluation import evaluate
from offmap.fit import guard
from offmap.guard import Guard
from offmap.posterior.predictive import CachedPredictive, Member
from offmap.posterior.protocol import Predictive, Scorer
from offmap_bench.runner.context import READING, FitContext, Fitted
from offmap_bench.runner.images import accuracy
from offmap_bench.runner.methods import METHODS
from offmap_bench.runner.plan import Cell, Settings
from offmap_bench.runner.quality import regression_measures
from offmap_bench.runner.store import Record, settings_of
from offmap_bench.tasks.catalog import task as task_of
from offmap_bench.tasks.task import Task

MEASURES = (
    "auroc", "fpr95", "aupr_in", "aupr_out", "nll", "rmse", "accuracy", "ece", "coverage", "width", "wide_nll", "wide_rmse",
    "wide_ece", "wide_coverage", "wide_width", "conformal_coverage", "conformal_width",
)  # fmt: skip
"""What a record keeps of an evaluation."""


@dataclass
class Bench:
    """Runs cells one after another; remembers the last task, and the last fit or how it failed, with what it warned of."""

    _task: tuple[Any, Task] | None = None
    _fit: tuple[str, Fitted | Exception, list[str]] | None = None

    def run(self, cell: Cell) -> Record:
        """The cell's record; whatever goes wrong is part of it."""
        versions = {"offmap": __version__, "torch": str(torch.__version__)}
        record = Record(cell.told(), "failed", settings_of(cell), versions=versions, threads=torch.get_num_threads())
        with heard() as warnings:
            try:
                task = self.task(cell)
                fitted = self.fitted(cell, task, warnings)
                begin = time.perf_counter()
                metrics, chosen = measured(cell, task, fitted)
                seconds = {"fit": fitted.seconds, "score": time.perf_counter() - begin}
                seconds |= {} if fitted.thousand is None else {"thousand": fitted.thousand}
            except Exception as error:  # one cell never loses the others
                return replace(record, warnings=warnings, traceback="".join(traceback.format_exception(error)))
        return replace(
            record, status="ok", metrics=metrics, chosen=chosen, seconds=seconds, steps=fitted.steps, warnings=warnings
        )

    def task(self, cell: Cell) -> Task:
        """The cell's task, read anew only when it is another one."""
        if self._task is None or self._task[0] != (cell.task, cell.seed):
            self._task = (cell.task, cell.seed), task_of(cell.task, cell.seed)
        return self._task[1]

    def fitted(self, cell: Cell, task: Task, warnings: list[str]) -> Fitted:
        """The cell's fit; a fit that failed for one cell fails for those that share it, and its warnings are theirs too."""
        key = cell.hash if METHODS[cell.method].single else cell.fit_key
        if self._fit is None or self._fit[0] != key:
            self._fit = None  # memory first: a fit remembers its outputs
            with heard() as said:
                try:
                    made = chosen_fit(cell, task)
                except Exception as error:
                    made = error
            self._fit = key, made, said
        warnings += self._fit[2]
        if isinstance(self._fit[1], Exception):
            raise self._fit[1]
        return self._fit[1]


def chosen_fit(cell: Cell, task: Task) -> Fitted:
    """The fit of lowest validation risk among the candidates of the grid; without a grid there is one."""
    method, ground = METHODS[cell.method], FitContext.of(task, cell.seed, cell.source)
    if not method.single:
        warm_up()
    if cell.grid and method.fit_grid is not None and set(cell.grid) <= method.stacks:
        made = method.fit_grid(ground, cell.fit_config, cell.candidates())
    else:
        made = [fitted_with(ground, cell, candidate) for candidate in cell.candidates()]
    fits = [replace(fit, predictive=None if fit.predictive is None else CachedPredictive(fit.predictive)) for fit in made]
    risks = [validation_risk(fit, task, cell) if len(fits) > 1 else 0.0 for fit in fits]
    return replace(fits[risks.index(min(risks))], seconds=sum(fit.seconds for fit in fits))


def fitted_with(ground: FitContext, cell: Cell, candidate: Settings) -> Fitted:
    """The fit of one candidate, which it names. One that is a scorer itself is told its score."""
    method = METHODS[cell.method]
    made = method.fit(ground, {**(cell.config if method.single else cell.fit_config), **candidate})
    return replace(made, chosen={**made.chosen, **candidate})


def validation_risk(fitted: Fitted, task: Task, cell: Cell) -> float:
    """Mean NLL of the prediction on the validation data; infinite where it is not a number, or nothing is predicted."""
    if fitted.predictive is None:
        return math.inf
    risk = valid_nll(guarded(fitted.predictive, fitted, task, cell), task)
    return math.inf if math.isnan(risk) else risk


def valid_nll(made: Guard, task: Task) -> float:
    """Mean NLL of the clipped prediction on the validation data."""
    held = load_rows(as_batches(task.valid, made.place, name="valid"))
    return float(nll(made, held, clip=made.clip).mean())


def guarded(predictive: Predictive, fitted: Fitted, task: Task, cell: Cell) -> Guard:
    """The fit, or one member of it, read as the cell's config says."""
    reading = {key: cell.config[key] for key in READING if key in cell.config}
    return guard(predictive, task.valid, train=task.train, likelihood=fitted.likelihood, seed=cell.seed, **reading)


def measured(cell: Cell, task: Task, fitted: Fitted) -> tuple[dict[str, dict[str, Any]], Settings]:
    """Metrics {set: {name: value}}, averaged over the members when each is alone; and what was chosen."""
    if fitted.predictive is None:
        assert fitted.scorer is not None
        return averaged([metrics_of(fitted.scorer, task)], task), fitted.chosen
    views: Sequence[Predictive] = [fitted.predictive]
    if cell.members == 1:
        views = [Member(fitted.predictive, index) for index in range(fitted.predictive.members)]
    guards = [guarded(view, fitted, task, cell) for view in views]
    return averaged([metrics_of(made, task) for made in guards], task), {**fitted.chosen, "clip": [made.clip for made in guards]}


def metrics_of(scorer: Scorer, task: Task) -> dict[str, dict[str, float]]:
    """How one scorer does on the test data and on every OOD set; infinite intervals and thresholds give NaN.

    The set "valid" holds the NLL of the validation data, by which the clip was chosen.
    """
    evaluation = evaluate({"it": scorer}, task.test, task.ood)
    metrics: dict[str, dict[str, float]] = {"test": {}}
    for row in evaluation.rows:
        metrics.setdefault(row["set"], {}).update({name: row[name] for name in MEASURES if name in row})
    if isinstance(scorer, Guard):
        for name, scores in evaluation.scores["it"].items():
            word = "false_alarms" if name == "test" else "flagged"
            share = float((scores > scorer.threshold).float().mean())
            metrics[name][word] = share if math.isfinite(scorer.threshold) else math.nan
        if not math.isfinite(metrics["test"].get("conformal_width", 0.0)):
            metrics["test"] |= {"conformal_coverage": math.nan, "conformal_width": math.nan}
        metrics["test"] |= regression_measures(scorer, task)
        metrics["valid"] = {"nll": valid_nll(scorer, task)}
    elif (right := accuracy(scorer, task.test)) is not None:
        metrics["test"]["accuracy"] = right
    return metrics


def averaged(parts: Sequence[Mapping[str, Mapping[str, float]]], task: Task) -> dict[str, dict[str, Any]]:
    """The mean over members. A number that is not finite for one has no mean: null, and `not_finite` counts the members."""
    result: dict[str, dict[str, Any]] = {}
    for name, first in parts[0].items():
        means = {measure: math.fsum(part[name][measure] for part in parts) / len(parts) for measure in first}
        result[name] = {measure: mean if math.isfinite(mean) else None for measure, mean in means.items()}
        lost = {m: sum(not math.isfinite(part[name][m]) for part in parts) for m in first}
        if any(lost.values()):
            result[name]["not_finite"] = {measure: count for measure, count in lost.items() if count}
    result["test"]["valid_rows"] = len(task.valid[1])
    return result


@contextmanager
def heard() -> Generator[list[str]]:
    """What the library warns of meanwhile, each once; it goes into the record instead of on the screen."""
    said: list[str] = []
    logger = logging.getLogger("offmap")
    handler = Listener(lambda text: said.append(text) if text not in said else None)
    before = logger.handlers, logger.propagate
    logger.handlers, logger.propagate = [handler], False
    try:
        yield said
    finally:
        logger.handlers, logger.propagate = before


class Listener(logging.Handler):
    """Passes messages on."""

    def __init__(self, told: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self.told = told

    def emit(self, record: logging.LogRecord) -> None:
        """Pass one on."""
        self.told(record.getMessage())


def warm_up() -> None:
    """Take the first step of an optimiser, which imports half of torch: that is not the first method's time."""
    weight = torch.zeros(1, requires_grad=True, device="cpu")
    weight.sum().backward()
    torch.optim.Adam([weight]).step()
