"""Methods that start from trained models."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from statistics import fmean
from typing import Any, TypeVar

from offmap.errors import ConfigError
from offmap.errors import nearest as nearest_word
from offmap.fit import fit
from offmap.maxwent import config as maxwent
from offmap.maxwent.monitors import History
from offmap.posterior.predictive import Stochastic
from offmap.posterior.protocol import Runtime, override
from offmap_bench.methods import bnn
from offmap_bench.runner.base_models import Recipe, material
from offmap_bench.runner.context import BATCH, FitContext, Fitted, Settings, likelihood_of

AnyConfig = TypeVar("AnyConfig", maxwent.Config, bnn.Config)


def named(settings: Settings, key: str, presets: Mapping[str, AnyConfig], default: str) -> AnyConfig:
    """The preset that `settings[key]` names, with what else the settings say of its fields."""
    name = settings.get(key, default)
    if name not in presets:
        raise ConfigError(f"Expected `{key}` to be {nearest_word(str(name), presets)}, but got {name!r}.")
    known = {f.name for f in fields(presets[name])}
    return override(presets[name], {field: value for field, value in settings.items() if field in known})


def stated(method: Any, settings: Settings) -> Any:
    """A method's Config with what the settings say of its fields, refused if it is impossible."""
    own = {f.name for f in fields(method.Config)}
    config = override(method.Config(), {key: value for key, value in settings.items() if key in own})
    method.check(config)
    return config


def filled(config: Any, settings: Settings) -> dict[str, Any]:
    """Every field of the config, and what the settings say beside them."""
    # not asdict: it would copy a noise into a dict and lose its name
    own = {f.name: getattr(config, f.name) for f in fields(config)}
    return {**own, **{key: value for key, value in settings.items() if key not in own}}


def maxwent_settings(settings: Settings) -> dict[str, Any]:
    """A config of MaxWEnt with its defaults filled in, refused if it is impossible."""
    config = named(settings, "config", maxwent.CONFIGS, "default")
    return filled(config, settings)


def bnn_config(settings: Settings) -> bnn.Config:
    """The setting of the paper's ablation that is named, with differences, refused if it is impossible."""
    config = named(settings, "setting", bnn.ABLATION, "svd_frozen_large")
    bnn.check(config)
    return config


def fit_maxwent(ground: FitContext, settings: Settings) -> Fitted:
    """A distribution around the models, through `offmap.fit`: settings are its keywords."""
    nets = ground.models().nets
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
    return {**history.chosen, "entropy": fmean(history.final_entropy), "kept": history.kept, "stop_reason": history.stop_reason}


def fit_bnn(ground: FitContext, settings: Settings) -> Fitted:
    """A variational posterior around the models."""
    made = around_hosts(bnn, bnn_config)(ground, settings)
    assert isinstance(made.predictive, Stochastic)
    history = made.predictive.history
    return replace(made, steps=max(history.step, default=0), chosen=reached(history))


def around_hosts(method: Any, config_of: Callable[[Settings], Any] | None = None) -> Callable[[FitContext, Settings], Fitted]:
    """A method that takes the trained models and its own Config."""

    def fitted(ground: FitContext, settings: Settings) -> Fitted:
        nets, config = ground.models().nets, config_of(settings) if config_of else stated(method, settings)
        rows, held, law = material(nets, ground.task, replace(Recipe(), batch_size=settings.get("batch_size", BATCH)))
        begin = time.perf_counter()
        made = method.fit(nets, rows, held, likelihood=law, config=config, seed=ground.seed, runtime=Runtime(progress=False))
        seconds = time.perf_counter() - begin
        return Fitted(made, law, seconds=seconds, steps=getattr(config, "steps", 0), chosen=dict(getattr(made, "chosen", {})))

    return fitted
