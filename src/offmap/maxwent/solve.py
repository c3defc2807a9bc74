"""MaxWEnt: the widest weight distribution around trained models that still explains the data."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from offmap.data import Batches, Rows, Shard
from offmap.distributed.group import Group
from offmap.likelihoods import Likelihood
from offmap.maxwent import closed_form, objective, search
from offmap.maxwent.checkpoint import Descent, observe_once
from offmap.maxwent.config import CONFIGS, Config, Runtime
from offmap.maxwent.risk import Validation, as_risk
from offmap.maxwent.train import Cycle, RiskMonitor, adam, minimize
from offmap.model.forward import BatchedModel
from offmap.model.params import StackedModel, choose, find_last_layer, stack_models
from offmap.posterior.basis import Feed, Observed, observe
from offmap.posterior.distribution import WeightDistribution
from offmap.posterior.noise import as_noise
from offmap.posterior.predictive import History, Stochastic
from offmap.progress import bar

logger = logging.getLogger("offmap")


@dataclass(frozen=True)
class Task:
    """What every solver is given."""

    models: StackedModel
    model: BatchedModel
    train: Batches
    likelihood: Likelihood
    config: Config
    validation: Validation
    observed: Observed
    seed: int
    runtime: Runtime

    def distribution(self, initial_scale: float | Callable[[str], Tensor]) -> WeightDistribution:
        """Return q around the members, in the basis that the configuration asks for."""
        return WeightDistribution(
            self.models.mean,
            initial_scale=initial_scale,
            rotation=self.observed.rotation(),
            fixed=self.models.fixed,
            noise=as_noise(self.config.noise),
            parameterization=self.config.parameterization,
        )

    def max_risk(self, q: WeightDistribution) -> Tensor:
        """Return τ per member, (M,)."""
        if self.config.max_risk is not None:
            return torch.full((q.members,), float(self.config.max_risk), device=self.models.device)
        return self.validation.max_risk(q, tolerance=self.config.tolerance)


def fit(
    nets: nn.Module | Sequence[nn.Module] | StackedModel,
    train: Batches,
    valid: Rows,
    *,
    likelihood: Likelihood,
    config: Config = CONFIGS["default"],
    seed: int = 0,
    runtime: Runtime = Runtime(),
) -> Stochastic:
    """Centre a distribution on trained nets and widen it until the validation risk reaches τ, every member on its own.

    Args:
        nets: Trained nets, which are copied, or a StackedModel whose random parameters are already chosen.
        train: Training batches, for the basis and the gradient steps.
        valid: Validation rows, for the risk.
        likelihood: Compares outputs with targets.
        config: The options of MaxWEnt.
        seed: Decides noise and order.
        runtime: How models run.
    """
    models = (
        nets if isinstance(nets, StackedModel) else choose(stack_models(nets), valid.inputs, config.params, runtime.output_fn)
    )
    model = runtime.model(models.module, models.mean | models.fixed, valid.inputs)
    last_layer = find_last_layer(models.module, models.mean, models.weights(0), valid.inputs, runtime.output_fn)
    model = replace(model, last_layer=last_layer)
    validation = Validation(model, likelihood, valid, as_risk(config.risk), config.risk_draws, seed, group=runtime.group)
    if config.clip_loss and config.max_risk is None:
        validation = validation.clip_losses(models.mean | models.fixed)
    observed = observe_inputs(models, train, config, runtime)
    task = Task(models, model, train, likelihood, config, validation, observed, seed, runtime)
    solve = SOLVERS[config.solver]
    fits = [solve(replace(task, config=replace(config, entropy_weight=w))) for w in as_floats(config.entropy_weight)]
    q, history = select_highest_entropy(fits)
    q.requires_grad_(False)
    runtime.group.broadcast(*q.raw_scale.values())
    if any(risk > bound for risk, bound in zip(history.final_risk, history.max_risk, strict=True)):
        logger.warning(
            "The validation risk %s stays above the threshold %s however small the distribution: raise `max_risk`, or check "
            "that `valid` is like the data the model was trained on.", history.final_risk, history.max_risk,
        )  # fmt: skip
    return Stochastic(model, q, history)


def observe_inputs(models: StackedModel, train: Batches, config: Config, runtime: Runtime) -> Observed:
    """Return the sizes and directions of the layer inputs over the training data, where the solver needs them."""
    if config.basis != "svd" and config.solver == "sgd":
        return Observed()
    rotated = config.basis == "svd" and config.parameterization is None
    options: dict[str, Any] = {"rotated": rotated, "output_fn": runtime.output_fn, "limit": config.fan_in_limit}
    options |= {"group": runtime.group, "shard": shard_feed(train, runtime.group, sharded=runtime.sharded)}
    if runtime.checkpoint is None:
        return observe(models, feed_inputs(train), **options)
    return observe_once(runtime.checkpoint, train, models.device, lambda: observe(models, feed_inputs(train), **options))


def feed_inputs(train: Batches) -> Feed:
    """Return the inputs of the training data as a function of the batch size; that of a stream is its own."""
    return lambda rows: (x for x, _ in _resize(train, rows))


def shard_feed(train: Batches, group: Group, *, sharded: bool) -> Feed:
    """Return every process's own batches: each N-th of them, or all if its rows are its own, `sharded`."""
    return feed_inputs(train if sharded or group.size == 1 else replace(train, shard=Shard(group, "batches")))


def _resize(train: Batches, rows: int) -> Batches:
    return replace(train, batch_size=max(rows, train.batch_size)) if isinstance(train, Rows) else train


def as_floats(option: float | Sequence[float]) -> list[float]:
    """Return the values to try of an option that may have several."""
    return [float(option)] if isinstance(option, int | float) else [float(value) for value in option]


def select_highest_entropy(fits: Sequence[tuple[WeightDistribution, History]]) -> tuple[WeightDistribution, History]:
    """Return the fit of highest mean entropy, of those that did not diverge if there are any (appendix B of the paper)."""

    def entropy(q: WeightDistribution) -> float:
        # (1/d) Σ log φ², which Rademacher noise has too; a user's own ω has its entropy alone
        values = q.entropy() if q.parameterization is not None else q.mean_log_square()
        return float(values.detach().mean())

    converged = [fit for fit in fits if fit[1].stop_reason != "diverged"]
    return max(converged or fits, key=lambda fit: entropy(fit[0]))


def solve_closed_form(task: Task) -> tuple[WeightDistribution, History]:
    """Set φ to c times the geometry of the layer inputs, without gradient steps."""
    q, history, (risk, uncertainty) = _fit_shape(task)
    history.finish(risk, q.mean_log_square().detach())
    history.add(0, float("nan"), risk, q.mean_log_square().detach(), uncertainty)
    return q, history


def solve_refine(task: Task) -> tuple[WeightDistribution, History]:
    """Take gradient steps from a fraction of the closed form: the right geometry is worth tens of thousands of steps."""
    q, history, _ = _fit_shape(task)
    q.scale_by(float(task.config.init_fraction))
    return _descend(task, q, History(chosen=history.chosen))


def solve_sgd(task: Task) -> tuple[WeightDistribution, History]:
    """Run algorithm 1 from a small constant φ."""
    raw = task.config.initial_raw_scale
    raw = raw if raw is not None else (-10.0 if task.config.basis == "svd" else -5.0)
    scale = float(raw) if raw > 30 else math.log1p(math.exp(raw))  # softplus
    return _descend(task, task.distribution(scale), History())


SOLVERS: dict[str, Callable[[Task], tuple[WeightDistribution, History]]] = {
    "refine": solve_refine, "closed-form": solve_closed_form, "sgd": solve_sgd,
}  # fmt: skip


def _fit_shape(task: Task) -> tuple[WeightDistribution, History, tuple[Tensor, Tensor]]:
    """Return the closed form with the ε of highest entropy, at the largest c whose risk is at most τ, for every member, with
    its risk and uncertainty.

    The search is rough for every ε, and by all draws and rows for the best. One q takes one shape after another: models may be
    large.
    """
    shape, validation = partial(closed_form.unit_scale, task.models.mean, task.observed.bases), task.validation
    checkpoint = task.runtime.checkpoint
    part = None if checkpoint is None else checkpoint["shape"]
    if part is None:
        eps_values, factors, entropies = as_floats(task.config.eps), list[Tensor](), list[Tensor]()
        q = task.distribution(shape(eps=eps_values[0]))
        max_risk = task.max_risk(q)
        few, few_max_risk = validation.subsample(q, max_risk)
        few_base = few.base_risk(q)
        for eps in eps_values:
            q.set_scale(shape(eps=eps))
            factors.append(search.find_largest_factor(few.evaluator(q), few_max_risk, few_base).factor)
            entropies.append(q.mean_log_square().detach() + 2 * factors[-1].log())  # a graph would hold φ
        best = torch.stack(entropies).argmax(0, keepdim=True)
        eps, guess = torch.tensor(eps_values, device=best.device)[best[0]], torch.stack(factors).gather(0, best)[0]
        q.set_scale(shape(eps=eps))
        optimum = search.find_largest_factor_near(guess, validation.evaluator(q), max_risk, validation.base_risk(q))
        q.scale_by(optimum.factor)
        risk, uncertainty = optimum.fill_values(lambda: validation.evaluate(q))
        result = {"max_risk": max_risk, "eps": eps, "factor": optimum.factor, "risk": risk, "uncertainty": uncertainty}
        if checkpoint is not None:
            checkpoint.keep("shape", {}, result)
    else:
        result = {name: tensor.to(task.models.device) for name, tensor in part.tensors.items()}
        q = task.distribution(shape(eps=result["eps"]))
        q.scale_by(result["factor"])
    chosen = {"factor": float(result["factor"].mean()), "eps": float(result["eps"].log().mean().exp())}
    history = History(max_risk=result["max_risk"].tolist(), kept=[0] * q.members, stop_reason="finished", chosen=chosen)
    return q, history, (result["risk"], result["uncertainty"])


def _descend(task: Task, q: WeightDistribution, history: History) -> tuple[WeightDistribution, History]:
    """Take Adam steps on the objective; every member ends with its last state at or below τ."""
    config, max_risk, runtime = task.config, task.max_risk(q), task.runtime
    assert isinstance(config.entropy_weight, float)
    runtime.group.broadcast(*q.raw_scale.values())
    name = f"steps.{config.entropy_weight!r}"
    begun = runtime.checkpoint is not None and runtime.checkpoint[name] is not None
    start = None if begun else search.shrink_to_feasible(q, task.validation, max_risk)
    loss = objective.maxwent(
        q, task.model, task.likelihood, entropy_weight=config.entropy_weight, growth=objective.as_growth(config.regularizer),
        draws=config.draws_per_step, seed=task.seed,
    )  # fmt: skip
    optimizer = adam(q.raw_scale.parameters(), lr=config.lr, epsilon=config.adam_epsilon)
    divided = runtime.group.size > 1 and not runtime.sharded
    data = replace(task.train, shard=Shard(runtime.group, "rows")) if divided else task.train
    with bar("MaxWEnt", config.steps, show=runtime.progress) as advance:
        monitor = RiskMonitor(
            q, task.validation.evaluate, max_risk, every=config.check_every, history=history, patience=config.patience,
            report=lambda step, h: advance(step, h.describe()),
        )  # fmt: skip
        cycle = Cycle(data, task.seed)
        descent = None if runtime.checkpoint is None else Descent(runtime.checkpoint, name, q, monitor, optimizer, cycle)
        if descent is not None and descent.resume() is not None:
            return q, history
        steps_before = 0 if descent is None else descent.step
        if not steps_before:
            monitor.check(0, float("nan"), start)
        history.stop_reason = "stopped" if monitor.finished else minimize(
            loss, optimizer, cycle, steps=config.steps, monitors=[monitor] if descent is None else [monitor, descent],
            start=steps_before, group=runtime.group,
        )  # fmt: skip
        if history.stop_reason == "finished" and config.steps % config.check_every:
            monitor.check(config.steps, float("nan"))
    monitor.restore()
    values = tuple(max_risk.new_tensor(value) for value in history.of_kept())
    if config.rescale:
        values = _rescale(task, q, max_risk, values)
    history.finish(values[0], q.mean_log_square().detach())
    history.chosen["entropy_weight"] = config.entropy_weight
    if descent is not None:
        descent.end()
    if history.stop_reason == "diverged":
        logger.warning(
            "Training diverged (the loss is not finite); every member keeps its last state below the risk threshold, from "
            "steps %s. Lower `lr` or `entropy_weight` to go further.", history.kept,
        )  # fmt: skip
    return q, history


def _rescale(task: Task, q: WeightDistribution, max_risk: Tensor, values: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Multiply φ by the largest factor per member, up to 10, that keeps the risk at or below τ.

    Takes risk and uncertainty before, (M,) each, and returns those after.
    """
    evaluate, base_risk = task.validation.evaluator(q), task.validation.base_risk(q)
    result = search.find_largest_factor(evaluate, max_risk, base_risk, start=values, low=1.0, high=10.0, halvings=6)
    q.scale_by(result.factor)
    return result.values
