"""What a plan may name: each method's keys, and how it is fitted on a task. The only place that knows them all."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from statistics import fmean
from typing import Any, TypeVar

from torch import nn

from offmap.batches import Place, batches, gather
from offmap.bench.hosts import Recipe, Trained, plain, starts, trained
from offmap.data.task import Task
from offmap.detectors.gaussian_process import gaussian_process
from offmap.detectors.isolation_forest import isolation_forest
from offmap.detectors.mahalanobis import hidden_mahalanobis, mahalanobis
from offmap.detectors.nearest import hidden_nearest, nearest
from offmap.errors import ConfigError
from offmap.errors import nearest as nearest_word
from offmap.guarding.build import fit
from offmap.likelihoods import Likelihood, infer
from offmap.methods import bnn, deep_ensemble, laplace, maxwent, mc_dropout, mean_field, swag
from offmap.methods.protocol import Predictive, Runtime, Scorer, override
from offmap.solve.monitors import History

ENSEMBLE = Recipe().members
"""How many hosts are trained for every task and seed."""

READING = ("score", "draws")
"""Keys that say how a fit is read."""

DROPOUT = 0.1

BATCH = Recipe().batch_size

Settings = Mapping[str, Any]


@dataclass(frozen=True)
class Fitted:
    """What a fit gives: a Predictive with its likelihood, or a Scorer; how long it took, and what it chose."""

    predictive: Predictive | None = None
    likelihood: Likelihood | None = None
    scorer: Scorer | None = None
    seconds: float = 0.0
    steps: int = 0
    chosen: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True)
class Ground:
    """What every fit is given: a task, the seed, and the settings of the hosts to start from."""

    task: Task
    seed: int
    source: Settings

    def hosts(self) -> Trained:
        """The trained members."""
        return trained(self.task, self.seed, recipe(self.source))


@dataclass(frozen=True)
class Method:
    """`keys` are what its config may say, `settings` fills in its defaults; `hosted`: it starts from trained hosts, `single`: it
    has no members.
    """

    fit: Callable[[Ground, Settings], Fitted]
    settings: Callable[[Settings], dict[str, Any]]
    keys: frozenset[str]
    hosted: bool = False
    single: bool = False


def without_reading(settings: Settings) -> Settings:
    """What says how a fit is made."""
    return {key: value for key, value in settings.items() if key not in READING}


def recipe(settings: Settings) -> Recipe:
    """How hosts are trained, from a config that states differences only."""
    own = {f.name for f in fields(Recipe)} - {"members", "training"}
    training = {k: v for k, v in settings.items() if k not in own}
    base = replace(Recipe(), training=override(deep_ensemble.Config(), training))
    return replace(base, **{k: tuple(v) if k == "hidden" else v for k, v in settings.items() if k in own})


def host_settings(settings: Settings) -> dict[str, Any]:
    """A config of hosts with its defaults filled in."""
    return {**asdict(recipe(without_reading(settings))), **{key: settings[key] for key in READING if key in settings}}


AnyConfig = TypeVar("AnyConfig", maxwent.Config, bnn.Config)


def named(settings: Settings, key: str, presets: Mapping[str, AnyConfig], default: str) -> AnyConfig:
    """The preset that `settings[key]` names, with what else the settings say of its fields."""
    name = settings.get(key, default)
    if name not in presets:
        raise ConfigError(f"Expected `{key}` to be {nearest_word(str(name), presets)}, but got {name!r}.")
    known = {f.name for f in fields(presets[name])}
    return override(presets[name], {field: value for field, value in settings.items() if field in known})


def filled(config: Any, settings: Settings) -> dict[str, Any]:
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


def likelihood_of(task: Task, net: nn.Module) -> Likelihood:
    """The task's likelihood for the outputs of such a net."""
    inputs, targets = task.valid
    return infer(net(inputs).detach(), targets, task.likelihood)


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
    task, nets = ground.task, ground.hosts().nets
    law, place = likelihood_of(task, nets[0]), Place.of(nets[0])
    rows = batches(task.train, place, name="train", batch_size=settings.get("batch_size", BATCH))
    held = gather(batches(task.valid, place, name="valid"))
    config = bnn_config(settings)
    begin = time.perf_counter()
    predictive = bnn.fit(nets, rows, held, likelihood=law, config=config, seed=ground.seed, runtime=Runtime(progress=False))
    history = predictive.history
    return Fitted(
        predictive, law, seconds=time.perf_counter() - begin, steps=max(history.step, default=0), chosen=reached(history)
    )


def fit_mc_dropout(ground: Ground, settings: Settings) -> Fitted:
    """Nets of their own, trained with dropout and left with it."""
    task, made = ground.task, recipe({"dropout": DROPOUT, **without_reading(settings)})
    nets = starts(task, ground.seed, made)
    law = likelihood_of(task, nets[0].eval())
    place = Place.of(nets[0])
    rows = batches(task.train, place, name="train", batch_size=made.batch_size)
    held = gather(batches(task.valid, place, name="valid"))
    config = mc_dropout.Config(**{f.name: getattr(made.training, f.name) for f in fields(mc_dropout.Config)})
    begin = time.perf_counter()
    predictive = mc_dropout.fit(
        nets, rows, held, likelihood=law, config=config, seed=ground.seed, runtime=Runtime(progress=False)
    )
    return Fitted(predictive, law, seconds=time.perf_counter() - begin, steps=config.steps)


def stated(method: Any, settings: Settings) -> Any:
    """A method's Config with what the settings say of its fields, refused if it is impossible."""
    own = {f.name for f in fields(method.Config)}
    config = override(method.Config(), {key: value for key, value in settings.items() if key in own})
    method.check(config)
    return config


def around_hosts(method: Any) -> Callable[[Ground, Settings], Fitted]:
    """A method that takes the trained hosts and its own Config."""

    def fitted(ground: Ground, settings: Settings) -> Fitted:
        task, nets, config = ground.task, ground.hosts().nets, stated(method, settings)
        law, place = likelihood_of(task, nets[0]), Place.of(nets[0])
        rows = batches(task.train, place, name="train", batch_size=settings.get("batch_size", BATCH))
        held = gather(batches(task.valid, place, name="valid"))
        begin = time.perf_counter()
        made = method.fit(nets, rows, held, likelihood=law, config=config, seed=ground.seed, runtime=Runtime(progress=False))
        seconds = time.perf_counter() - begin
        return Fitted(made, law, seconds=seconds, steps=getattr(config, "steps", 0), chosen=dict(getattr(made, "chosen", {})))

    return fitted


def fit_mean_field(ground: Ground, candidates: Sequence[Settings]) -> list[Fitted]:
    """The competitor BNN with every setting of a grid, in one stack; each is told its share of the seconds."""
    task, first = ground.task, candidates[0]
    made = recipe({key: first[key] for key in ("hidden", "batch_size") if key in first})
    nets = starts(task, ground.seed, made)
    law, place = likelihood_of(task, nets[0]), Place.of(nets[0])
    rows = batches(task.train, place, name="train", batch_size=made.batch_size)
    held = gather(batches(task.valid, place, name="valid"))
    configs = [stated(mean_field, candidate) for candidate in candidates]
    begin = time.perf_counter()
    fits = mean_field.fit_grid(
        nets, rows, held, likelihood=law, configs=configs, seed=ground.seed, runtime=Runtime(progress=False)
    )
    share = (time.perf_counter() - begin) / len(fits)
    return [Fitted(fit, law, seconds=share, steps=configs[0].steps, chosen=reached(fit.history)) for fit in fits]


def detector(make: Callable[..., Scorer]) -> Callable[[Ground, Settings], Fitted]:
    """A Scorer made of the training data alone."""

    def fitted(ground: Ground, settings: Settings) -> Fitted:
        begin = time.perf_counter()
        scorer = make(ground, **settings)
        return Fitted(scorer=scorer, seconds=time.perf_counter() - begin)

    return fitted


def hidden_detector(make: Callable[..., Scorer]) -> Callable[[Ground, Settings], Fitted]:
    """A Scorer made of the hidden layers of the first host."""

    def fitted(ground: Ground, settings: Settings) -> Fitted:
        net = ground.hosts().nets[0]
        return detector(lambda g, **s: make(net, g.task.train[0], **s))(ground, settings)

    return fitted


HOST_KEYS = frozenset({f.name for f in fields(deep_ensemble.Config)} | {"hidden", "batch_size"})
MAXWENT_KEYS = frozenset({f.name for f in fields(maxwent.Config)} - {"parameterization"} | {"config", "batch_size", "chunk_size"})
BNN_KEYS = frozenset({f.name for f in fields(bnn.Config)} | {"setting", "batch_size"})
MEAN_FIELD_KEYS = frozenset({f.name for f in fields(mean_field.Config)} | {"hidden", "batch_size"})
SWAG_KEYS = frozenset({f.name for f in fields(swag.Config)} | {"batch_size"})
LAPLACE_KEYS = frozenset({f.name for f in fields(laplace.Config)})

METHODS: dict[str, Method] = {
    "deep_ensemble": Method(fit_deep_ensemble, host_settings, HOST_KEYS | {"score"}),
    "maxwent": Method(fit_maxwent, maxwent_settings, MAXWENT_KEYS | {*READING}, hosted=True),
    "bnn": Method(fit_bnn, lambda settings: filled(bnn_config(settings), settings), BNN_KEYS | {*READING}, hosted=True),
    "mc_dropout": Method(
        fit_mc_dropout, lambda settings: host_settings({"dropout": DROPOUT, **settings}), HOST_KEYS | {"dropout", *READING}
    ),
    "mean_field": Method(
        lambda ground, settings: fit_mean_field(ground, [settings])[0],
        lambda settings: filled(stated(mean_field, settings), {"hidden": Recipe().hidden, "batch_size": BATCH, **settings}),
        MEAN_FIELD_KEYS | {*READING},
    ),
    "swag": Method(
        around_hosts(swag), lambda settings: filled(stated(swag, settings), {"batch_size": BATCH, **settings}),
        SWAG_KEYS | {*READING}, hosted=True,
    ),
    "laplace": Method(
        around_hosts(laplace), lambda settings: filled(stated(laplace, settings), settings), LAPLACE_KEYS | {*READING},
        hosted=True,
    ),
    "nearest": Method(
        detector(lambda ground, **s: nearest(ground.task.train[0], **s)), dict, frozenset({"k", "standardise"}), single=True
    ),
    "mahalanobis": Method(
        detector(lambda ground, **s: mahalanobis(ground.task.train[0], **s)), dict, frozenset({"shrinkage"}), single=True
    ),
    "hidden_nearest": Method(hidden_detector(hidden_nearest), dict, frozenset({"k", "names"}), hosted=True, single=True),
    "hidden_mahalanobis": Method(
        hidden_detector(hidden_mahalanobis), dict, frozenset({"shrinkage", "names"}), hosted=True, single=True
    ),
    "gaussian_process": Method(
        detector(lambda ground, **s: gaussian_process(*ground.task.train, seed=ground.seed, **s)), dict, frozenset({"rows"}),
        single=True,
    ),
    "isolation_forest": Method(
        detector(lambda ground, **s: isolation_forest(ground.task.train[0], seed=ground.seed, **s)), dict, frozenset({"trees"}),
        single=True,
    ),
}  # fmt: skip
