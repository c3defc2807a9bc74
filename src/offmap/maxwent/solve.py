"""MaxWEnt: the widest weight distribution around trained models that still explains the data."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from offmap._types import Weights
from offmap.data import Batches, Rows, Shard
from offmap.likelihoods import Likelihood
from offmap.maxwent import closed_form, search
from offmap.maxwent import objective as objectives
from offmap.maxwent.checkpoint import Part
from offmap.maxwent.config import CONFIGS, Config, Runtime
from offmap.maxwent.feeding import feed_of, sharded_among
from offmap.maxwent.monitors import RiskThreshold
from offmap.maxwent.resume import Descent, seen_once
from offmap.maxwent.risk import Validation, as_risk
from offmap.maxwent.select import highest_entropy
from offmap.maxwent.train import Cycle, adam, minimize
from offmap.model.forward import BatchedModel
from offmap.model.select import StackedModel, choose, find_last_layer, stack_models
from offmap.posterior.construct import Observed, observe
from offmap.posterior.distribution import WeightDistribution
from offmap.posterior.noise import as_noise
from offmap.posterior.predictive import History, Stochastic
from offmap.progress import bar

logger = logging.getLogger("offmap")


@dataclass(frozen=True)
class Task:
    """What every solver is given."""

    at: StackedModel
    model: BatchedModel
    train: Batches
    likelihood: Likelihood
    config: Config
    validation: Validation
    seen: Observed
    seed: int
    runtime: Runtime

    def distribution(self, initial_scale: float | Callable[[str], Tensor]) -> WeightDistribution:
        """Q around the members, with the basis that the configuration asks for."""
        return WeightDistribution(
            self.at.mean,
            initial_scale=initial_scale,
            rotation=self.seen.rotation(),
            fixed=self.at.fixed,
            noise=as_noise(self.config.noise),
            parameterization=self.config.parameterization,
        )

    def max_risk(self, q: WeightDistribution) -> Tensor:
        """τ per member, (M,)."""
        if self.config.max_risk is not None:
            return torch.full((q.members,), float(self.config.max_risk), device=self.at.mean[next(iter(self.at.mean))].device)
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
    """Centre a distribution on the trained nets and widen it until the validation risk reaches τ, every member on its own.

    A Centre is taken as it is, with its random parameters already chosen; nets are copied, and `config.where` chooses.
    """
    at = nets if isinstance(nets, StackedModel) else choose(stack_models(nets), valid.inputs, config.params, runtime.output_fn)
    model = runtime.model(at.net, at.mean | at.fixed, valid.inputs)
    model = replace(model, last_layer=find_last_layer(at.net, at.mean, at.weights(0), valid.inputs, runtime.output_fn))
    needed = config.basis == "svd" or config.solver != "sgd"
    rotated = config.basis == "svd" and config.parameterization is None
    seen = Observed()
    if needed:
        dealt = sharded_among(train, runtime.group, sharded=runtime.sharded)
        look = partial(observe, rotated=rotated, pick=runtime.output_fn, limit=config.fan_in_limit, dealt=dealt)
        seen = seen_once(runtime.checkpoint, train, at.device, lambda: look(at, feed_of(train)))
    validation = Validation(model, likelihood, valid, as_risk(config.risk), config.risk_draws, seed, group=runtime.group)
    if config.clip_loss and config.max_risk is None:
        validation = validation.bounded(at.mean | at.fixed)
    task = Task(at, model, train, likelihood, config, validation, seen, seed, runtime)
    solver = SOLVERS[config.solver]
    fits = [solver(replace(task, config=replace(config, entropy_weight=t))) for t in several(config.entropy_weight)]
    q, history = highest_entropy(fits, lambda f: _spread(f[0]), lambda f: f[1].stop_reason != "diverged")
    q.requires_grad_(False)
    runtime.group.broadcast(*q.raw_scale.values())
    if any(risk > bound for risk, bound in zip(history.final_risk, history.max_risk, strict=True)):
        logger.warning(
            "The validation risk %s stays above the threshold %s however small the distribution: raise `max_risk`, or check "
            "that `valid` is like the data the model was trained on.", history.final_risk, history.max_risk,
        )  # fmt: skip
    return Stochastic(model, q, history)


def several(setting: float | Sequence[float]) -> list[float]:
    """The values to try of a setting that may have several."""
    return [float(setting)] if isinstance(setting, int | float) else [float(value) for value in setting]


def _spread(q: WeightDistribution) -> Tensor:
    """What fits are ranked by, (M,): the entropy of a user's own ω, else (1/d) Σ log φ², which Rademacher noise has too."""
    return q.entropy() if q.parameterization is not None else q.mean_log_square()


def solve_closed_form(task: Task) -> tuple[WeightDistribution, History]:
    """φ = c times the geometry of the activations, no gradient step."""
    q, history, (risk, uncertainty) = _shaped(task)
    history.finish(risk, q.mean_log_square().detach())
    history.add(0, float("nan"), risk, q.mean_log_square().detach(), uncertainty)
    return q, history


def _shaped(task: Task) -> tuple[WeightDistribution, History, tuple[Tensor, Tensor]]:
    """The closed form with the ε of highest entropy, at the largest c whose risk is at most τ, for every member; and what is seen
    of it on the validation rows.
    """
    shape = partial(closed_form.unit_scale, task.at.mean, task.seen.bases)
    known = task.runtime.checkpoint["shape"]
    if known is None:
        q = task.distribution(shape(eps=several(task.config.eps)[0]))
        found = _searched(task, q, lambda eps: q.set_scale(shape(eps=eps)))
        task.runtime.checkpoint.keep("shape", lambda: Part({}, found), always=True)
    else:
        found = {name: tensor.to(task.at.device) for name, tensor in known.tensors.items()}
        q = task.distribution(shape(eps=found["eps"]))
        q.scale_by(found["factor"])
    chosen = {"factor": float(found["factor"].mean()), "eps": float(found["eps"].log().mean().exp())}
    history = History(max_risk=found["max_risk"].tolist(), kept=[0] * q.members, stop_reason="finished", chosen=chosen)
    return q, history, (found["risk"], found["uncertainty"])


def _searched(task: Task, q: WeightDistribution, shape: Callable[[float | Tensor], None]) -> Weights:
    """τ, and ε, c, risk and uncertainty of the best shape of every member, (M,), which q ends with: sought roughly for every ε,
    by all draws and rows for the best. One q takes one shape after another: models may be large.
    """
    eps_values, validation = several(task.config.eps), task.validation
    max_risk = task.max_risk(q)
    few, near = validation.subsampled(q, max_risk)
    plain = few.plain(q)
    subsampled: list[tuple[Tensor, Tensor]] = []  # (entropy, c), (M,) each
    for eps in eps_values:
        shape(eps)
        about = search.find_largest_factor(few.along(q), near, plain).factor
        subsampled.append((q.mean_log_square().detach() + 2 * about.log(), about))  # a graph would hold φ
    best = torch.stack([entropy for entropy, _ in subsampled]).argmax(0, keepdim=True)
    eps, about = torch.tensor(eps_values, device=best.device)[best[0]], torch.stack([c for _, c in subsampled]).gather(0, best)[0]
    shape(eps)
    found = search.find_largest_factor_near(about, validation.along(q), max_risk, validation.plain(q))
    q.scale_by(found.factor)
    risk, uncertainty = search.seen_of(found, lambda: validation.look(q))
    return {"max_risk": max_risk, "eps": eps, "factor": found.factor, "risk": risk, "uncertainty": uncertainty}


def solve_refine(task: Task) -> tuple[WeightDistribution, History]:
    """Gradient steps from a share of the closed form: the right geometry is worth tens of thousands of steps."""
    q, history, _ = _shaped(task)
    q.scale_by(float(task.config.init_fraction))
    return _descend(task, q, History(chosen=history.chosen))


def solve_sgd(task: Task) -> tuple[WeightDistribution, History]:
    """Algorithm 1 from a small constant φ."""
    raw = task.config.initial_raw_scale
    raw = raw if raw is not None else (-10.0 if task.config.basis == "svd" else -5.0)
    scale = float(raw) if raw > 30 else math.log1p(math.exp(raw))  # softplus
    return _descend(task, task.distribution(scale), History())


def _descend(task: Task, q: WeightDistribution, history: History) -> tuple[WeightDistribution, History]:
    """Adam on the objective; every member ends with its last state at or below τ."""
    config, max_risk, group = task.config, task.max_risk(q), task.runtime.group
    assert isinstance(config.entropy_weight, float)
    group.broadcast(*q.raw_scale.values())
    name = f"steps.{config.entropy_weight!r}"
    start = search.shrink_to_feasible(q, task.validation, max_risk) if task.runtime.checkpoint[name] is None else None
    objective = objectives.maxwent(
        q, task.model, task.likelihood, entropy_weight=config.entropy_weight, growth=objectives.as_growth(config.regularizer),
        draws=config.draws_per_step, seed=task.seed,
    )  # fmt: skip
    with bar("MaxWEnt", config.steps, show=task.runtime.progress) as advance:
        monitor = RiskThreshold(
            q, task.validation.look, max_risk, every=config.check_every, history=history, patience=config.patience,
            report=lambda step, h: advance(step, h.describe()),
        )  # fmt: skip
        optimizer = adam(q.raw_scale.parameters(), lr=config.lr, epsilon=config.adam_epsilon)
        data = task.train if group.size == 1 or task.runtime.sharded else replace(task.train, shard=Shard(group, "rows"))
        descent = Descent(task.runtime.checkpoint, name, q, monitor, optimizer, Cycle(data, task.seed))
        if descent.resume() is not None:
            return q, history
        if not descent.step:
            monitor.check(0, float("nan"), start)
        history.stop_reason = "stopped" if monitor.finished else minimize(
            objective, optimizer, descent.cycle, steps=config.steps, monitors=[monitor, descent], start=descent.step, group=group
        )  # fmt: skip
        if history.stop_reason == "finished" and config.steps % config.check_every:
            monitor.check(config.steps, float("nan"))
    monitor.restore()
    seen = tuple(max_risk.new_tensor(each) for each in history.of_kept())
    if config.rescale:
        seen = _filled(task, q, max_risk, seen)
    history.finish(seen[0], q.mean_log_square().detach())
    history.chosen["entropy_weight"] = config.entropy_weight
    descent.end()
    if history.stop_reason == "diverged":
        logger.warning(
            "Training diverged (the loss is not finite); every member keeps its last state below the risk threshold, from "
            "steps %s. Lower `lr` or `entropy_weight` to go further.", history.kept,
        )  # fmt: skip
    return q, history


def _filled(task: Task, q: WeightDistribution, max_risk: Tensor, seen: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Use what is left of the risk: multiply φ by the largest factor per member, up to 10, that keeps the risk at or below τ.
    Takes what is `seen` on the validation rows before, and returns what is seen then.
    """
    look, plain = task.validation.along(q), task.validation.plain(q)
    found = search.find_largest_factor(look, max_risk, plain, start=seen, low=1.0, high=10.0, halvings=6)
    q.scale_by(found.factor)
    return found.seen


SOLVERS: dict[str, Callable[[Task], tuple[WeightDistribution, History]]] = {
    "refine": solve_refine, "closed-form": solve_closed_form, "sgd": solve_sgd,
}  # fmt: skip
