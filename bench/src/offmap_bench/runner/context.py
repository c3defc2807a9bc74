"""What a fit of a benchmark is given and gives, and what a plan may know of a method."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import product
from typing import Any

from torch import nn

from offmap.likelihoods import Likelihood, infer
from offmap.posterior.protocol import Predictive, Scorer, override
from offmap_bench.methods import deep_ensemble
from offmap_bench.runner import ensembles
from offmap_bench.runner.base_models import Recipe, Trained, trained
from offmap_bench.tasks.task import Task

READING = ("score", "draws")
"""Keys that say how a fit is read."""

HOSTS = "deep_ensemble"
"""The method whose nets others start from, unless a plan names another."""

BATCH = Recipe().batch_size

Settings = Mapping[str, Any]


@dataclass(frozen=True)
class Fitted:
    """What a fit gives: a Predictive with its likelihood, or a Scorer; how long it took, and what it chose."""

    predictive: Predictive | None = None
    likelihood: Likelihood | None = None
    scorer: Scorer | None = None
    seconds: float = 0.0
    thousand: float | None = None  # seconds to score so many images, where that was measured
    steps: int = 0
    chosen: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True)
class FitContext:
    """What every fit is given: a task, the seed, and the models to start from: settings, method and grid of their training."""

    task: Task
    seed: int
    source: Settings
    method: str = HOSTS
    grid: Settings = field(default_factory=dict[str, Any])

    @staticmethod
    def of(task: Task, seed: int, source: Settings | None) -> FitContext:
        """What a cell with such a `source` is given."""
        told = source or {"config": {}}
        return FitContext(task, seed, told["config"], told.get("method", HOSTS), told.get("grid", {}))

    def models(self) -> Trained:
        """The trained members; of a grid, those that predict the validation data best."""
        if self.method == HOSTS:
            return trained(self.task, self.seed, recipe(self.source))
        choices = [dict(zip(self.grid, values, strict=True)) for values in product(*self.grid.values())]
        return ensembles.chosen(self.method, self.task, self.seed, self.source, choices)


@dataclass(frozen=True)
class Method:
    """`keys` are what its config may say, `settings` fills in its defaults; `hosted`: it starts from trained models, `single`: it
    has no members, `source`: others may start from its nets.

    `fit_grid` fits a config with every candidate in one stack, where these differ in `stacks` alone, and gives the fits that are
    left to choose among; without it they are fitted one after another.
    """

    fit: Callable[[FitContext, Settings], Fitted]
    settings: Callable[[Settings], dict[str, Any]]
    keys: frozenset[str]
    hosted: bool = False
    single: bool = False
    source: bool = False
    stacks: frozenset[str] = frozenset()
    fit_grid: Callable[[FitContext, Settings, Sequence[Settings]], list[Fitted]] | None = None


def without_reading(settings: Settings) -> Settings:
    """What says how a fit is made."""
    return {key: value for key, value in settings.items() if key not in READING}


def reading(settings: Settings) -> dict[str, Any]:
    """What says how it is read."""
    return {key: settings[key] for key in READING if key in settings}


def recipe(settings: Settings) -> Recipe:
    """How models are trained, from a config that states differences only."""
    own = {f.name for f in fields(Recipe)} - {"members", "training"}
    training = {k: v for k, v in settings.items() if k not in own}
    base = replace(Recipe(), training=override(deep_ensemble.Config(), training))
    return replace(base, **{k: tuple(v) if k == "hidden" else v for k, v in settings.items() if k in own})


def likelihood_of(task: Task, net: nn.Module) -> Likelihood:
    """The task's likelihood for the outputs of such a net."""
    inputs, targets = task.valid
    return infer(net(inputs).detach(), targets, task.likelihood)
