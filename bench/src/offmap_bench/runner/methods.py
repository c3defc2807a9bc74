"""All methods that a plan may name: how each is fitted on a task, and what its config may say."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from statistics import fmean
from typing import Any

from offmap.detectors.input_distance import Mahalanobis, Nearest
from offmap.maxwent import solve as maxwent
from offmap.maxwent.config import CONFIGS, Runtime
from offmap.posterior.predictive import Predictive, Scorer, Stochastic
from offmap_bench.detectors.gaussian_process import gaussian_process
from offmap_bench.detectors.hidden import hidden_mahalanobis, hidden_nearest
from offmap_bench.detectors.isolation_forest import isolation_forest
from offmap_bench.methods import bnn, dare, laplace, mc_dropout, mean_field, swag
from offmap_bench.methods.laplace import Approximated
from offmap_bench.methods.variational import ABLATION
from offmap_bench.runner.base_models import ENSEMBLES, SILENT, Recipe, as_predictive, likelihood_of, prepare, trained, untrained
from offmap_bench.runner.context import (
    BASE,
    SCORING,
    FitContext,
    Fitted,
    Method,
    Settings,
    config_of,
    fill_defaults,
    recipe,
    without_scoring,
)
from offmap_bench.runner.images import IMAGE_METHODS

BATCH, HIDDEN, DROPOUT = Recipe().batch_size, Recipe().hidden, 0.1
SIZE = Recipe().members
"""How many base models are trained for every task and seed."""


def config_keys(config: type) -> frozenset[str]:
    """The settings that are fields of a config, and those of scoring; a parameterization is no word of a plan."""
    return frozenset({f.name for f in fields(config)} - {"parameterization"} | {*SCORING})


def describe_fit(predictive: Predictive) -> dict[str, Any]:
    """What a fit chose and how wide it became."""
    if isinstance(predictive, Approximated):
        return dict(predictive.chosen)
    if not isinstance(predictive, Stochastic):
        return {}
    h = predictive.history
    return {**h.chosen, "entropy": fmean(h.final_entropy), "kept": h.kept, "stop_reason": h.stop_reason}


def around_models(module: Any, *keys: str, presets: Mapping[str, Any] | None = None, **defaults: Any) -> Method:
    """A method that takes trained base models. The first of `keys` names one of the presets, the first of which is the default;
    further keys, and those with `defaults`, stand beside the fields of its config.
    """

    def read(settings: Settings) -> Any:
        return config_of(module, settings, keys[0] if presets else "", presets)

    def fit(context: FitContext, settings: Settings) -> Fitted:
        nets, config = context.models().nets, read(settings)
        rows, valid, likelihood = prepare(nets, context.task, settings.get("batch_size", BATCH))
        runtime = Runtime(progress=False, **{key: settings[key] for key in ("chunk_size", "batch_size") if key in settings})
        begin = time.perf_counter()
        made = module.fit(nets, rows, valid, likelihood=likelihood, config=config, seed=context.seed, runtime=runtime)
        seconds = time.perf_counter() - begin
        steps = max(made.history.step, default=0) if isinstance(made, Stochastic) else getattr(config, "steps", 0)
        return Fitted(made, likelihood, seconds=seconds, steps=steps, chosen=describe_fit(made))

    names = config_keys(module.Config) | {*keys, *defaults}
    return Method(fit, lambda settings: fill_defaults(read(settings), settings, **defaults), names, from_models=True)


def from_scratch(module: Any, stacks: str, *, dropout: float = 0.0) -> Method:
    """A method that trains nets of its own, all candidates of a grid in `stacks` at once, each told its share of the seconds."""

    def read(settings: Settings) -> Any:
        return config_of(module, {"dropout": dropout, **settings})

    def fit_grid(context: FitContext, settings: Settings, candidates: Sequence[Settings]) -> list[Fitted]:
        nets_of = {key: settings[key] for key in ("hidden", "batch_size") if key in settings}
        nets = untrained(context.task, context.seed, Recipe(**nets_of, dropout=dropout))
        rows, valid, likelihood = prepare([nets[0].eval(), *nets[1:]], context.task, settings.get("batch_size", BATCH))
        configs = [read({**settings, **candidate}) for candidate in candidates]
        begin = time.perf_counter()
        fits = module.fit_grid(nets, rows, valid, likelihood=likelihood, configs=configs, seed=context.seed, runtime=SILENT)
        share = (time.perf_counter() - begin) / len(fits)
        return [
            Fitted(made, likelihood, seconds=share, steps=configs[0].steps, chosen={**describe_fit(made), **candidate})
            for made, candidate in zip(fits, candidates, strict=True)
        ]

    return Method(
        lambda context, settings: fit_grid(context, settings, [{}])[0],
        lambda settings: fill_defaults(read(settings), settings, hidden=HIDDEN, batch_size=BATCH),
        config_keys(module.Config) | {"hidden", "batch_size"}, stacks=frozenset({stacks}), fit_grid=fit_grid,
    )  # fmt: skip


def ensemble(name: str) -> Method:
    """One of ENSEMBLES, whose nets are cached: its fits are those nets, nothing random; seconds are those of their training."""
    config = ENSEMBLES[name].Config

    def fit_grid(context: FitContext, settings: Settings, candidates: Sequence[Settings]) -> list[Fitted]:
        how = recipe(name, without_scoring(settings), candidates)
        made = trained(context.task, context.seed, how)
        predictive, likelihood = as_predictive(made.nets, context.task), likelihood_of(context.task, made.nets[0])
        return [Fitted(predictive, likelihood, seconds=made.seconds, steps=how.training.steps, chosen=made.chosen)]

    def settings_of(settings: Settings) -> dict[str, Any]:
        how = recipe(name, without_scoring(settings))
        return fill_defaults(how.training, settings, hidden=how.hidden, batch_size=how.batch_size)

    return Method(
        lambda context, settings: fit_grid(context, settings, [{}])[0], settings_of,
        config_keys(config) - {"draws"} | {"hidden", "batch_size"}, gives_models=True, fit_grid=fit_grid,
        stacks=config_keys(config) - config_keys(ENSEMBLES[BASE].Config),
    )  # fmt: skip


def scorer(make: Callable[..., Scorer], *keys: str, from_models: bool = False) -> Method:
    """A Scorer of the training data, made by a function of (context, **settings)."""

    def fit(context: FitContext, settings: Settings) -> Fitted:
        begin = time.perf_counter()
        made = make(context, **settings)
        return Fitted(scorer=made, seconds=time.perf_counter() - begin)

    return Method(fit, dict, frozenset(keys), from_models=from_models, scores_only=True)


METHODS: dict[str, Method] = {
    **{name: ensemble(name) for name in ENSEMBLES},
    "maxwent": around_models(maxwent, "config", "batch_size", "chunk_size", presets=CONFIGS),
    "bnn": around_models(bnn, "setting", "batch_size", presets=ABLATION),
    "dare": around_models(dare, batch_size=BATCH),
    "swag": around_models(swag, batch_size=BATCH),
    "laplace": around_models(laplace),
    "mc_dropout": from_scratch(mc_dropout, "dropout", dropout=DROPOUT),
    "mean_field": from_scratch(mean_field, "tradeoff"),
    "nearest": scorer(lambda context, **s: Nearest(context.task.train[0], **s), "k", "standardise"),
    "mahalanobis": scorer(lambda context, **s: Mahalanobis(context.task.train[0], **s), "shrinkage"),
    "hidden_nearest": scorer(
        lambda context, **s: hidden_nearest(context.models().nets[0], context.task.train[0], **s), "k", "names", from_models=True
    ),
    "hidden_mahalanobis": scorer(
        lambda context, **s: hidden_mahalanobis(context.models().nets[0], context.task.train[0], **s), "shrinkage", "names",
        from_models=True,
    ),
    "gaussian_process": scorer(lambda context, **s: gaussian_process(*context.task.train, seed=context.seed, **s), "rows"),
    "isolation_forest": scorer(lambda context, **s: isolation_forest(context.task.train[0], seed=context.seed, **s), "trees"),
    **IMAGE_METHODS,
}  # fmt: skip
