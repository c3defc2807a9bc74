"""Ensembles that train nets of their own: a grid in one stack, its setting chosen by validation NLL, the nets remembered."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from offmap.integrations.nets import Training
from offmap.posterior.predictive import Sampled
from offmap.posterior.protocol import Runtime, override
from offmap_bench.methods import anchored, negative_correlation, overall_diversity, repulsive
from offmap_bench.methods.base import check_settings
from offmap_bench.runner.base_models import Recipe, Trained, Way, material, trained
from offmap_bench.tasks.task import Task

Settings = Mapping[str, Any]


@dataclass(frozen=True)
class Ensemble:
    """A method's configuration, and how all settings of a grid are fitted at once."""

    config: type[Training]
    fit_grid: Callable[..., list[Sampled]]

    @property
    def own(self) -> frozenset[str]:
        """What the settings of one stack may differ in."""
        return frozenset({f.name for f in fields(self.config)} - {f.name for f in fields(Training)})


def one_by_one(*args: Any, configs: Sequence[repulsive.Config], **options: Any) -> list[Sampled]:
    """A grid of repulsive ensembles, which the paper does not have."""
    return [repulsive.fit(*args, config=config, **options) for config in configs]


ENSEMBLES: dict[str, Ensemble] = {
    "negative_correlation": Ensemble(negative_correlation.Config, negative_correlation.fit_grid),
    "overall_diversity": Ensemble(overall_diversity.Config, overall_diversity.fit_grid),
    "anchored": Ensemble(anchored.Config, anchored.fit_grid),
    "repulsive": Ensemble(repulsive.Config, one_by_one),
}

NETS = frozenset({"hidden", "batch_size"})
"""Keys beside those of the configuration."""


def keys(name: str) -> frozenset[str]:
    """What a config of this ensemble may say of its fit."""
    return NETS | {f.name for f in fields(ENSEMBLES[name].config)}


def parts(name: str, settings: Settings) -> tuple[Recipe, Training]:
    """The nets and the configuration, from settings that state differences only, refused if they are impossible."""
    nets = {key: settings[key] for key in NETS if key in settings}
    nets = {key: tuple(value) if key == "hidden" else value for key, value in nets.items()}
    rest = {key: value for key, value in settings.items() if key not in NETS}
    config = override(ENSEMBLES[name].config(), rest)
    check_settings({key: getattr(config, key) for key in {"tradeoff", "anchor_scale"} & ENSEMBLES[name].own})
    return replace(Recipe(), **nets), config


def filled(name: str, settings: Settings) -> dict[str, Any]:
    """A config with its defaults filled in."""
    recipe, config = parts(name, settings)
    return {"hidden": recipe.hidden, "batch_size": recipe.batch_size, **asdict(config)}


def chosen(name: str, task: Task, seed: int, settings: Settings, candidates: Sequence[Settings]) -> Trained:
    """The members of the candidate whose ensemble predicts the validation data best, and which one it was."""
    recipe, config = parts(name, settings)
    configs = [override(config, candidate) for candidate in candidates]
    told = {"method": name, "candidates": [asdict(each) for each in configs]}
    pick = partial(_train, name=name, task=task, seed=seed, recipe=recipe, configs=configs, candidates=candidates)
    return trained(task, seed, recipe, way=Way(told, pick))


def _train(
    nets: Sequence[nn.Module],
    *,
    name: str,
    task: Task,
    seed: int,
    recipe: Recipe,
    configs: Sequence[Training],
    candidates: Sequence[Settings],
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """All candidates in one stack, and of them the one of lowest validation NLL."""
    rows, held, law = material(nets, task, recipe)
    fits = ENSEMBLES[name].fit_grid(nets, rows, held, likelihood=law, configs=configs, seed=seed, runtime=Runtime(progress=False))
    risks = [float(law.predictive_nll(made.outputs(held.inputs, 1), held.targets).mean()) for made in fits]
    best = min(range(len(fits)), key=lambda k: math.inf if math.isnan(risks[k]) else risks[k])
    return dict(fits[best].weights), dict(candidates[best])
