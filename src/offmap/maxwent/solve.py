"""MaxWEnt: the widest weight distribution around trained models that still explains the data."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from offmap import checks
from offmap._types import Weights
from offmap.data import Batches, Rows, Share
from offmap.errors import ConfigError
from offmap.likelihoods import Likelihood
from offmap.maxwent import closed_form, search
from offmap.maxwent import objective as objectives
from offmap.maxwent.checkpoint import Part
from offmap.maxwent.feeding import feed_of, sharded_among
from offmap.maxwent.monitors import History, RiskThreshold
from offmap.maxwent.resume import Descent, seen_once
from offmap.maxwent.risk import RiskFn, Validation, as_risk
from offmap.maxwent.select import highest_entropy
from offmap.maxwent.train import Cycle, adam, minimize
from offmap.model.forward import BatchedModel
from offmap.model.last_layer import find_last_layer
from offmap.model.params import ParamSelection
from offmap.model.select_params import choose
from offmap.posterior.construct import Observed, StackedModel, centre, observe
from offmap.posterior.distribution import Parameterization, WeightDistribution
from offmap.posterior.noise import Noise, Uniform, as_noise
from offmap.posterior.predictive import Stochastic
from offmap.posterior.protocol import Runtime
from offmap.progress import bar

logger = logging.getLogger("offmap")

BASES = ("svd", "identity")
SLACKS = ("paper", "reference", "smoothed")

LARGEST = 3e38
"""Settings beyond it are infinite in single precision."""


@dataclass(frozen=True)
class Config:
    """How a distribution is fitted. The defaults suit most models; PAPER and REFERENCE are the paper's and its authors'."""

    basis: Literal["svd", "identity"] = "svd"
    solver: Literal["refine", "closed-form", "sgd"] = "refine"
    params: ParamSelection = None  # all: hidden layers see OOD-ness first, and what stays fixed cannot disagree
    noise: str | Noise = "uniform"
    parameterization: Parameterization | None = None  # a user's own ω(z, φ)
    entropy_weight: float | Sequence[float] = (
        30.0  # λ on the mean of g(φ²): 10/d on the paper's sum. Several: highest entropy below τ
    )
    regularizer: str | objectives.Growth = "abs"  # g: "abs", "log", or a growing function of φ²
    steps: int = 500
    lr: float = 0.02
    draws_per_step: int = 1
    adam_epsilon: float = 1e-8
    initial_raw_scale: float | None = None  # sgd: u at the start; None: −5 for identity, −10 for svd
    init_fraction: float = 0.1  # refine: the share of the closed form's φ to start from
    fan_in_limit: int = 4096  # svd: one basis up to this fan-in, several smaller ones above
    # ε: amplitudes below this share of the largest count as that share. Several: highest entropy below τ
    eps: float | Sequence[float] = (1e-4, 1e-3)
    risk: str | RiskFn = "nll"
    max_risk: float | None = None  # τ; None: the base model's risk plus twice its standard error
    tolerance: Literal["paper", "reference", "smoothed"] = "paper"  # 2·std/√n, 2·std/n, or 2·std/√n with one more row at chance
    clip_loss: bool = True  # no validation row costs more than chance would pay for the worst one
    check_every: int = 50
    patience: int | None = 4  # stop when every member has been above τ for so many checks; None: never
    rescale: bool = True  # at the end, multiply φ by what the risk still allows
    risk_draws: int = 50


PAPER = Config(
    solver="sgd",
    entropy_weight=10.0,
    steps=50_000,
    lr=1e-3,
    eps=1e-4,
    clip_loss=False,
    check_every=100,
    patience=None,
    rescale=False,
)
REFERENCE = replace(PAPER, noise=Uniform(1.0), adam_epsilon=1e-7, risk="averaged-nll", tolerance="reference")
CONFIGS = {"default": Config(), "paper": PAPER, "reference": REFERENCE}


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
    check(config)
    at = nets if isinstance(nets, StackedModel) else choose(centre(nets), valid.inputs, config.params, runtime.output_fn)
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
    runtime.group.copy(*q.raw_scale.values())
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
    group.copy(*q.raw_scale.values())
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
        data = task.train if group.size == 1 or task.runtime.sharded else replace(task.train, share=Share(group, "rows"))
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


def check(config: Config) -> None:
    """Refuse impossible settings before any work."""
    choices = (("basis", config.basis, BASES), ("solver", config.solver, tuple(SOLVERS)), ("tolerance", config.tolerance, SLACKS))
    for field, value, valid in choices:
        checks.word(field, value, valid)
    as_noise(config.noise)
    as_risk(config.risk)
    objectives.as_growth(config.regularizer)
    for name in ("steps", "draws_per_step", "check_every", "risk_draws", "fan_in_limit"):
        value = getattr(config, name)
        if not (isinstance(value, int) and value > 0):
            raise ConfigError(f"Expected `{name}` to be a whole number above 0, but got {value!r}.")
    if config.patience is not None and not (isinstance(config.patience, int) and config.patience > 0):
        raise ConfigError(f"Expected `patience` to be a whole number above 0 or None, but got {config.patience!r}.")
    for name in ("lr", "adam_epsilon", "init_fraction", "eps", "entropy_weight"):
        value = getattr(config, name)
        grid = list(value) if name in ("eps", "entropy_weight") and isinstance(value, list | tuple) and value else [value]
        for each in grid:
            if not (isinstance(each, int | float) and 0 < each < math.inf):
                raise ConfigError(f"Expected `{name}` to be a number above 0, but got {each!r}.")
            if each > LARGEST:
                raise ConfigError(f"Expected `{name}` to be at most {LARGEST:g}, but got {each!r}.")
    for name in ("max_risk", "initial_raw_scale"):
        value = getattr(config, name)
        if value is not None and not (isinstance(value, int | float) and abs(value) <= LARGEST):
            raise ConfigError(f"Expected `{name}` to be a finite number or None, but got {value!r}.")
    if config.parameterization is not None and config.solver != "sgd":
        raise ConfigError("A parameterization of your own has no closed form: pass `solver='sgd'`.")
