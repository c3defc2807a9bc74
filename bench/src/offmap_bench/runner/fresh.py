"""Methods that train nets of their own instead of starting from the models."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial

from offmap.posterior.protocol import Runtime
from offmap_bench.methods import mc_dropout, mean_field
from offmap_bench.runner import ensembles
from offmap_bench.runner.base_models import material, plain, starts
from offmap_bench.runner.context import FitContext, Fitted, Method, Settings, likelihood_of, reading, recipe, without_reading
from offmap_bench.runner.pretrained import reached, stated

DROPOUT = 0.1


def fit_mc_dropout(ground: FitContext, settings: Settings, candidates: Sequence[Settings] = ({},)) -> list[Fitted]:
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


def fit_mean_field(ground: FitContext, settings: Settings, candidates: Sequence[Settings] = ({},)) -> list[Fitted]:
    """The competitor BNN with every setting of a grid, in one stack; each is told its share of the seconds."""
    made = recipe({key: settings[key] for key in ensembles.NETS if key in settings})
    nets = starts(ground.task, ground.seed, made)
    rows, held, law = material(nets, ground.task, made)
    configs = [stated(mean_field, {**settings, **candidate}) for candidate in candidates]
    begin = time.perf_counter()
    fits = mean_field.fit_grid(
        nets, rows, held, likelihood=law, configs=configs, seed=ground.seed, runtime=Runtime(progress=False)
    )
    share = (time.perf_counter() - begin) / len(fits)
    return [
        Fitted(fit, law, seconds=share, steps=configs[0].steps, chosen={**reached(fit.history), **candidate})
        for fit, candidate in zip(fits, candidates, strict=True)
    ]


def fit_ensemble(name: str, ground: FitContext, settings: Settings, candidates: Sequence[Settings] = ({},)) -> list[Fitted]:
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
