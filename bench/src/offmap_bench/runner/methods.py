"""What a plan may name: each method's keys, and how it is fitted on a task. The only place that knows them all."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, fields
from typing import Any

from offmap.detectors.mahalanobis import mahalanobis
from offmap.detectors.nearest import nearest
from offmap.maxwent import config as maxwent
from offmap.posterior.protocol import Scorer
from offmap_bench.detectors.gaussian_process import gaussian_process
from offmap_bench.detectors.hidden import hidden_mahalanobis, hidden_nearest
from offmap_bench.detectors.isolation_forest import isolation_forest
from offmap_bench.methods import bnn, dare, deep_ensemble, laplace, mean_field, swag
from offmap_bench.runner import ensembles
from offmap_bench.runner.base_models import Recipe, plain, trained
from offmap_bench.runner.context import (
    BATCH,
    HOSTS,
    READING,
    FitContext,
    Fitted,
    Method,
    Settings,
    likelihood_of,
    reading,
    recipe,
    without_reading,
)
from offmap_bench.runner.fresh import DROPOUT, ensemble, fit_mc_dropout, fit_mean_field
from offmap_bench.runner.images import PICTURES
from offmap_bench.runner.pretrained import around_hosts, bnn_config, filled, fit_bnn, fit_maxwent, maxwent_settings, stated

ENSEMBLE = Recipe().members
"""How many models are trained for every task and seed."""


def host_settings(settings: Settings) -> dict[str, Any]:
    """A config of models with its defaults filled in."""
    return {**asdict(recipe(without_reading(settings))), **reading(settings)}


def fit_deep_ensemble(ground: FitContext, settings: Settings) -> Fitted:
    """The models as they are; seconds are those of their training, whenever it was."""
    made = trained(ground.task, ground.seed, recipe(settings))
    law = likelihood_of(ground.task, made.nets[0])
    return Fitted(plain(made.nets, ground.task), law, seconds=made.seconds, steps=recipe(settings).training.steps)


def hosted(method: Any, **beside: Any) -> Method:
    """A method around trained models with a Config of its own, and defaults of what stands beside it."""
    keys = {f.name for f in fields(method.Config)} | {*beside, *READING}
    return Method(
        around_hosts(method), lambda settings: filled(stated(method, settings), {**beside, **settings}), frozenset(keys),
        hosted=True,
    )  # fmt: skip


def detector(make: Callable[..., Scorer], *keys: str, hosted: bool = False) -> Method:
    """A Scorer made of the training data, by a function of (ground, **settings)."""

    def fitted(ground: FitContext, settings: Settings) -> Fitted:
        begin = time.perf_counter()
        scorer = make(ground, **settings)
        return Fitted(scorer=scorer, seconds=time.perf_counter() - begin)

    return Method(fitted, dict, frozenset(keys), hosted=hosted, single=True)


HOST_KEYS = frozenset({f.name for f in fields(deep_ensemble.Config)} | {"hidden", "batch_size"})
MAXWENT_KEYS = frozenset({f.name for f in fields(maxwent.Config)} - {"parameterization"} | {"config", "batch_size", "chunk_size"})
BNN_KEYS = frozenset({f.name for f in fields(bnn.Config)} | {"setting", "batch_size"})
MEAN_FIELD_KEYS = frozenset({f.name for f in fields(mean_field.Config)} | {"hidden", "batch_size"})

METHODS: dict[str, Method] = {
    HOSTS: Method(fit_deep_ensemble, host_settings, HOST_KEYS | {"score"}, source=True),
    "maxwent": Method(fit_maxwent, maxwent_settings, MAXWENT_KEYS | {*READING}, hosted=True),
    "bnn": Method(fit_bnn, lambda settings: filled(bnn_config(settings), settings), BNN_KEYS | {*READING}, hosted=True),
    "mc_dropout": Method(
        lambda ground, settings: fit_mc_dropout(ground, settings)[0],
        lambda settings: host_settings({"dropout": DROPOUT, **settings}),
        HOST_KEYS | {"dropout", *READING}, stacks=frozenset({"dropout"}), fit_grid=fit_mc_dropout,
    ),
    "mean_field": Method(
        lambda ground, settings: fit_mean_field(ground, settings)[0],
        lambda settings: filled(stated(mean_field, settings), {"hidden": Recipe().hidden, "batch_size": BATCH, **settings}),
        MEAN_FIELD_KEYS | {*READING}, stacks=frozenset({"tradeoff"}), fit_grid=fit_mean_field,
    ),
    **{name: ensemble(name) for name in ensembles.ENSEMBLES},
    "dare": hosted(dare, batch_size=BATCH),
    "swag": hosted(swag, batch_size=BATCH),
    "laplace": hosted(laplace),
    "nearest": detector(lambda ground, **s: nearest(ground.task.train[0], **s), "k", "standardise"),
    "mahalanobis": detector(lambda ground, **s: mahalanobis(ground.task.train[0], **s), "shrinkage"),
    "hidden_nearest": detector(
        lambda ground, **s: hidden_nearest(ground.models().nets[0], ground.task.train[0], **s), "k", "names", hosted=True
    ),
    "hidden_mahalanobis": detector(
        lambda ground, **s: hidden_mahalanobis(ground.models().nets[0], ground.task.train[0], **s), "shrinkage", "names",
        hosted=True,
    ),
    "gaussian_process": detector(lambda ground, **s: gaussian_process(*ground.task.train, seed=ground.seed, **s), "rows"),
    "isolation_forest": detector(lambda ground, **s: isolation_forest(ground.task.train[0], seed=ground.seed, **s), "trees"),
    **PICTURES,
}  # fmt: skip
