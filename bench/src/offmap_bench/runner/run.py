"""Run what a store lacks, cell by cell: resumable, and one failed cell never loses the others."""

from __future__ import annotations

import logging
import math
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from statistics import NormalDist
from typing import Any, Literal

import torch

from offmap import Guard, __version__, conformal, evaluate, guard
from offmap.data import as_batches, load_rows
from offmap.distributed.jobs import Pool
from offmap.errors import ConfigError
from offmap.metrics import coverage, ence, mean_width, quantile_ece
from offmap.model.forward import LRUCache
from offmap.posterior.predictive import CachedPredictive, Predictive, Scorer
from offmap_bench.runner.methods import SCORING, FitContext, Fitted, Member, candidates
from offmap_bench.runner.plan import METHODS, Cell, Settings
from offmap_bench.runner.store import Record, code_digest, read_records, set_damaged_aside, settings_of, write_records
from offmap_bench.tasks.catalog import task as task_of
from offmap_bench.tasks.task import Task

MEASURES = (
    "auroc", "fpr95", "aupr_in", "aupr_out", "nll", "rmse", "accuracy", "ece", "coverage", "width", "wide_nll", "wide_rmse",
    "wide_ece", "wide_coverage", "wide_width", "conformal_coverage", "conformal_width",
)  # fmt: skip
"""What a record keeps of an evaluation."""


@dataclass(frozen=True)
class Event:
    """What happens to a cell: it begins, is done or fails, or its record was there before."""

    kind: Literal["begin", "done", "failed", "before"]
    cell: Cell


Report = Callable[[Event], None]


@dataclass(frozen=True)
class Outcome:
    """How many cells a run found done and finished; why others failed, {reason: cells}; and the damaged lines that it set aside,
    {name: what is wrong, and where the line is now}.
    """

    before: int
    done: int
    failures: dict[str, int]
    damaged: dict[str, str]

    @property
    def failed(self) -> int:
        return sum(self.failures.values())


def run(
    cells: Sequence[Cell], path: Path, *, jobs: int = 1, pool: Pool | None = None, report: Report = lambda event: None,
    again: bool = False,
) -> Outcome:  # fmt: skip
    """Run the cells whose record is missing, failed, damaged or stale, in local processes or by a pool.

    Cells of one task and seed run in one process: they share base models, and some a fit. A record is written as soon as its
    cell ends. Damaged lines are moved to another file, never deleted. With `again`, cells whose record is of other code are run
    too, until all are of this code.
    """
    pool, path, ended = pool or Pool(workers=jobs), path.absolute(), set[str]()
    damaged, records = set_damaged_aside(path), read_records(path)
    states = {cell.hash: "other" if again and records.code(cell) != code_digest() else records.state(cell) for cell in cells}
    lacking = [cell for cell in cells if states[cell.hash] != "ok"]

    def report_once(_: int, event: Event) -> None:
        """Report the end of each cell once, also where a group was run again."""
        if event.cell.hash not in ended:
            report(event)
        if event.kind != "begin":
            ended.add(event.cell.hash)

    for cell in cells:
        if states[cell.hash] == "ok":
            report(Event("before", cell))
    groups = [list(group) for _, group in groupby(lacking, key=lambda cell: (cell.task, cell.seed))]
    work = [(run_group, (group, path, {cell.hash: records.records.get(cell.hash) for cell in group})) for group in groups]
    reasons = pool.run_jobs(work, report=report_once)
    failures = dict(Counter(reason for group in reasons for reason in group))
    return Outcome(len(cells) - len(lacking), len(lacking) - sum(failures.values()), failures, damaged)


def run_group(cells: Sequence[Cell], path: Path, before: Mapping[str, Record | None], *, report: Report) -> list[str]:
    """Run cells one after another, and return why some failed.

    `before` are their records when the run began. A record that differs by now is of a worker that wrote it and died later.
    """
    written, bench, failures = read_records(path).records, Bench(), list[str]()
    for cell in cells:
        record = written.get(cell.hash)
        if record is None or record == before[cell.hash]:
            report(Event("begin", cell))
            with single_thread():
                record = bench.run(cell)
            write_records(path, record)
        if record.status == "failed":
            failures.append(record.reason)
        report(Event("done" if record.status == "ok" else "failed", cell))
    return failures


@dataclass
class Bench:
    """Runs cells one after another; keeps the last task, and the last fit or its error, with its warnings."""

    _task: tuple[Any, Task] | None = None
    _fit: tuple[str, Fitted | Exception, list[str]] | None = None

    def run(self, cell: Cell) -> Record:
        """Return the cell's record; an error is part of it."""
        versions = {"offmap": __version__, "torch": str(torch.__version__), "code": code_digest()}
        record = Record(cell.as_dict(), "failed", settings_of(cell), versions=versions, threads=torch.get_num_threads())
        with captured_warnings() as warnings:
            try:
                if self._task is None or self._task[0] != (cell.task, cell.seed):
                    self._task = (cell.task, cell.seed), task_of(cell.task, cell.seed)
                task = self._task[1]
                fitted = self.share_fit(cell, task, warnings)
                begin = time.perf_counter()
                metrics, chosen = measure(cell, task, fitted)
                seconds = {"fit": fitted.seconds, "score": time.perf_counter() - begin}
                seconds |= {} if fitted.thousand is None else {"thousand": fitted.thousand}
            except Exception as error:  # one cell never loses the others
                return replace(record, warnings=warnings, traceback="".join(traceback.format_exception(error)))
        done = {"metrics": metrics, "chosen": chosen, "seconds": seconds, "steps": fitted.steps, "warnings": warnings}
        return replace(record, status="ok", **done)

    def share_fit(self, cell: Cell, task: Task, warnings: list[str]) -> Fitted:
        """Return the cell's fit; cells that share a fit share its error and its warnings."""
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
    """Return the fit of lowest validation risk among the candidates of the grid; without a grid there is one."""
    method, context, choices = METHODS[cell.method], FitContext(task, cell.seed, cell.source), candidates(cell.grid)
    if not method.scores_only:
        warm_up()
    if cell.grid and method.fit_grid is not None and set(cell.grid) <= method.stacks:
        fits = method.fit_grid(context, cell.fit_config, choices)
    else:
        config = cell.config if method.scores_only else cell.fit_config
        fits = [method.fit(context, {**config, **choice}) for choice in choices]
        fits = [replace(fit, chosen={**fit.chosen, **choice}) for fit, choice in zip(fits, choices, strict=True)]
    fits = [replace(f, predictive=f.predictive and CachedPredictive(f.predictive, LRUCache(sys.maxsize))) for f in fits]
    if not method.scores_only and fits[0].predictive is None and (cell.grid or "score" in cell.config):
        words = f"neither `grid` nor `score` of {cell.method!r}"
        raise ConfigError(f"Expected {words}, which returns a {type(fits[0].scorer).__name__} with a score of its own.")
    risks = [validation_risk(fit, task, cell) if len(fits) > 1 else 0.0 for fit in fits]
    return replace(fits[risks.index(min(risks))], seconds=sum(fit.seconds for fit in fits))


def warm_up() -> None:
    """Take the first step of an optimiser, which imports half of torch: that is not the first method's time."""
    weight = torch.zeros(1, requires_grad=True, device="cpu")
    weight.sum().backward()
    torch.optim.Adam([weight]).step()


def validation_risk(fitted: Fitted, task: Task, cell: Cell) -> float:
    """Return the mean NLL of the prediction on the validation data; infinite where it is no number, or nothing is predicted."""
    risk = math.inf if fitted.predictive is None else valid_nll(build_guard(fitted.predictive, fitted, task, cell), task)
    return math.inf if math.isnan(risk) else risk


def valid_nll(guard: Guard, task: Task) -> float:
    """Return the mean NLL of the clipped prediction on the validation data."""
    return float(guard.sampler.nll(load_rows(as_batches(task.valid, guard.place, name="valid")), guard.clip).mean())


def build_guard(predictive: Predictive, fitted: Fitted, task: Task, cell: Cell) -> Guard:
    """Return a guard of the fit, or of one member of it, with the cell's score and draws."""
    options: dict[str, Any] = {"score": "paper"} if METHODS[cell.method].score == "own" else {}
    options |= {key: cell.config[key] for key in SCORING if key in cell.config}
    return guard(predictive, task.valid, train=task.train, likelihood=fitted.likelihood, seed=cell.seed, **options)


def measure(cell: Cell, task: Task, fitted: Fitted) -> tuple[dict[str, dict[str, Any]], Settings]:
    """Return metrics {set: {name: value}}, averaged over the members when each is alone; and what was chosen."""
    if fitted.predictive is None:
        assert fitted.scorer is not None
        own_measure = METHODS[cell.method].measure
        if own_measure is not None:
            return own_measure(FitContext(task, cell.seed, cell.source), fitted.scorer), fitted.chosen
        return average_members([metrics_of(fitted.scorer, task)], task), fitted.chosen
    views: Sequence[Predictive] = [fitted.predictive]
    if cell.members == 1:
        views = [Member(fitted.predictive, index) for index in range(fitted.predictive.members)]
    guards = [build_guard(view, fitted, task, cell) for view in views]
    return average_members([metrics_of(g, task) for g in guards], task), {**fitted.chosen, "clip": [g.clip for g in guards]}


def metrics_of(scorer: Scorer, task: Task) -> dict[str, dict[str, float]]:
    """Return metrics of one scorer on the test data and on every OOD set; infinite intervals and thresholds give NaN.

    The set "valid" holds the NLL of the validation data, by which the clip was chosen.
    """
    evaluation = evaluate({"it": scorer}, task.test, task.ood)
    metrics: dict[str, dict[str, float]] = {"test": {}}
    for row in evaluation.rows:
        metrics.setdefault(row["set"], {}).update({name: row[name] for name in MEASURES if name in row})
    if isinstance(scorer, Guard):
        for name, scores in evaluation.scores["it"].items():
            share = float((scores > scorer.threshold).float().mean()) if math.isfinite(scorer.threshold) else math.nan
            metrics[name]["false_alarms" if name == "test" else "flagged"] = share
        if not math.isfinite(metrics["test"].get("conformal_width", 0.0)):
            metrics["test"] |= {"conformal_coverage": math.nan, "conformal_width": math.nan}
        metrics["test"] |= regression_measures(scorer, task)
        metrics["valid"] = {"nll": valid_nll(scorer, task)}
    elif (predict := getattr(scorer, "predict", None)) and (label := predict(task.test[0]).label) is not None:
        metrics["test"]["accuracy"] = float((label == task.test[1]).double().mean())
    return metrics


def average_members(parts: Sequence[Mapping[str, Mapping[str, float]]], task: Task) -> dict[str, dict[str, Any]]:
    """Return the mean over members. A number that is not finite for one has no mean: null, and `not_finite` counts them."""
    result: dict[str, dict[str, Any]] = {}
    for name, first in parts[0].items():
        values = {measure: [part[name][measure] for part in parts] for measure in first}
        not_finite = {measure: sum(not math.isfinite(v) for v in numbers) for measure, numbers in values.items()}
        result[name] = {m: None if not_finite[m] else math.fsum(numbers) / len(numbers) for m, numbers in values.items()}
        if any(not_finite.values()):
            result[name]["not_finite"] = {measure: count for measure, count in not_finite.items() if count}
    result["test"]["valid_rows"] = len(task.valid[1])
    return result


def regression_measures(guard: Guard, task: Task) -> dict[str, float]:
    """Return calibration errors, coverages and widths at 95 % on the test data; those of unclipped draws begin with `wide_`.

    `ence` is Levi's; `reference_ece` takes the *variance* for the scale. `raw_…` are table 3 as the paper's authors' code
    computes it, which depends on the unit of y and does not judge calibration: of raw targets, the NLL without ½·log 2π, and
    with the variance for the scale the ECE and the coverage of an interval of 99 %. `conformal` intervals have the rank
    ⌈0.95·(n + 1)⌉ of n validation rows, infinite below 19 of them; `calibrated` ones the empirical 95 % quantile, which
    exists for any n and promises nothing. Numbers are NaN where draws overflow or agree to the last digit, and where an
    interval is infinite.
    """
    result: dict[str, float] = {}
    for prefix, clip in (("", "chosen"), ("wide_", None)):
        test, valid = (guard.predict(part[0], clip=clip) for part in (task.test, task.valid))  # pyright: ignore
        if test.mean is None or test.std is None:
            return {}
        residuals = guard.likelihood.residual(valid, task.valid[1]).flatten()
        mean, std, y = (t.flatten().double() for t in (test.mean, test.std, task.test[1]))
        measures: dict[str, Any] = dict.fromkeys(("ence", "reference_ece", "raw_nll", "raw_ece", "raw_coverage"), math.nan)
        if bool(mean.isfinite().all() and std.square().isfinite().all() and (std > 0).all()):
            measures = {"ence": ence(mean, std, y, bins=min(10, len(y))), "reference_ece": quantile_ece(mean, std.square(), y)}
            error, variance = (y - mean) * task.unit, (std * task.unit).square()
            measures["raw_nll"] = 0.5 * (variance.log() + error.square() / variance).mean()
            measures["raw_ece"] = quantile_ece(torch.zeros_like(error), variance, error)
            measures["raw_coverage"] = (error.abs() <= NormalDist().inv_cdf(0.995) * variance).double().mean()
        for name, factor in (("conformal", conformal.quantile(residuals, 0.95)), ("calibrated", residuals.quantile(0.95))):
            radius = (factor * test.std).flatten()
            lower, upper = ((test.mean.flatten() + side * radius) for side in (-1, 1))
            finite = bool(torch.isfinite(radius).all() and torch.isfinite(test.mean).all())
            measures[f"{name}_coverage"] = coverage(lower, upper, task.test[1].flatten().to(lower)) if finite else math.nan
            measures[f"{name}_width"] = mean_width(lower, upper) if finite else math.nan
        result |= {f"{prefix}{name}": float(value) for name, value in measures.items()}
    return result


@contextmanager
def single_thread() -> Generator[None]:
    """Compute with one thread: small tensors run slower on two."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def captured_warnings() -> Generator[list[str]]:
    """Collect the warnings of the library, each once, instead of printing them: they go into the record."""
    logger, handler, messages = logging.getLogger("offmap"), logging.Handler(logging.WARNING), list[str]()
    handler.emit = lambda record: messages.append(m) if (m := record.getMessage()) not in messages else None
    before = logger.handlers, logger.propagate
    logger.handlers, logger.propagate = [handler], False
    try:
        yield messages
    finally:
        logger.handlers, logger.propagate = before
