"""What a fit of a benchmark takes and gives, and what a plan may say of a method."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import product
from typing import Any

from offmap.errors import ConfigError, nearest
from offmap.likelihoods import Likelihood
from offmap.maxwent.config import override
from offmap.posterior.predictive import Predictive, Scorer
from offmap_bench.methods.competitor import as_settings, check_fields, check_settings
from offmap_bench.runner.base_models import ENSEMBLES, Recipe, Trained, trained
from offmap_bench.tasks.task import Task

SCORING = ("score", "draws")
"""Settings that say how a fit is scored."""

BASE = "deep_ensemble"
"""The method whose nets others start from, unless a plan names another."""

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
        """The trained members; of a grid, those that predict the validation data best."""
        source = self.source or {}
        name = source.get("method", BASE)
        return trained(self.task, self.seed, recipe(name, source.get("config", {}), candidates(source.get("grid", {}))))


@dataclass(frozen=True)
class Method:
    """How a plan uses a method.

    Args:
        fit: Fits one config.
        settings: Fills in the defaults of a config, and refuses impossible ones.
        keys: What a config may set.
        from_models: It starts from trained base models.
        scores_only: It has no members and predicts nothing.
        gives_models: Others may start from its nets.
        stacks: Settings in which the candidates of `fit_grid` may differ.
        fit_grid: Fits a config with several candidates in one stack, and gives the fits that are left to choose among.
    """

    fit: Callable[[FitContext, Settings], Fitted]
    settings: Callable[[Settings], dict[str, Any]]
    keys: frozenset[str]
    from_models: bool = False
    scores_only: bool = False
    gives_models: bool = False
    stacks: frozenset[str] = frozenset()
    fit_grid: Callable[[FitContext, Settings, Sequence[Settings]], list[Fitted]] | None = None


def candidates(grid: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Every choice of a grid; one empty choice without a grid.

    >>> candidates({"lr": [0.1, 0.2]}), candidates({})
    ([{'lr': 0.1}, {'lr': 0.2}], [{}])
    """
    return [dict(zip(grid, values, strict=True)) for values in product(*grid.values())]


def without_scoring(settings: Settings) -> dict[str, Any]:
    """The settings of the fit itself."""
    return {key: value for key, value in settings.items() if key not in SCORING}


def config_of(module: Any, settings: Settings, key: str = "", presets: Mapping[str, Any] | None = None) -> Any:
    """A method's config from settings: its default or the preset that `settings[key]` names, with differences; checked."""
    presets = presets or {"": module.Config()}
    name = settings.get(key, next(iter(presets)))
    if name not in presets:
        raise ConfigError(f"Expected `{key}` to be {nearest(str(name), presets)}, but got {name!r}.")
    known = {f.name for f in fields(presets[name])}
    config = override(presets[name], {key: value for key, value in settings.items() if key in known})
    getattr(module, "check", check_fields)(config)
    return config


def fill_defaults(config: Any, settings: Settings, **defaults: Any) -> dict[str, Any]:
    """All fields of a config, and the settings beside them, whose defaults are given."""
    own = as_settings(config)
    return {**defaults, **own, **{key: value for key, value in settings.items() if key not in own}}


def recipe(method: str, settings: Settings, choices: Sequence[Settings] = ({},)) -> Recipe:
    """How base models are trained, from settings that state differences only, refused if they are impossible."""
    check_settings(settings)
    nets = {key: settings[key] for key in ("hidden", "batch_size", "dropout") if key in settings}
    if "hidden" in nets:
        nets["hidden"] = tuple(nets["hidden"])
    training = override(ENSEMBLES[method].Config(), {k: v for k, v in settings.items() if k not in nets})
    return replace(Recipe(), **nets, training=training, method=method, candidates=tuple(choices))
