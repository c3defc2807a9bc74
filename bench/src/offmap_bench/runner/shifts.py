"""Methods on tasks with natural shifts, all around the same trained model: guards, post-hoc detectors and plain baselines."""

from __future__ import annotations

import math
from functools import lru_cache
from statistics import fmean
from typing import Any

from torch import Tensor, nn

from offmap import Guard, Scorer, conformal, fit
from offmap.assessment import can_assess
from offmap.checks import integer, one_of
from offmap.detectors.posthoc import DETECTORS, FitData, find_method, prepare_fit_data
from offmap.evaluation import measure_separation
from offmap.maxwent import config as maxwent
from offmap.metrics import aurc, auroc
from offmap_bench.detectors.estimators import isolation_forest
from offmap_bench.detectors.hidden import nearest_features, nearest_inputs, run_model
from offmap_bench.runner.images import fit_on, time_scoring, time_work
from offmap_bench.runner.methods import FitContext, Fitted, Method, Settings, config_keys, config_of, fill_defaults, without
from offmap_bench.runner.shift_models import load_model
from offmap_bench.tasks.task import Task

SPACES = ("inputs", "features")


@lru_cache(maxsize=1)  # methods of one task come one after another
def model_of(task: Task, seed: int) -> nn.Module:
    return load_model(task, seed)


@lru_cache(maxsize=1)
def pass_over(task: Task, seed: int) -> tuple[FitData, float]:
    """Return the pass of the task's model, which detectors share, and the seconds it took."""
    model = model_of(task, seed)
    return time_work(lambda: prepare_fit_data(model, task.train, task.valid, seed=seed))


def fit_guard(context: FitContext, settings: Settings) -> Fitted:
    """Fit a guard around the model as a user would."""
    task, model = context.task, model_of(context.task, context.seed)
    options: dict[str, Any] = {"likelihood": task.likelihood, "seed": context.seed, "progress": False, **settings}
    guard, seconds = time_work(lambda: fit(model, task.train, task.valid, **options))
    steps = max(guard.history.step, default=0)
    return time_scoring(guard, task, seconds, steps=steps, chosen={"assessed": assess(guard)})


def assess(guard: Guard) -> dict[str, Any]:
    """Return what a guard says of its own detection, which its record keeps as `chosen.assessed`; nothing of other scores."""
    if not can_assess(guard):
        return {}
    assessment = guard.assess()
    kinds = {kind: fmean(shift.auroc for shift in shifts) for kind, shifts in assessment.kinds().items()}
    return {"auroc": assessment.auroc, "kinds": kinds, "weights": dict(assessment.weights), "errors": dict(assessment.errors)}


def fit_detector(context: FitContext, settings: Settings) -> Fitted:
    """Fit a post-hoc detector; its seconds are those of the pass, which others share, and its own."""
    return fit_on(*pass_over(context.task, context.seed), context.task, settings)


def fit_nearest(context: FitContext, settings: Settings) -> Fitted:
    """Measure the distance to the k-th nearest training row, in inputs or in the features before the last layer."""
    x, k = context.task.train[0], settings.get("k", 1)
    if settings.get("space", SPACES[0]) == "inputs":
        scorer, seconds = time_work(lambda: nearest_inputs(x, k=k))
    else:
        scorer, seconds = time_work(lambda: nearest_features(model_of(context.task, context.seed), x, k=k))
    return time_scoring(scorer, context.task, seconds)


def fit_forest(context: FitContext, settings: Settings) -> Fitted:
    """Fit an isolation forest to the training inputs."""
    forest, seconds = time_work(lambda: isolation_forest(context.task.train[0], seed=context.seed, **settings))
    return time_scoring(forest, context.task, seconds)


# ------------------------------------------------------------------------------------------------ what is recorded


def measure_shift(context: FitContext, scorer: Scorer) -> dict[str, dict[str, Any]]:
    """Measure a scorer on every OOD set, with the AUROC of each term of its score, and its threshold on in-distribution rows.

    The set "test" holds the share of rows above the threshold (`false_alarms`), the mean loss of the model on all rows and on
    those that are not flagged, and the area under the risk-coverage curve (`aurc`). A loss is 1 for a wrong class, else 0; in a
    regression, the squared error. A scorer without a threshold gets the conformal one of 5 % on validation rows; below 19 of
    them it is infinite, and what it flags is NaN.
    """
    task = context.task
    sets = {"test": task.test[0], **task.ood}
    scores = {name: scorer.score(x) for name, x in sets.items()}
    terms = {name: scorer.terms(x) for name, x in sets.items()} if isinstance(scorer, Guard) else {}
    metrics: dict[str, dict[str, Any]] = {"test": measure_threshold(context, scorer, scores["test"])}
    for name in task.ood:
        metrics[name] = {**measure_separation(scores["test"], scores[name])}
        if terms:
            metrics[name]["terms"] = {term: float(auroc(terms["test"][term], terms[name][term])) for term in terms["test"]}
    return metrics


def measure_threshold(context: FitContext, scorer: Scorer, scores: Tensor) -> dict[str, float]:
    """Measure what a threshold and a ranking do for the test rows, by their scores, (n,)."""
    task, losses = context.task, losses_of(context.task, context.seed)
    threshold: float | None = getattr(scorer, "threshold", None)
    if threshold is None:
        threshold = float(conformal.quantile(scorer.score(task.valid[0]), 0.95))
    kept = scores <= threshold
    measures = {"false_alarms": math.nan, "loss_unflagged": math.nan}  # of an infinite threshold, which never flags
    if math.isfinite(threshold):
        measures = {"false_alarms": 1 - float(kept.double().mean()), "loss_unflagged": float(losses[kept].mean())}
    measures |= {"loss": float(losses.mean()), "aurc": float(aurc(scores, losses))}
    measures["valid_rows"] = len(task.valid[1])
    return measures | ({"rmse": float(losses.mean().sqrt())} if is_regression(task) else {"accuracy": 1 - float(losses.mean())})


@lru_cache(maxsize=1)
def losses_of(task: Task, seed: int) -> Tensor:
    """Return the losses of the task's model on its test rows, (n,)."""
    outputs, y = run_model(model_of(task, seed), task.test[0]), task.test[1]
    return ((outputs[:, 0] - y.flatten()).square() if is_regression(task) else outputs.argmax(1) != y).double()


def is_regression(task: Task) -> bool:
    return task.likelihood == "gaussian"


# ------------------------------------------------------------------------------------------------ what a plan may say


def guard_settings(settings: Settings) -> dict[str, Any]:
    """Return a guard's settings with defaults filled in, refused if they are impossible."""
    return fill_defaults(config_of(maxwent, settings, "config", maxwent.CONFIGS), settings)


def detector_settings(settings: Settings) -> dict[str, Any]:
    find_method(str(settings.get("method")), without(settings, "method"))
    return dict(settings)


def nearest_settings(settings: Settings) -> dict[str, Any]:
    filled = {"k": 1, "space": SPACES[0], **settings}
    integer("k", filled["k"], 1)
    one_of("space", filled["space"], SPACES)
    return filled


GUARD_KEYS = config_keys(maxwent.Config) | {"config", "chunk_size"}
DETECTOR_KEYS = frozenset({"method"} | {option for each in DETECTORS.values() for option in each.options})

SHIFT_METHODS: dict[str, Method] = {
    "shift_guard": Method(fit_guard, guard_settings, GUARD_KEYS, scores_only=True, score="default", measure=measure_shift),
    "shift_detector": Method(fit_detector, detector_settings, DETECTOR_KEYS, scores_only=True, measure=measure_shift),
    "shift_nearest": Method(fit_nearest, nearest_settings, frozenset({"k", "space"}), scores_only=True, measure=measure_shift),
    "shift_forest": Method(fit_forest, dict, frozenset({"trees"}), scores_only=True, measure=measure_shift),
}
