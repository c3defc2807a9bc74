"""What a plan may name: each method's keys, and how it is fitted on a task. The only place that knows them all."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from itertools import product
from statistics import fmean
from typing import Any, TypeVar

from torch import nn

from offmap.bench import ensembles
from offmap.bench.hosts import Recipe, Trained, material, plain, starts, trained
from offmap.data.task import Task
from offmap.detectors.mahalanobis import mahalanobis
from offmap.detectors.nearest import nearest
from offmap.errors import ConfigError
from offmap.errors import nearest as nearest_word
from offmap.guarding.build import fit
from offmap.likelihoods import Likelihood, infer
from offmap.methods import bnn, dare, deep_ensemble, maxwent, mc_dropout
from offmap.methods.protocol import Predictive, Runtime, Scorer, override
from offmap.solve.monitors import History

ENSEMBLE = Recipe().members
"""How many hosts are trained for every task and seed."""

READING = ("score", "draws")
"""Keys that say how a fit is read."""

HOSTS = "deep_ensemble"
"""The method whose nets others start from, unless a plan names another."""

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
    """What every fit is given: a task, the seed, and the hosts to start from: settings, method and grid of their training."""

    task: Task
    seed: int
    source: Settings
    method: str = HOSTS
    grid: Settings = field(default_factory=dict[str, Any])

    def hosts(self) -> Trained:
        """The trained members; of a grid, those that predict the validation data best."""
        if self.method == HOSTS:
            return trained(self.task, self.seed, recipe(self.source))
        choices = [dict(zip(self.grid, values, strict=True)) for values in product(*self.grid.values())]
        return ensembles.chosen(self.method, self.task, self.seed, self.source, choices)


@dataclass(frozen=True)
class Method:
    """`keys` are what its config may say, `settings` fills in its defaults; `hosted`: it starts from trained hosts, `single`: it
    has no members, `source`: others may start from its nets.

    `fit_grid` fits a config with every candidate in one stack, where these differ in `stacks` alone, and gives the fits that are
    left to choose among; without it they are fitted one after another.
    """

    fit: Callable[[Ground, Settings], Fitted]
    settings: Callable[[Settings], dict[str, Any]]
    keys: frozenset[str]
    hosted: bool = False
    single: bool = False
    source: bool = False
    stacks: frozenset[str] = frozenset()
    fit_grid: Callable[[Ground, Settings, Sequence[Settings]], list[Fitted]] | None = None


def without_reading(settings: Settings) -> Settings:
    """What says how a fit is made."""
    return {key: value for key, value in settings.items() if key not in READING}


def reading(settings: Settings) -> dict[str, Any]:
    """What says how it is read."""
    return {key: settings[key] for key in READING if key in settings}


def recipe(settings: Settings) -> Recipe:
    """How hosts are trained, from a config that states differences only."""
    own = {f.name for f in fields(Recipe)} - {"members", "training"}
    training = {k: v for k, v in settings.items() if k not in own}
    base = replace(Recipe(), training=override(deep_ensemble.Config(), training))
    return replace(base, **{k: tuple(v) if k == "hidden" else v for k, v in settings.items() if k in own})


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
    nets, config = ground.hosts().nets, bnn_config(settings)
    rows, held, law = material(nets, ground.task, replace(Recipe(), batch_size=settings.get("batch_size", BATCH)))
    begin = time.perf_counter()
    predictive = bnn.fit(nets, rows, held, likelihood=law, config=config, seed=ground.seed, runtime=Runtime(progress=False))
    history = predictive.history
    return Fitted(
        predictive, law, seconds=time.perf_counter() - begin, steps=max(history.step, default=0), chosen=reached(history)
    )


def fit_mc_dropout(ground: Ground, settings: Settings, candidates: Sequence[Settings] = ({},)) -> list[Fitted]:
    """Nets of their own, trained with dropout and left with it, at every candidate's rate."""
    task, made = ground.task, recipe({"dropout": DROPOUT, **without_reading(settings)})
    nets = starts(task, ground.seed, made)
    rows, held, law = material([nets[0].eval(), *nets[1:]], task, made)
    configs = [mc_dropout.Config(**asdict(made.training), **candidate) for candidate in candidates]
    begin = time.perf_counter()
    fits = mc_dropout.fit_grid(
        nets, rows, held, likelihood=law, configs=configs, seed=ground.seed, runtime=Runtime(progress=False)
    )
    seconds = (time.perf_counter() - begin) / len(fits)
    return [
        Fitted(predictive, law, seconds=seconds, steps=made.training.steps, chosen=dict(candidate))
        for predictive, candidate in zip(fits, candidates, strict=True)
    ]


def fit_ensemble(name: str, ground: Ground, settings: Settings, candidates: Sequence[Settings] = ({},)) -> list[Fitted]:
    """Nets of their own, trained together; of the candidates, those that predict the validation data best are left."""
    settings = without_reading(settings)
    made = ensembles.chosen(name, ground.task, ground.seed, settings, candidates)
    law, steps = likelihood_of(ground.task, made.nets[0]), ensembles.parts(name, settings)[1].steps
    return [Fitted(plain(made.nets, ground.task), law, seconds=made.seconds, steps=steps, chosen=made.chosen)]


def ensemble(name: str) -> Method:
    """One of the ensembles that train nets of their own."""
    made = partial(fit_ensemble, name)
    return Method(
        lambda ground, settings: made(ground, settings)[0],
        lambda settings: {**ensembles.filled(name, without_reading(settings)), **reading(settings)},
        ensembles.keys(name) | {"score"}, source=True, stacks=ensembles.ENSEMBLES[name].own, fit_grid=made,
    )  # fmt: skip


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
