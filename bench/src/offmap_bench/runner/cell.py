"""Run one cell to its record: fit, or take the fit of the cell before, then score."""

from __future__ import annotations

import logging
import math
import sys
import time
import traceback
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from offmap._version import __version__
from offmap.data import as_batches, load_rows
from offmap.evaluation import evaluate
from offmap.fit import guard
from offmap.guard import Guard
from offmap.model.forward import LRUCache
from offmap.posterior.predictive import CachedPredictive, Member, Predictive, Scorer
from offmap_bench.runner.calibration import regression_measures
from offmap_bench.runner.context import SCORING, FitContext, Fitted
from offmap_bench.runner.methods import METHODS
from offmap_bench.runner.plan import Cell, Settings
from offmap_bench.runner.store import Record, settings_of
from offmap_bench.tasks.catalog import task as task_of
from offmap_bench.tasks.task import Pair, Task

MEASURES = (
    "auroc", "fpr95", "aupr_in", "aupr_out", "nll", "rmse", "accuracy", "ece", "coverage", "width", "wide_nll", "wide_rmse",
    "wide_ece", "wide_coverage", "wide_width", "conformal_coverage", "conformal_width",
)  # fmt: skip
"""What a record keeps of an evaluation."""


@dataclass
class Bench:
    """Runs cells one after another; keeps the last task, and the last fit or its error, with its warnings."""

    _task: tuple[Any, Task] | None = None
    _fit: tuple[str, Fitted | Exception, list[str]] | None = None

    def run(self, cell: Cell) -> Record:
        """The cell's record; an error is part of it."""
        versions = {"offmap": __version__, "torch": str(torch.__version__)}
        record = Record(cell.as_dict(), "failed", settings_of(cell), versions=versions, threads=torch.get_num_threads())
        with captured_warnings() as warnings:
            try:
                task = self.task(cell)
                fitted = self.fitted(cell, task, warnings)
                begin = time.perf_counter()
                metrics, chosen = measure(cell, task, fitted)
                seconds = {"fit": fitted.seconds, "score": time.perf_counter() - begin}
                seconds |= {} if fitted.thousand is None else {"thousand": fitted.thousand}
            except Exception as error:  # one cell never loses the others
                return replace(record, warnings=warnings, traceback="".join(traceback.format_exception(error)))
        return replace(
            record, status="ok", metrics=metrics, chosen=chosen, seconds=seconds, steps=fitted.steps, warnings=warnings
        )

    def task(self, cell: Cell) -> Task:
        """The cell's task, read again only when it is another one."""
        if self._task is None or self._task[0] != (cell.task, cell.seed):
            self._task = (cell.task, cell.seed), task_of(cell.task, cell.seed)
        return self._task[1]

    def fitted(self, cell: Cell, task: Task, warnings: list[str]) -> Fitted:
        """The cell's fit; cells that share a fit share its error and its warnings."""
        key = cell.hash if METHODS[cell.method].scores_only else cell.fit_key
        if self._fit is None or self._fit[0] != key:
            self._fit = None  # free the memory of the last fit first
            with captured_warnings() as messages:
                try:
                    fitted = fit_cell(cell, task)
                except Exception as error:
                    fitted = error
            self._fit = key, fitted, messages
        warnings += self._fit[2]
        if isinstance(self._fit[1], Exception):
            raise self._fit[1]
        return self._fit[1]


def fit_cell(cell: Cell, task: Task) -> Fitted:
    """The fit of lowest validation risk among the candidates of the grid; without a grid there is one."""
    method, context, choices = METHODS[cell.method], FitContext(task, cell.seed, cell.source), cell.candidates()
    if not method.scores_only:
        warm_up()
    if cell.grid and method.fit_grid is not None and set(cell.grid) <= method.stacks:
        fits = method.fit_grid(context, cell.fit_config, choices)
    else:
        config = cell.config if method.scores_only else cell.fit_config
        fits = [method.fit(context, {**config, **choice}) for choice in choices]
        fits = [replace(fit, chosen={**fit.chosen, **choice}) for fit, choice in zip(fits, choices, strict=True)]
    fits = [
        f if f.predictive is None else replace(f, predictive=CachedPredictive(f.predictive, LRUCache(sys.maxsize))) for f in fits
    ]
    risks = [validation_risk(fit, task, cell) if len(fits) > 1 else 0.0 for fit in fits]
    return replace(fits[risks.index(min(risks))], seconds=sum(fit.seconds for fit in fits))


def warm_up() -> None:
    """Take the first step of an optimiser, which imports half of torch: that is not the first method's time."""
    weight = torch.zeros(1, requires_grad=True, device="cpu")
    weight.sum().backward()
    torch.optim.Adam([weight]).step()


def validation_risk(fitted: Fitted, task: Task, cell: Cell) -> float:
    """Mean NLL of the prediction on the validation data; infinite where it is not a number, or nothing is predicted."""
    if fitted.predictive is None:
        return math.inf
    risk = valid_nll(build_guard(fitted.predictive, fitted, task, cell), task)
    return math.inf if math.isnan(risk) else risk


def valid_nll(guard: Guard, task: Task) -> float:
    """Mean NLL of the clipped prediction on the validation data."""
    return float(guard.sampler.nll(load_rows(as_batches(task.valid, guard.place, name="valid")), guard.clip).mean())


def build_guard(predictive: Predictive, fitted: Fitted, task: Task, cell: Cell) -> Guard:
    """A guard of the fit, or of one member of it, with the cell's score and draws."""
    options = {key: cell.config[key] for key in SCORING if key in cell.config}
    return guard(predictive, task.valid, train=task.train, likelihood=fitted.likelihood, seed=cell.seed, **options)


def measure(cell: Cell, task: Task, fitted: Fitted) -> tuple[dict[str, dict[str, Any]], Settings]:
    """Metrics {set: {name: value}}, averaged over the members when each is alone; and what was chosen."""
    if fitted.predictive is None:
        assert fitted.scorer is not None
        return average_members([metrics_of(fitted.scorer, task)], task), fitted.chosen
    views: Sequence[Predictive] = [fitted.predictive]
    if cell.members == 1:
        views = [Member(fitted.predictive, index) for index in range(fitted.predictive.members)]
    guards = [build_guard(view, fitted, task, cell) for view in views]
    return average_members([metrics_of(g, task) for g in guards], task), {**fitted.chosen, "clip": [g.clip for g in guards]}


def metrics_of(scorer: Scorer, task: Task) -> dict[str, dict[str, float]]:
    """Metrics of one scorer on the test data and on every OOD set; infinite intervals and thresholds give NaN.

    The set "valid" holds the NLL of the validation data, by which the clip was chosen.
    """
    evaluation = evaluate({"it": scorer}, task.test, task.ood)
    metrics: dict[str, dict[str, float]] = {"test": {}}
    for row in evaluation.rows:
        metrics.setdefault(row["set"], {}).update({name: row[name] for name in MEASURES if name in row})
    if isinstance(scorer, Guard):
        for name, scores in evaluation.scores["it"].items():
            share = float((scores > scorer.threshold).float().mean())
            metrics[name]["false_alarms" if name == "test" else "flagged"] = (
                share if math.isfinite(scorer.threshold) else math.nan
            )
        if not math.isfinite(metrics["test"].get("conformal_width", 0.0)):
            metrics["test"] |= {"conformal_coverage": math.nan, "conformal_width": math.nan}
        metrics["test"] |= regression_measures(scorer, task)
        metrics["valid"] = {"nll": valid_nll(scorer, task)}
    elif (share := accuracy(scorer, task.test)) is not None:
        metrics["test"]["accuracy"] = share
    return metrics


def accuracy(scorer: Scorer, rows: Pair) -> float | None:
    """The share of right classes; None if it predicts none."""
    predict = getattr(scorer, "predict", None)
    label = None if predict is None else predict(rows[0]).label
    return None if label is None else float((label == rows[1]).double().mean())


def average_members(parts: Sequence[Mapping[str, Mapping[str, float]]], task: Task) -> dict[str, dict[str, Any]]:
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


class Collector(logging.Handler):
    """Collects warnings, each once."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Collect one."""
        if record.getMessage() not in self.messages:
            self.messages.append(record.getMessage())


@contextmanager
def captured_warnings() -> Generator[list[str]]:
    """Collect the warnings of the library instead of printing them: they go into the record."""
    logger, handler = logging.getLogger("offmap"), Collector()
    before = logger.handlers, logger.propagate
    logger.handlers, logger.propagate = [handler], False
    try:
        yield handler.messages
    finally:
        logger.handlers, logger.propagate = before
