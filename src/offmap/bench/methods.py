"""What a plan may name: each method's keys, and how it is fitted on a task. The only place that knows them all."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields, replace
from statistics import fmean
from typing import Any, TypeVar

from offmap.bench import ensembles
from offmap.bench.fresh import DROPOUT, ensemble, fit_mc_dropout
from offmap.bench.ground import (
    HOSTS,
    READING,
    Fitted,
    Ground,
    Method,
    Settings,
    likelihood_of,
    reading,
    recipe,
    without_reading,
)
from offmap.bench.hosts import Recipe, material, plain, trained
from offmap.detectors.mahalanobis import mahalanobis
from offmap.detectors.nearest import nearest
from offmap.errors import ConfigError
from offmap.errors import nearest as nearest_word
from offmap.guarding.build import fit
from offmap.methods import bnn, dare, deep_ensemble, maxwent
from offmap.methods.protocol import Runtime, Scorer, override
from offmap.solve.monitors import History

ENSEMBLE = Recipe().members
"""How many hosts are trained for every task and seed."""

BATCH = Recipe().batch_size


def host_settings(settings: Settings) -> dict[str, Any]:
    """A config of hosts with its defaults filled in."""
    return {**asdict(recipe(without_reading(settings))), **reading(settings)}


AnyConfig = TypeVar("AnyConfig", maxwent.Config, bnn.Config)


def named(settings: Settings, key: str, presets: Mapping[str, AnyConfig], default: str) -> AnyConfig:
    """The preset that `settings[key]` names, with what else the settings say of its fields."""
    name = settings.get(key, default)
    if name not in presets:
        raise ConfigError(f"Expected `{key}` to be {nearest_word(str(name), presets)}, but got {name!r}.")
    known = {f.name for f in fields(presets[name])}
    return override(presets[name], {field: value for field, value in settings.items() if field in known})


def filled(config: maxwent.Config | bnn.Config, settings: Settings) -> dict[str, Any]:
    """Every field of the config, and what the settings say beside them."""
    # not asdict: it would copy a noise into a dict and lose its name
    own = {f.name: getattr(config, f.name) for f in fields(config)}
    return {**own, **{key: value for key, value in settings.items() if key not in own}}


def maxwent_settings(settings: Settings) -> dict[str, Any]:
    """A config of MaxWEnt with its defaults filled in, refused if it is impossible."""
    config = named(settings, "config", maxwent.CONFIGS, "default")
    maxwent.check(config)
    return filled(config, settings)


def bnn_config(settings: Settings) -> bnn.Config:
    """The setting of the paper's ablation that is named, with differences, refused if it is impossible."""
    config = named(settings, "setting", bnn.ABLATION, "svd_frozen_large")
    bnn.check(config)
    return config


def fit_deep_ensemble(ground: Ground, settings: Settings) -> Fitted:
    """The hosts as they are; seconds are those of their training, whenever it was."""
    made = trained(ground.task, ground.seed, recipe(settings))
    law = likelihood_of(ground.task, made.nets[0])
    return Fitted(plain(made.nets, ground.task), law, seconds=made.seconds, steps=recipe(settings).training.steps)


def fit_maxwent(ground: Ground, settings: Settings) -> Fitted:
    """A distribution around the hosts, through `offmap.fit`: settings are its keywords."""
    nets = ground.hosts().nets
    begin = time.perf_counter()
    guard = fit(
        nets, ground.task.train, ground.task.valid, likelihood=likelihood_of(ground.task, nets[0]), seed=ground.seed,
        progress=False, **settings,
    )  # fmt: skip
    return Fitted(
        guard.predictive, guard.likelihood, seconds=time.perf_counter() - begin, steps=max(guard.history.step, default=0),
        chosen=reached(guard.history),
    )  # fmt: skip


def reached(history: History) -> dict[str, Any]:
    """What a fit of a distribution chose, and how wide it became."""
    return {**history.chosen, "entropy": fmean(history.final_entropy), "kept": history.kept, "ending": history.ending}


def fit_bnn(ground: Ground, settings: Settings) -> Fitted:
    """A variational posterior around the hosts."""
    nets, config = ground.hosts().nets, bnn_config(settings)
    rows, held, law = material(nets, ground.task, replace(Recipe(), batch_size=settings.get("batch_size", BATCH)))
    begin = time.perf_counter()
    predictive = bnn.fit(nets, rows, held, likelihood=law, config=config, seed=ground.seed, runtime=Runtime(progress=False))
    history = predictive.history
    return Fitted(
        predictive, law, seconds=time.perf_counter() - begin, steps=max(history.step, default=0), chosen=reached(history)
    )


def fit_dare(ground: Ground, settings: Settings) -> Fitted:
    """The hosts, with weights grown as far as their loss allows."""
    nets, own = ground.hosts().nets, dare_settings(settings)
    rows, held, law = material(nets, ground.task, replace(Recipe(), batch_size=own.pop("batch_size")))
    config = dare.Config(**without_reading(own))
    begin = time.perf_counter()
    predictive = dare.fit(nets, rows, held, likelihood=law, config=config, seed=ground.seed, runtime=Runtime(progress=False))
    return Fitted(predictive, law, seconds=time.perf_counter() - begin, steps=config.steps)


def dare_settings(settings: Settings) -> dict[str, Any]:
    """A config of DARE with its defaults filled in."""
    return {**asdict(dare.Config()), "batch_size": BATCH, **settings}


def detector(make: Callable[..., Scorer]) -> Callable[[Ground, Settings], Fitted]:
    """A Scorer made of the training inputs alone."""

    def fitted(ground: Ground, settings: Settings) -> Fitted:
        begin = time.perf_counter()
        scorer = make(ground.task.train[0], **settings)
        return Fitted(scorer=scorer, seconds=time.perf_counter() - begin)

    return fitted


HOST_KEYS = frozenset({f.name for f in fields(deep_ensemble.Config)} | {"hidden", "batch_size"})
MAXWENT_KEYS = frozenset({f.name for f in fields(maxwent.Config)} - {"parameterization"} | {"config", "batch_size", "chunk_size"})
DARE_KEYS = frozenset({f.name for f in fields(dare.Config)} | {"batch_size"})
BNN_KEYS = frozenset({f.name for f in fields(bnn.Config)} | {"setting", "batch_size"})

METHODS: dict[str, Method] = {
    HOSTS: Method(fit_deep_ensemble, host_settings, HOST_KEYS | {"score"}, source=True),
    "maxwent": Method(fit_maxwent, maxwent_settings, MAXWENT_KEYS | {*READING}, hosted=True),
    "bnn": Method(fit_bnn, lambda settings: filled(bnn_config(settings), settings), BNN_KEYS | {*READING}, hosted=True),
    "mc_dropout": Method(
        lambda ground, settings: fit_mc_dropout(ground, settings)[0],
        lambda settings: host_settings({"dropout": DROPOUT, **settings}),
        HOST_KEYS | {"dropout", *READING},
        stacks=frozenset({"dropout"}),
        fit_grid=fit_mc_dropout,
    ),
    **{name: ensemble(name) for name in ensembles.ENSEMBLES},
    "dare": Method(fit_dare, dare_settings, DARE_KEYS | {"score"}, hosted=True),
    "nearest": Method(detector(nearest), dict, frozenset({"k", "standardise"}), single=True),
    "mahalanobis": Method(detector(mahalanobis), dict, frozenset({"shrinkage"}), single=True),
}
