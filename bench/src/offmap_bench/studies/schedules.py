"""What more steps, a factor for each layer, amplitudes under the draws or several λ do for the paper's score.

Some tasks need the two tables of OFFMAP_DATA. Nets, rows and noise are the same for all ways of a task and seed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean, stdev
from typing import Any

import torch
from torch import Tensor

from offmap.maxwent import solve
from offmap.maxwent.config import CONFIGS, PAPER, Config
from offmap.maxwent.search import find_largest_factor, unit_scale
from offmap.metrics import auroc
from offmap.model.forward import first_tensor
from offmap.model.params import StackedModel, at, choose, stack_models
from offmap.posterior.basis import Observed, build_bases, second_moments
from offmap.posterior.distribution import WeightDistribution
from offmap.posterior.predictive import History, Stochastic
from offmap_bench.methods import deep_ensemble
from offmap_bench.runner.base_models import SILENT, Recipe, models, prepare
from offmap_bench.runner.images import time_work
from offmap_bench.runner.table import format_table, percent
from offmap_bench.studies.cuts import TASKS
from offmap_bench.studies.study import Runs, Study, format_signed

SEEDS, DRAWS, SIZES = range(3), 50, (2.0, 2**0.5)
RECIPE = Recipe(members=3, training=deep_ensemble.Config(steps=3_000))

# ------------------------------------------------------------------------------------------------------------- ways

Solver = Callable[[StackedModel, solve.Task, Config], tuple[Stochastic, int]]


def fit_default(nets: StackedModel, task: solve.Task, config: Config) -> tuple[Stochastic, int]:
    """What `offmap.fit` does: of several λ the one of highest entropy."""
    shape = {} if config.solver == "sgd" else solve.find_shape(task)
    fits = list[tuple[float, dict[str, Tensor], History]]()
    for weight in solve.as_floats(config.entropy_weight):
        history = solve.solve(task, shape, weight)
        scale = {n: s.detach() for n, s in task.q.scale().items()}
        fits.append((float(task.q.mean_log_square().detach().mean()), scale, history))
    _, scale, history = max(fits, key=lambda fit: fit[0])
    task.q.set_scale(lambda name: scale[name])
    return Stochastic(task.validation.model, task.q, history), sum(fit[2].step[-1] for fit in fits)


def fit_on(nets: StackedModel, task: solve.Task, config: Config) -> tuple[Stochastic, int]:
    """The default without its last factor, then gentler steps from there: towards another shape of the same risk."""
    _, first = fit_default(nets, replace(task, config=replace(config, rescale=False)), config)
    history = solve.descend(replace(task, config=replace(config, lr=0.005, steps=1_000)), History(), 30.0)
    return Stochastic(task.validation.model, task.q, history), first + history.step[-1]


def fit_layers(nets: StackedModel, task: solve.Task, config: Config, *, sizes: Sequence[float] = SIZES) -> tuple[Stochastic, int]:
    """The default, then a factor for each layer in turn."""
    fitted, steps = fit_default(nets, task, config)
    widen_layers(task, sizes)
    return fitted, steps


@torch.no_grad()
def widen_layers(task: solve.Task, sizes: Sequence[float] = SIZES) -> None:
    """Coordinate search: multiply or divide one layer's φ by each size, then all φ by the largest factor that τ allows, and keep
    what has more entropy. Without sizes there is the factor alone.
    """
    q, validation, max_risk = task.q, task.validation, task.max_risk
    base_risk, biases = validation.base_risk(q), {b.bias: n for n, b in task.bases.items()}
    best, entropy = {name: s.clone() for name, s in q.scale().items()}, q.mean_log_square()
    layers = [{name for name in q.mean if biases.get(name, name) == layer} for layer in q.mean if layer in task.bases]
    for size in (*sizes, 1.0):
        for layer in layers if size > 1 else [set[str]()]:
            for factor in (size, 1 / size) if size > 1 else (1.0,):
                tried = {name: s * (factor if name in layer else 1.0) for name, s in best.items()}
                q.set_scale(lambda name, tried=tried: tried[name])
                reach = max(size, 1.3)
                c, values = find_largest_factor(
                    validation.evaluator(q), max_risk, base_risk, low=1 / reach, high=reach, halvings=6
                )
                q.scale_by(c)
                better = (q.mean_log_square() > entropy) & (values[0] <= max_risk)
                scale = q.scale()
                best = {n: torch.where(better.view(-1, *[1] * (s.ndim - 1)), scale[n], s) for n, s in best.items()}
                entropy = torch.where(better, q.mean_log_square(), entropy)
                if bool(better.all()):  # the other way would be worse
                    break
    q.set_scale(lambda name: best[name])


def fit_sizes(nets: StackedModel, task: solve.Task, config: Config, *, first: bool) -> tuple[Stochastic, int]:
    """φ of every layer times the root of how many weights it has, `first` in the closed form, or after the default's steps.

    Of all factors with Σ c_l² = C these have the most entropy, Σ n_l log c_l: the derivative n_l/c_l − 2 μ c_l is zero.
    """
    q = task.q
    if first:
        shape = solve.find_shape(task)
        q.set_scale(unit_scale(dict(q.mean.items()), task.bases, eps=shape["eps"]))
        scale_layers(task, 1e-3, 1e3)
        q.scale_by(config.init_fraction)
        history = solve.descend(task, History(), solve.as_floats(config.entropy_weight)[0])
        return Stochastic(task.validation.model, q, history), history.step[-1]
    fitted, steps = fit_default(nets, task, config)
    scale_layers(task, 0.1, 10.0)
    return fitted, steps


@torch.no_grad()
def scale_layers(task: solve.Task, low: float, high: float) -> None:
    """Multiply each layer's φ by the root of its share of the weights, then all by the largest factor that τ allows."""
    q, biases = task.q, {b.bias: n for n, b in task.bases.items()}
    counts = {name: mean[0].numel() for name, mean in q.mean.items()}
    largest = max(counts.values())
    scale = {name: s * (counts[biases.get(name, name)] / largest) ** 0.5 for name, s in q.scale().items()}
    q.set_scale(lambda name: scale[name])
    evaluate, base_risk = task.validation.evaluator(q), task.validation.base_risk(q)
    q.scale_by(find_largest_factor(evaluate, task.max_risk, base_risk, low=low, high=high, halvings=8).factor)


def fit_averaged(
    nets: StackedModel, task: solve.Task, config: Config, *, first: str = "refine", turn: bool = True
) -> tuple[Stochastic, int]:  # fmt: skip
    """Amplitudes and directions of layer inputs under the draws of a first fit; then the fit by them."""
    start = replace(task, config=replace(config, solver=first))
    steps = fit_default(nets, start, start.config)[1]
    fitted, more = fit_default(nets, observe_draws(nets, task, turn=turn), config)
    return fitted, steps + more


@torch.no_grad()
def observe_draws(nets: StackedModel, task: solve.Task, *, turn: bool, draws: int = 10, rows: int = 1_000) -> solve.Task:
    """The task with second moments of layer inputs under q instead of under the trained nets: E_q[h hᵀ]."""
    q, x = task.q, task.train.inputs[:rows]  # pyright: ignore[reportAttributeAccessIssue]
    weights = q.draw(range(draws), seed=task.validation.seed, stream="fit")
    drawn = [
        at(weights, index) | {n: f for n, f in nets.weights(0).items() if n not in weights} for index in range(q.members * draws)
    ]
    parts = second_moments(nets.module, drawn, [x], first_tensor, among=nets.mean)
    merged = [parts[draws * member] for member in range(q.members)]
    for member, whole in enumerate(merged):
        for part in parts[draws * member + 1 : draws * (member + 1)]:
            for name, moment in part.items():
                for key, total in moment.totals.items():
                    whole[name].totals[key].products += total.products
                    whole[name].totals[key].rows += total.rows
    along = None if turn else {name: b.matrix for name, b in task.bases.items() if b.matrix is not None}
    bases, why = build_bases(merged, nets.mean, rotated=turn, along=along)
    rotation = Observed(bases, why).rotation()
    turned = WeightDistribution(nets.mean, initial_scale=1.0, rotation=rotation, fixed=nets.fixed, noise=q.noise)
    return replace(task, q=turned, bases=bases)


@dataclass(frozen=True)
class Way:
    """A configuration and how it is fitted."""

    config: Config = CONFIGS["default"]
    fit: Solver = fit_default


DEFAULT = CONFIGS["default"]
CLOSED = replace(DEFAULT, solver="closed-form")
WAYS: dict[str, Way] = {
    "default": Way(),
    "up to 2,000 steps": Way(replace(DEFAULT, steps=2_000)),
    "500 steps, then 1,000, lr 0.005": Way(fit=fit_on),
    "four draws a step": Way(replace(DEFAULT, draws_per_step=4)),
    "λ of 30, 100, 300": Way(replace(DEFAULT, entropy_weight=(30.0, 100.0, 300.0))),
    "the last factor to 1 %": Way(fit=partial(fit_layers, sizes=())),
    "c of layers": Way(fit=fit_layers),
    "c ∝ √n of layers, first": Way(fit=partial(fit_sizes, first=True)),
    "c ∝ √n of layers, last": Way(fit=partial(fit_sizes, first=False)),
    "closed form": Way(CLOSED),
    "closed form, c of layers": Way(CLOSED, fit_layers),
    "amplitudes under q, 500 + 500 steps": Way(fit=fit_averaged),
    "amplitudes under q, 0 + 500 steps": Way(fit=partial(fit_averaged, first="closed-form")),
    "the same with V of the nets": Way(fit=partial(fit_averaged, first="closed-form", turn=False)),
    "the paper's 50,000 steps": Way(PAPER),
}
EARLY = ("bike, extrapolation", "elec2, extrapolation", "diabetes, extrapolation", "arm, interpolation", "turbine, extrapolation")
SCORES = ("paper ×1", "paper ×3", "epistemic ×1", "epistemic ×3")
WHOLE = ("default", "c ∝ √n of layers, first", "c of layers", "amplitudes under q, 500 + 500 steps")


def measure(name: str, seed: int, way: str) -> dict[str, float]:
    """AUROC of the paper's score and of the epistemic variance with one and three nets; entropy, risk, seconds and steps."""
    data, config = TASKS[name](seed), WAYS[way].config
    trained = models(data, seed, RECIPE)
    nets = choose(stack_models(trained), data.train[0], config.params, first_tensor)
    train, valid, likelihood = prepare(trained, data, RECIPE.batch_size)
    options: dict[str, Any] = {"likelihood": likelihood, "config": config, "seed": seed, "runtime": SILENT}
    task, preparing = time_work(lambda: solve.prepare(nets, train, valid, **options))
    (fitted, steps), fitting = time_work(lambda: WAYS[way].fit(nets, task, config))
    with torch.no_grad():
        risk, base = task.validation.evaluate(fitted.q).risk, task.validation.base_risk(fitted.q)
        outputs = [fitted.outputs(x, DRAWS, clip=None, seed=seed) for x in (data.test[0], *data.ood.values())]
    entropy = fitted.q.mean_log_square().detach()
    result = {"entropy": float(entropy.mean()), "risk": float(((risk - base) / (task.max_risk - base)).mean())}
    for label, score in (("paper", likelihood.score), ("epistemic", likelihood.epistemic)):
        result[f"{label} ×3"] = float(auroc(*(score(o) for o in outputs)))
        members = zip(*(o.unflatten(0, (task.q.members, -1)) for o in outputs), strict=True)
        result[f"{label} ×1"] = fmean(float(auroc(*(score(o) for o in each))) for each in members)
    return {key: round(value, 4) for key, value in result.items()} | {"seconds": round(preparing + fitting, 2), "steps": steps}


FEW = tuple(way for way in WAYS if "paper" not in way)


def cells() -> dict[str, Callable[[], Any]]:
    """All ways on few tasks, then some of them on all, then all ways with another seed."""
    few = [[(name, seed, way) for name in EARLY for way in FEW] for seed in (0, 1)]
    whole = [(name, seed, way) for seed in SEEDS for name in TASKS for way in WHOLE]
    return {label(*each): partial(measure, *each) for each in (*few[0], *whole, *few[1])}


def label(name: str, seed: int, way: str) -> str:
    """The name of a cell."""
    return f"{name}, seed {seed}: {way}"


def collect(runs: Runs, names: Iterable[str], ways: Sequence[str]) -> dict[str, list[Runs]]:
    """By task, the runs of all the ways for each seed that has them all."""
    seeds = {name: [seed for seed in SEEDS if all(label(name, seed, way) in runs for way in ways)] for name in names}
    return {name: [{way: runs[label(name, seed, way)] for way in ways} for seed in each] for name, each in seeds.items() if each}


def gain(found: list[Runs], way: str, key: str) -> float:
    """The mean over seeds of what a way has more than the default, in points."""
    return 100 * fmean(run[way][key] - run["default"][key] for run in found)


def compare(found: dict[str, list[Runs]], ways: Sequence[str]) -> str:
    """A table: means over tasks and seeds, and gains of the paper's score over the default, by task."""
    rows = list[list[str]]()
    for way in ways:
        runs = [run[way] for each in found.values() for run in each]
        row = [way, *(percent(fmean(run[key] for run in runs)) for key in SCORES)]
        row += [format_signed(fmean(run["entropy"] for run in runs)), f"{fmean(run['steps'] for run in runs):.0f}"]
        row += [f"{fmean(run['seconds'] for run in runs):.1f}"]
        for key in SCORES[:2]:
            gains = [gain(each, way, key) for each in found.values()]
            error, up, down = stdev(gains) / math.sqrt(len(gains)), sum(g > 0.5 for g in gains), sum(g < -0.5 for g in gains)
            cells = f"{format_signed(fmean(gains), 1)} ± {error:.1f}", f"{up} / {down}", format_signed(min(gains), 1)
            row += ["", "", ""] if way == "default" else cells
        rows.append(row)
    score = ["gain", "up / down", "least"]
    return format_table(["", *SCORES, "entropy", "steps", "s", *(f"{word} {n}" for n in ("×1", "×3") for word in score)], rows)


def fields(runs: Runs) -> dict[str, Any]:
    """Two tables of means and gains, and the gains by task, of what is on record."""
    few, whole = collect(runs, EARLY, FEW), collect(runs, TASKS, WHOLE)
    ways = [way for way in WHOLE if way != "default"]
    rows = list[list[str]]()
    for name, each in whole.items():
        gains = [format_signed(gain(each, way, "paper ×3"), 1) for way in ways]
        rows.append([name, percent(fmean(run["default"]["paper ×3"] for run in each)), *gains])
    counts = {"few_runs": sum(map(len, few.values())), "whole_runs": sum(map(len, whole.values())), "whole_tasks": len(whole)}
    tables = {"few": compare(few, FEW), "whole": compare(whole, WHOLE), "gains": format_table(["", "default", *ways], rows)}
    return {**tables, **counts, "few_tasks": len(few)}


STUDY = Study("schedules", cells, fields)
