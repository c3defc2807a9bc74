"""MaxWEnt: the widest weight distribution around trained models that still explains the data."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from offmap._types import Weights
from offmap.data import Batches, Rows, Shard
from offmap.distributed.group import SINGLE_PROCESS, Group
from offmap.likelihoods import Likelihood
from offmap.maxwent.checkpoint import Descent, keep_once, observe_once
from offmap.maxwent.config import CONFIGS, Config, Runtime
from offmap.maxwent.risk import Validation, as_risk
from offmap.maxwent.search import find_largest_factor, find_largest_factor_near, shrink_to_feasible, unit_scale
from offmap.maxwent.train import Cycle, RiskMonitor, adam, as_growth, maxwent, minimize, wander
from offmap.model.forward import BatchedModel, find_last_layer
from offmap.model.params import StackedModel, choose, stack_models
from offmap.posterior.basis import Basis, Feed, Observed, observe
from offmap.posterior.distribution import WeightDistribution
from offmap.posterior.noise import as_noise
from offmap.posterior.parameterization import WeightLaw, as_law
from offmap.posterior.predictive import History, Stochastic
from offmap.progress import bar

logger: logging.Logger = logging.getLogger("offmap")

STATE_RATE = 0.03
"""The learning rate of what a parameterization trains beside φ, as a fraction of φ's."""


@dataclass(frozen=True)
class Task:
    """A distribution to widen, the validation risk that bounds it, and what else `solve` needs."""

    q: WeightDistribution
    bases: Mapping[str, Basis]
    train: Batches
    validation: Validation
    max_risk: Tensor  # τ of every member, (M,)
    config: Config
    runtime: Runtime
    watch: Callable[[Stochastic], None] | None


def prepare(
    models: nn.Module | Sequence[nn.Module] | StackedModel, train: Batches, valid: Rows, *, likelihood: Likelihood,
    config: Config = CONFIGS["default"], seed: int = 0, runtime: Runtime = Runtime(),
    watch: Callable[[Stochastic], None] | None = None,
) -> Task:  # fmt: skip
    """Centre a distribution on trained models, and find the validation risk τ that every member may reach."""
    if not isinstance(models, StackedModel):
        models = choose(stack_models(models), valid.inputs, config.params, runtime.output_fn)
    last_layer = find_last_layer(models.module, models.mean, models.weights(0), valid.inputs, runtime.output_fn)
    model = replace(runtime.model(models.module, models.mean | models.fixed, valid.inputs), last_layer=last_layer)
    law = None if config.parameterization is None else as_law(config.parameterization)
    directions = find_directions(law, models, model, train, likelihood, seed, runtime) if law is not None and law.spans else None
    runtime.status.text = "layer inputs of the training data"
    observed = Observed() if directions else observe_inputs(models, train, config, runtime, rotated=law is None or law.rotated)
    closed_form = config.solver != "sgd" and not directions
    initial_scale = unit_scale(models.mean, observed.bases, eps=as_floats(config.eps)[0]) if closed_form else 1.0
    q = WeightDistribution(
        models.mean, initial_scale=initial_scale, rotation=observed.rotation(), fixed=models.fixed,
        noise=as_noise(config.noise), parameterization=law, directions=directions,
    )  # fmt: skip
    runtime.status.text = "risk of the validation data"
    validation = Validation(model, likelihood, valid, as_risk(config.risk), config.risk_draws, seed, group=runtime.group)
    if config.max_risk is None:
        validation = validation.clip_losses(q) if config.clip_loss else validation
        max_risk = validation.max_risk(q, tolerance=config.tolerance)
    else:
        max_risk = torch.full((q.members,), float(config.max_risk), device=models.device)
    return Task(q, observed.bases, train, validation, max_risk, config, runtime, watch)


def fit(models: nn.Module | Sequence[nn.Module] | StackedModel, train: Batches, valid: Rows, **options: Any) -> Stochastic:
    """Centre a distribution on trained models and widen it until the validation risk reaches τ, every member on its own.

    The random parameters of a StackedModel are already chosen; others are copied. Options are those of `prepare`; `watch` sees q
    at every check of the risk.
    """
    task = prepare(models, train, valid, **options)
    q, config, runtime = task.q, task.config, task.runtime
    shape = {} if config.solver == "sgd" else find_shape(task)
    weights, fits = as_floats(config.entropy_weight), list[tuple[bool, float, History, list[Tensor]]]()
    for weight in weights:
        history = solve(task, shape, weight)
        # Rademacher noise has this figure too; another law may have its entropy alone
        entropy = q.entropy() if q.parameterization is not None else q.mean_log_square()
        state = [tensor.detach().clone() if len(weights) > 1 else tensor for tensor in q.trained().values()]
        fits.append((history.stop_reason != "diverged", float(entropy.detach().mean()), history, state))
    *_, history, state = max(fits, key=lambda fit: fit[:2])  # appendix B of the paper
    q.requires_grad_(False)
    for tensor, best in zip(q.trained().values(), state, strict=True):
        tensor.copy_(best)
    runtime.group.broadcast(*q.trained().values())
    if any(risk > bound for risk, bound in zip(history.final_risk, history.max_risk, strict=True)):
        logger.warning(
            "The validation risk %s stays above `max_risk` %s however small the distribution: raise `max_risk`, or check "
            "that `valid` is like the data the model was trained on.", history.final_risk, history.max_risk,
        )  # fmt: skip
    return Stochastic(task.validation.model, q, history)


def as_floats(option: float | Sequence[float]) -> list[float]:
    """Return the values to try of an option that may have several."""
    return [float(option)] if isinstance(option, int | float) else [float(value) for value in option]


def find_directions(
    law: WeightLaw, models: StackedModel, model: BatchedModel, train: Batches, likelihood: Likelihood, seed: int, runtime: Runtime
) -> Weights:
    """Return the directions that stand for all parameters, {name: (M, k, ...)}."""
    runtime.status.text = "directions of gradient steps"
    cycle, group = make_cycle(train, seed, runtime), runtime.group
    walk = partial(wander, model, models.mean, models.fixed, likelihood, cycle, group=group)
    find = partial(law.directions, models.mean, walk, seed)
    directions = keep_once(runtime.checkpoint, "directions", train, models.device, find)
    group.broadcast(*directions.values())
    return directions


def make_cycle(train: Batches, seed: int, runtime: Runtime) -> Cycle:
    """Return batches without end; processes that were given the same rows divide them."""
    divided = runtime.group.size > 1 and not runtime.sharded
    return Cycle(replace(train, shard=Shard(runtime.group, "rows")) if divided else train, seed)


def observe_inputs(models: StackedModel, train: Batches, config: Config, runtime: Runtime, *, rotated: bool = True) -> Observed:
    """Return the sizes and directions of the layer inputs over the training data, where the solver needs them."""
    if config.basis != "svd" and config.solver == "sgd":
        return Observed()
    look = partial(
        observe, models, feed_inputs(train), rotated=rotated and config.basis == "svd",
        output_fn=runtime.output_fn, limit=config.fan_in_limit, group=runtime.group,
        shard=feed_inputs(train, runtime.group, sharded=runtime.sharded),
    )  # fmt: skip
    return look() if runtime.checkpoint is None else observe_once(runtime.checkpoint, train, models.device, look)


def feed_inputs(train: Batches, group: Group = SINGLE_PROCESS, *, sharded: bool = False) -> Feed:
    """Return the inputs by batch size (a stream has its own); each of N processes has every N-th batch, or `sharded` rows."""
    data = train if sharded or group.size == 1 else replace(train, shard=Shard(group, "batches"))
    return lambda rows: (x for x, _ in (replace(data, batch_size=max(rows, data.batch_size)) if isinstance(data, Rows) else data))


def find_shape(task: Task) -> Weights:
    """Find the ε of highest entropy, roughly, and with it the largest c whose risk is at most τ; (M,) each."""
    q, validation, max_risk, checkpoint = task.q, task.validation, task.max_risk, task.runtime.checkpoint
    part = None if checkpoint is None else checkpoint["shape"]
    if part is not None:
        return {name: tensor.to(max_risk.device) for name, tensor in part.tensors.items()}
    # directions have no amplitudes of inputs: all of them start with one φ
    shape = partial(unit_scale, dict(q.mean.items()), task.bases) if not len(q.directions) else lambda eps: 1.0
    eps_values = as_floats(task.config.eps)[: 1 if len(q.directions) else None]
    factors, entropies = list[Tensor](), list[Tensor]()
    few, few_max_risk, few_base = validation.subsample(q, max_risk)
    for value in eps_values:  # one q takes one shape after another: models may be large
        q.set_scale(shape(eps=value))
        factors.append(find_largest_factor(few.evaluator(q), few_max_risk, few_base).factor)
        entropies.append(q.mean_log_square().detach() + 2 * factors[-1].log())  # a graph would hold φ
    best = torch.stack(entropies).argmax(0, keepdim=True)
    eps, guess = torch.tensor(eps_values, device=best.device)[best[0]], torch.stack(factors).gather(0, best)[0]
    q.set_scale(shape(eps=eps))
    factor, values = find_largest_factor_near(guess, validation.evaluator(q), max_risk, validation.base_risk(q))
    risk, uncertainty = values
    if bool(risk.isnan().any()):  # the lowest factor, which was not evaluated
        q.scale_by(factor)
        now = validation.evaluate(q)
        risk, uncertainty = risk.where(~risk.isnan(), now.risk), uncertainty.where(~risk.isnan(), now.uncertainty)
    result = {"eps": eps, "factor": factor, "risk": risk, "uncertainty": uncertainty}
    if checkpoint is not None:
        checkpoint.keep("shape", {}, result)
    return result


def solve(task: Task, shape: Weights, entropy_weight: float) -> History:
    """Find φ: by the closed form of `find_shape`, by gradient steps from a fraction of it, or from a small constant."""
    q, config, history = task.q, task.config, History()
    if config.solver == "sgd":
        default = -10.0 if config.basis == "svd" else -5.0
        raw = default if config.initial_raw_scale is None else float(config.initial_raw_scale)
        q.restart(raw if raw > 30 else math.log1p(math.exp(raw)))  # softplus
        return descend(task, history, entropy_weight)
    q.restart(1.0 if len(q.directions) else unit_scale(dict(q.mean.items()), task.bases, eps=shape["eps"]))
    q.scale_by(shape["factor"])
    history.chosen.update(factor=float(shape["factor"].mean()), eps=float(shape["eps"].log().mean().exp()))
    if config.solver == "refine":  # the right geometry is worth tens of thousands of steps
        q.scale_by(float(config.init_fraction))
        return descend(task, history, entropy_weight)
    entropy = q.mean_log_square().detach()
    history.max_risk, history.kept, history.stop_reason = task.max_risk.tolist(), [0] * q.members, "finished"
    history.add(0, math.nan, shape["risk"], entropy, shape["uncertainty"])
    history.finish(shape["risk"], entropy)
    if task.watch is not None:
        task.watch(Stochastic(task.validation.model, q, history))
    return history


def descend(task: Task, history: History, entropy_weight: float) -> History:
    """Take Adam steps on the objective; every member ends with its last state at or below τ."""
    q, config, runtime, validation, max_risk = task.q, task.config, task.runtime, task.validation, task.max_risk
    checkpoint, name, seed = runtime.checkpoint, f"steps.{entropy_weight!r}", validation.seed
    runtime.group.broadcast(*q.trained().values())
    start = shrink_to_feasible(q, validation, max_risk) if checkpoint is None or checkpoint[name] is None else None
    loss = maxwent(
        q, validation.model, validation.likelihood, entropy_weight=entropy_weight, growth=as_growth(config.regularizer),
        draws=config.draws_per_step, seed=seed,
    )  # fmt: skip
    # coherent changes of many weights at once are felt sooner than those of φ
    state = [{"params": [*q.state.values()], "lr": STATE_RATE * config.lr}] if len(q.state) else []
    optimizer = adam([{"params": [*q.raw_scale.values()]}, *state], lr=config.lr, epsilon=config.adam_epsilon)
    cycle = make_cycle(task.train, seed, runtime)
    silent, title, show = runtime.progress is False, "MaxWEnt, step", runtime.progress
    with nullcontext() if silent else bar(title, config.steps, show=show, status=runtime.status) as advance:

        def report(step: int, text: str) -> None:
            if advance is not None:
                advance(step, text)
            if task.watch is not None:
                task.watch(Stochastic(validation.model, q, history))

        monitor = RiskMonitor(
            q, validation.evaluate, max_risk, every=config.check_every, history=history, patience=config.patience, report=report
        )
        descent = None if checkpoint is None else Descent(checkpoint, name, q, monitor, optimizer, cycle)
        if descent is not None and descent.resume() is not None:
            return history
        first = 0 if descent is None else descent.step
        if not first:
            monitor.check(0, math.nan, start)
        history.stop_reason = "stopped" if all(monitor.done) else minimize(
            loss, optimizer, cycle, steps=config.steps, start=first, group=runtime.group,
            monitors=[monitor] if descent is None else [monitor, descent],
        )  # fmt: skip
        if history.stop_reason == "finished" and config.steps % config.check_every:
            monitor.check(config.steps, math.nan)
    runtime.status.text = "risk of the validation data"
    monitor.restore()
    risk, _ = values = tuple(max_risk.new_tensor(value) for value in history.of_kept())
    if config.rescale:  # by the largest factor, up to 10, that the risk still allows
        evaluate, base_risk = validation.evaluator(q), validation.base_risk(q)
        factor, (risk, _) = find_largest_factor(evaluate, max_risk, base_risk, start=values, low=1.0, high=10.0, halvings=6)
        q.scale_by(factor)
    history.finish(risk, q.mean_log_square().detach())
    history.chosen["entropy_weight"] = entropy_weight
    if descent is not None:
        descent.end()
    if history.stop_reason == "diverged":
        logger.warning(
            "Training diverged (the loss is not finite); every member keeps its last state with a risk below τ, from "
            "steps %s. Lower `lr` or `entropy_weight` to go further.", history.kept,
        )  # fmt: skip
    return history
