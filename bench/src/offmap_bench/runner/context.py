"""What a fit of a benchmark takes and gives, and what a plan may say of a method."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import product
from typing import Any

from offmap.checks import one_of
from offmap.likelihoods import Likelihood
from offmap.maxwent.config import override
from offmap.posterior.predictive import Predictive, Scorer
from offmap_bench.methods.competitor import as_settings, check_fields, check_settings
from offmap_bench.runner.base_models import ENSEMBLES, Recipe, Trained, trained
from offmap_bench.tasks.task import Task

SCORING = ("score", "draws")  # settings that say how a fit is scored
BASE = "deep_ensemble"  # the method whose nets others start from, unless a plan names another

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
class FitContext:
    """The task and the seed of a fit, and the base models it may start from: {method, config, grid} of their training."""

    task: Task
    seed: int
    source: Settings | None = None

    def models(self) -> Trained:
        """Return the trained members; of a grid, those that predict the validation data best."""
        source = self.source or {}
        how = recipe(source.get("method", BASE), source.get("config", {}), candidates(source.get("grid", {})))
        return trained(self.task, self.seed, how)


@dataclass(frozen=True)
class Method:
    """How a plan uses a method."""

    fit: Callable[[FitContext, Settings], Fitted]  # fits one config
    settings: Callable[[Settings], dict[str, Any]]  # fills in the defaults of a config, and refuses impossible ones
    keys: frozenset[str]  # what a config may set
    from_models: bool = False  # it starts from trained base models
    scores_only: bool = False  # it has no members and predicts nothing
    gives_models: bool = False  # others may start from its nets
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
    """Return the settings without some keys."""
    return {key: value for key, value in settings.items() if key not in keys}


def config_of(module: Any, settings: Settings, key: str = "", presets: Mapping[str, Any] | None = None) -> Any:
    """Build a method's config: its default or the preset that `settings[key]` names, with differences; checked."""
    presets = presets or {"": module.Config()}
    preset = presets[one_of(key, settings.get(key, next(iter(presets))), presets)]
    known = {f.name for f in fields(preset)}
    config = override(preset, {name: value for name, value in settings.items() if name in known})
    getattr(module, "check", check_fields)(config)
    return config


def fill_defaults(config: Any, settings: Settings, **defaults: Any) -> dict[str, Any]:
    """Return all fields of a config, and the settings beside them, whose defaults are given."""
    return {**defaults, **settings, **as_settings(config)}


def recipe(method: str, settings: Settings, choices: Sequence[Settings] = ({},)) -> Recipe:
    """Return how base models are trained, from settings that state differences only, refused if they are impossible."""
    check_settings(settings)
    nets = {key: settings[key] for key in ("hidden", "batch_size", "dropout") if key in settings}
    if "hidden" in nets:
        nets["hidden"] = tuple(nets["hidden"])
    training = override(ENSEMBLES[method].Config(), without(settings, *nets))
    return replace(Recipe(), **nets, training=training, method=method, candidates=tuple(choices))
