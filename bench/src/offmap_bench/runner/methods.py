"""Methods on tables: what a fit takes and gives, how each method is fitted on a task, and what its config may say."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

from torch import Tensor, nn

from offmap._types import Inputs, Weights
from offmap.checks import one_of
from offmap.detectors.input_distance import Mahalanobis, Nearest
from offmap.errors import ConfigError
from offmap.likelihoods import Likelihood, infer
from offmap.maxwent import solve as maxwent
from offmap.maxwent.config import CONFIGS, Runtime, override
from offmap.posterior.predictive import Predictive, Scorer, Stochastic, Wrapper
from offmap_bench.detectors.estimators import gaussian_process, isolation_forest
from offmap_bench.detectors.hidden import hidden_mahalanobis, hidden_nearest
from offmap_bench.methods import bnn, dare, deep_ensemble, laplace, mc_dropout, mean_field, swag
from offmap_bench.methods.competitor import as_settings, check_fields, check_settings
from offmap_bench.methods.laplace import Approximated
from offmap_bench.methods.variational import ABLATION
from offmap_bench.runner.base_models import (
    ENSEMBLES,
    NETS,
    SILENT,
    Recipe,
    as_predictive,
    init_nets,
    likelihood_of,
    load_nets,
    prepare,
    repeats,
)
from offmap_bench.tasks.task import Task

SCORING = ("score", "draws")  # settings that say how a fit is scored
BASE = "deep_ensemble"  # the method whose nets others start from, unless a plan names another
BATCH, HIDDEN, SIZE = Recipe().batch_size, Recipe().hidden, Recipe().members

Settings = Mapping[str, Any]


@dataclass(frozen=True)
class Fitted:
    """A Predictive with its likelihood, or a Scorer; how long the fit took, and what it chose."""

    predictive: Predictive | None = None
    likelihood: Likelihood | None = None
    scorer: Scorer | None = None
    seconds: float = 0.0
    thousand: float | None = None  # seconds to score so many images, where that was measured
    steps: int = 0
    chosen: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True)
class Member(Wrapper):
    """One member of any Predictive, alone: what a fit on that net by itself gives, with the noise of its number."""

    index: int
    members: int = field(default=1, init=False)  # pyright: ignore[reportIncompatibleMethodOverride]

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.source.members:
            raise ConfigError(f"Expected `index` from 0 to {self.source.members - 1}, one of the members, but got {self.index}.")

    def mean_weights(self, member: int = 0) -> Weights | None:
        """Return its weights as they were trained."""
        return self.source.mean_weights(self.index)

    def outputs(self, x: Inputs, draws: int, *, clip: float | None = None, seed: int = 0) -> Tensor:
        """Return (P, B, ...); all members run, and the others' outputs are left out."""
        stacked = self.source.outputs(x, draws, clip=clip, seed=seed)
        return stacked.unflatten(0, (self.source.members, -1))[self.index]


@dataclass(frozen=True)
class FitContext:
    """The task and the seed of a fit, and the base models it may start from: {method, config, grid} of their training."""

    task: Task
    seed: int
    source: Settings | None = None

    def models(self) -> list[nn.Module]:
        """Return the trained members; of a grid, those that predict the validation data best."""
        source = self.source or {}
        how = recipe(source.get("method", BASE), source.get("config", {}), candidates(source.get("grid", {})))
        return load_nets(self.task, self.seed, how).nets


@dataclass(frozen=True)
class Method:
    """How a plan uses a method."""

    fit: Callable[[FitContext, Settings], Fitted]  # fits one config
    settings: Callable[[Settings], dict[str, Any]]  # fills in the defaults of a config, and refuses impossible ones
    keys: frozenset[str]  # what a config may set
    from_models: bool = False  # it starts from trained base models
    scores_only: bool = False  # it has no members and predicts nothing
    gives_models: bool = False  # others may start from its nets
    # what its records hold, in place of what all others do: {set: {name: value}}
    measure: Callable[[FitContext, Scorer], dict[str, dict[str, Any]]] | None = None
    score: str = "own"  # by which a plan judges it unless it names another; "own": what it returns has a score
    stacks: frozenset[str] = frozenset()  # settings in which the candidates of `fit_grid` may differ
    # fits a config with several candidates in one stack, and gives the fits that are left to choose among
    fit_grid: Callable[[FitContext, Settings, Sequence[Settings]], list[Fitted]] | None = None


def candidates(grid: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Return every choice of a grid; one empty choice without a grid.

    >>> candidates({"lr": [0.1, 0.2]}), candidates({})
    ([{'lr': 0.1}, {'lr': 0.2}], [{}])
    """
    return [dict(zip(grid, values, strict=True)) for values in product(*grid.values())]


def without(settings: Settings, *keys: str) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if key not in keys}


def config_of(module: Any, settings: Settings, key: str = "", presets: Mapping[str, Any] | None = None) -> Any:
    """Build a method's config: its default or the preset that `settings[key]` names, with differences; checked."""
    presets = presets or {"": module.Config()}
    preset = presets[one_of(key, settings.get(key, next(iter(presets))), presets)]
    names = {f.name for f in fields(preset)}
    config = override(preset, {name: value for name, value in settings.items() if name in names})
    getattr(module, "check", check_fields)(config)
    return config


def fill_defaults(config: Any, settings: Settings, **defaults: Any) -> dict[str, Any]:
    """Return all fields of a config, and the settings beside them, whose defaults are given."""
    return {**defaults, **settings, **as_settings(config)}


def recipe(method: str, settings: Settings, choices: Sequence[Settings] = ({},)) -> Recipe:
    """Return how base models are trained, from settings that state differences only, refused if they are impossible."""
    check_settings(settings)
    training = override(ENSEMBLES[method].Config(), without(settings, *NETS, "dropout"))
    return replace(nets_of(settings), training=training, method=method, candidates=tuple(choices))


def nets_of(settings: Settings) -> Recipe:
    """Return a recipe with what settings say of the nets and their batches."""
    nets: dict[str, Any] = {key: settings[key] for key in (*NETS, "dropout") if key in settings}
    if "hidden" in nets:
        nets["hidden"] = tuple(nets["hidden"])
    return Recipe(**nets)


def config_keys(config: type) -> frozenset[str]:
    """Return the fields of a config and the settings of scoring."""
    return frozenset({f.name for f in fields(config)} | {*SCORING})


def describe_fit(predictive: Predictive) -> dict[str, Any]:
    """Return what a fit chose and how wide it became."""
    if isinstance(predictive, Approximated):
        return dict(predictive.chosen)
    if not isinstance(predictive, Stochastic):
        return {}
    h = predictive.history
    return {**h.chosen, "entropy": fmean(h.final_entropy), "kept": h.kept, "stop_reason": h.stop_reason}


def around_models(
    module: Any, *keys: str, score: str = "paper", presets: Mapping[str, Any] | None = None, **defaults: Any
) -> Method:
    """Declare a method that takes trained base models. The first of `keys` names one of the presets, the first of which is the
    default; further keys, and those with `defaults`, stand beside the fields of its config.
    """

    def read(settings: Settings) -> Any:
        return config_of(module, settings, keys[0] if presets else "", presets)

    def fit(context: FitContext, settings: Settings) -> Fitted:
        nets, config = context.models(), read(settings)
        rows, valid, likelihood = prepare(nets, context.task, settings.get("batch_size", BATCH))
        runtime = Runtime(progress=False, **{key: settings[key] for key in ("chunk_size", "batch_size") if key in settings})
        begin = time.perf_counter()
        predictive = module.fit(nets, rows, valid, likelihood=likelihood, config=config, seed=context.seed, runtime=runtime)
        seconds = time.perf_counter() - begin
        steps = max(predictive.history.step, default=0) if isinstance(predictive, Stochastic) else getattr(config, "steps", 0)
        return Fitted(predictive, likelihood, seconds=seconds, steps=steps, chosen=describe_fit(predictive))

    names = config_keys(module.Config) | {*keys, *defaults}
    return Method(fit, lambda settings: fill_defaults(read(settings), settings, **defaults), names, from_models=True, score=score)


def from_scratch(module: Any, stacks: str, *, dropout: float = 0.0) -> Method:
    """Declare a method that trains nets of its own, all candidates of a grid in `stacks` at once in equal shares of the time."""

    def read(settings: Settings) -> Any:
        return config_of(module, {"dropout": dropout, **settings})

    def fit_grid(context: FitContext, settings: Settings, candidates: Sequence[Settings]) -> list[Fitted]:
        how = replace(nets_of(settings), dropout=dropout)
        nets = init_nets(context.task, context.seed, how)
        times = repeats(context.task, how)
        rows, valid, likelihood = prepare([nets[0].eval(), *nets[1:]], context.task, how.batch_size, times)
        configs = [read({**settings, **candidate}) for candidate in candidates]
        begin = time.perf_counter()
        options = {"likelihood": likelihood, "seed": context.seed, "runtime": SILENT, "repeats": times}
        fits = module.fit_grid(nets, rows, valid, configs=configs, **options)
        share = (time.perf_counter() - begin) / len(fits)
        return [
            Fitted(fit, likelihood, seconds=share, steps=configs[0].steps, chosen={**describe_fit(fit), **candidate})
            for fit, candidate in zip(fits, candidates, strict=True)
        ]

    return Method(
        lambda context, settings: fit_grid(context, settings, [{}])[0],
        lambda settings: fill_defaults(read(settings), settings, hidden=HIDDEN, batch_size=BATCH),
        config_keys(module.Config) | {*NETS}, stacks=frozenset({stacks}), fit_grid=fit_grid, score="paper",
    )  # fmt: skip


def ensemble(name: str) -> Method:
    """Declare one of ENSEMBLES, whose nets are cached: its fits are those nets, nothing random, in the time of their training."""
    keys = config_keys(ENSEMBLES[name].Config)

    def fit_grid(context: FitContext, settings: Settings, candidates: Sequence[Settings]) -> list[Fitted]:
        how = recipe(name, without(settings, *SCORING), candidates)
        members = load_nets(context.task, context.seed, how)
        predictive, likelihood = as_predictive(members.nets, context.task), likelihood_of(context.task, members.nets[0])
        return [Fitted(predictive, likelihood, seconds=members.seconds, steps=how.training.steps, chosen=members.chosen)]

    def fill(settings: Settings) -> dict[str, Any]:
        how = recipe(name, without(settings, *SCORING))
        return fill_defaults(how.training, settings, hidden=how.hidden, batch_size=how.batch_size)

    return Method(
        lambda context, settings: fit_grid(context, settings, [{}])[0], fill, keys - {"draws"} | {*NETS},
        gives_models=True, fit_grid=fit_grid, stacks=keys - config_keys(deep_ensemble.Config), score="paper",
    )  # fmt: skip


def scorer(make: Callable[..., Scorer], *keys: str, of_net: bool = False) -> Method:
    """Declare a Scorer of the training inputs, or of the first base model and the inputs."""

    def fit(context: FitContext, settings: Settings) -> Fitted:
        begin, x = time.perf_counter(), context.task.train[0]
        detector = make(context.models()[0], x, **settings) if of_net else make(context, x, **settings)
        return Fitted(scorer=detector, seconds=time.perf_counter() - begin)

    return Method(fit, dict, frozenset(keys), from_models=of_net, scores_only=True)


def own_method(name: str) -> Method:
    """Import a method by `module:callable`. It is called with a FitContext and its config, and returns a Scorer or a Predictive.

    Its record is stale when a default or the file of the callable changes.
    """
    module, _, attribute = name.partition(":")
    try:
        make = getattr(importlib.import_module(module), attribute)
        signature, source = inspect.signature(make), Path(inspect.getfile(make)).read_bytes()
    except Exception as error:  # whatever the user's module raises
        words = "`module:callable` that can be imported from the folder of the plan or from the path of Python"
        raise ConfigError(f"Expected {words}, but {name!r} gives {type(error).__name__}: {error}") from error
    rest = list(signature.parameters.values())[1:]
    defaults = {p.name: p.default for p in rest if p.default is not p.empty}

    def fill(settings: Settings) -> dict[str, Any]:
        try:
            signature.bind(None, **without(settings, *SCORING))
        except TypeError as error:
            raise ConfigError(f"Expected a config with which {name!r} can be called, but {error}.") from error
        return {**defaults, **settings, "file": hashlib.sha256(source).hexdigest()[:16]}

    def fit(context: FitContext, settings: Settings) -> Fitted:
        begin = time.perf_counter()
        result = make(context, **without(settings, *SCORING))
        seconds = time.perf_counter() - begin
        if hasattr(result, "score"):
            return Fitted(scorer=result, seconds=seconds)
        if not (hasattr(result, "outputs") and hasattr(result, "members")):
            words = "an object with `score(x)`, or with `members` and `outputs(x, draws, *, clip, seed)`"
            raise ConfigError(f"Expected {name!r} to return {words}, but got {type(result).__name__}.")
        x, y = context.task.valid
        return Fitted(result, infer(result.outputs(x, 1, clip=None, seed=0)[0], y, context.task.likelihood), seconds=seconds)

    return Method(fit, fill, frozenset({p.name for p in rest} | {*SCORING}), from_models=True)


class Methods(dict[str, Method]):
    """Methods by name; those of users by `module:callable`, imported when they are asked for, in every process anew."""

    def __missing__(self, name: str) -> Method:
        if ":" not in name:
            raise KeyError(name)
        self[name] = own_method(name)
        return self[name]


TABLE_METHODS: dict[str, Method] = {
    **{name: ensemble(name) for name in ENSEMBLES},
    "maxwent": around_models(maxwent, "config", "batch_size", "chunk_size", score="default", presets=CONFIGS),
    "bnn": around_models(bnn, "setting", "batch_size", presets=ABLATION),
    "dare": around_models(dare, batch_size=BATCH),
    "swag": around_models(swag, batch_size=BATCH),
    "laplace": around_models(laplace),
    "mc_dropout": from_scratch(mc_dropout, "dropout", dropout=0.1),
    "mean_field": from_scratch(mean_field, "tradeoff"),
    "nearest": scorer(lambda _, x, **s: Nearest(x, **s), "k", "standardise"),
    "mahalanobis": scorer(lambda _, x, **s: Mahalanobis(x, **s), "shrinkage"),
    "hidden_nearest": scorer(hidden_nearest, "k", "names", of_net=True),
    "hidden_mahalanobis": scorer(hidden_mahalanobis, "shrinkage", "names", of_net=True),
    "gaussian_process": scorer(lambda c, x, **s: gaussian_process(x, c.task.train[1], seed=c.seed, **s), "rows"),
    "isolation_forest": scorer(lambda c, x, **s: isolation_forest(x, seed=c.seed, **s), "trees"),
}
