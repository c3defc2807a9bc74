"""What all methods share: the problem they are fitted on, the check of their configs, and the training of a grid in one stack."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from offmap.data import Batches, Rows
from offmap.data.batch import take_rows
from offmap.errors import ConfigError, nearest
from offmap.integrations.nets import Judge, Losses, Stack, Training, member_nll, train_stack
from offmap.likelihoods import Likelihood
from offmap.maxwent.config import Runtime
from offmap.posterior.predictive import Sampled

Nets: TypeAlias = nn.Module | Sequence[nn.Module]
Rule: TypeAlias = tuple[str, Callable[[Any], bool]]
"""What a setting must be, in words, and the test."""


def is_number(value: Any) -> bool:
    """Whether it is a finite number; True is none.

    >>> is_number(0.5), is_number(True), is_number("0.5")
    (True, False, False)
    """
    return type(value) in (int, float) and math.isfinite(value)


def one_or_more(rule: Rule) -> Rule:
    """A value that follows a rule, or a list of such."""
    words, test = rule
    return f"{words}, or a list of such", lambda v: test(v) or (isinstance(v, list | tuple) and bool(v) and all(map(test, v)))


COUNT: Rule = ("a whole number above 0", lambda value: type(value) is int and value > 0)
POSITIVE: Rule = ("a number above 0", lambda value: is_number(value) and value > 0)
NOT_NEGATIVE: Rule = ("a number of at least 0", lambda value: is_number(value) and value >= 0)
SHARE: Rule = ("a number from 0 to 1, without 1", lambda value: is_number(value) and 0 <= value < 1)
BOOL: Rule = ("true or false", lambda value: isinstance(value, bool))

RULES: dict[str, Rule] = {
    **dict.fromkeys(("steps", "check_every", "draws", "draws_per_step", "risk_draws", "batch_size", "k", "epochs"), COUNT),
    **dict.fromkeys(("members", "collect_every", "rank", "fan_in_limit"), COUNT),
    **dict.fromkeys(("lr", "adam_epsilon", "init_fraction", "prior_variance", "scale"), POSITIVE),
    **dict.fromkeys(("tradeoff", "anchor_scale"), NOT_NEGATIVE),
    **dict.fromkeys(("momentum", "shrinkage"), SHARE),
    **dict.fromkeys(("clip_loss", "rescale", "standardise", "augment", "fixed_median"), BOOL),
    "entropy_weight": one_or_more(NOT_NEGATIVE),
    "eps": one_or_more(POSITIVE),
    "params": one_or_more(("a pattern of names of parameters", lambda value: isinstance(value, str))),
    "hidden": ("a list of whole numbers above 0", lambda v: isinstance(v, list | tuple) and bool(v) and all(map(COUNT[1], v))),
    "chunk_size": ('"auto" or a whole number above 0', lambda value: value == "auto" or COUNT[1](value)),
    "dropout": ("from 0 to below 1, or None for the model's own", lambda value: value is None or SHARE[1](value)),
    "bandwidth": ("above 0, or None for the median heuristic", lambda value: value is None or POSITIVE[1](value)),
    "prior_precision": ("a number above 0 or None", lambda value: value is None or POSITIVE[1](value)),
    "initial_raw_scale": ("a number", is_number),
}
"""What settings must be, by their names; what is not here is checked by the method itself."""


def check_settings(settings: Mapping[str, Any], **rules: Rule) -> None:
    """Refuse settings of the wrong kind, by RULES and the rules of the method."""
    for name, value in settings.items():
        words, test = (RULES | rules).get(name, ("", lambda value: True))
        if not test(value):
            raise ConfigError(f"Expected `{name}` to be {words}, but got {value!r}.")


def check_words(config: Any, **choices: Sequence[str]) -> None:
    """Refuse fields that are none of some words, and name the nearest."""
    for name, valid in choices.items():
        value = getattr(config, name)
        if value not in valid:
            raise ConfigError(f"Expected `{name}` to be {nearest(str(value), valid)}, but got {value!r}.")


def as_settings(config: Any) -> dict[str, Any]:
    """The fields of a config as they are; `asdict` would copy a noise into a dict."""
    return {field.name: getattr(config, field.name) for field in fields(config)}


def check_fields(config: Any, **rules: Rule) -> None:
    """Refuse fields of the wrong kind, but for None where it is the default."""
    default = as_settings(type(config)())
    check_settings({k: v for k, v in as_settings(config).items() if v is not None or default[k] is not None}, **rules)


@dataclass(frozen=True)
class Problem:
    """What a method is fitted on: batches, validation rows, the likelihood of the outputs, and how to run."""

    train: Batches
    valid: Rows
    likelihood: Likelihood
    seed: int = 0
    runtime: Runtime = Runtime()


C = TypeVar("C")
P = TypeVar("P")
T = TypeVar("T", bound=Training)


def fitter(config: type[C]) -> Callable[[Callable[[Nets, Problem, C], P]], Callable[..., P]]:
    """Turn a function of (nets, problem, config) into `fit(nets, train, valid, *, likelihood, config, seed, runtime)`."""

    def decorate(function: Callable[[Nets, Problem, C], P]) -> Callable[..., P]:
        def fit(nets: Nets, train: Batches, valid: Rows, *, likelihood: Likelihood, **options: Any) -> P:
            own = options.pop("config", None)
            return function(nets, Problem(train, valid, likelihood, **options), config() if own is None else own)

        fit.__doc__ = function.__doc__
        return fit

    return decorate


def grid_fitters(
    config: type[C], function: Callable[[Nets, Problem, Sequence[C]], list[P]]
) -> tuple[Callable[..., P], Callable[..., list[P]]]:
    """`fit` and `fit_grid` of a method that fits several configs at once; the latter takes `configs`."""

    def fit_grid(
        nets: Nets, train: Batches, valid: Rows, *, likelihood: Likelihood, configs: Sequence[C], **options: Any
    ) -> list[P]:
        return function(nets, Problem(train, valid, likelihood, **options), configs)

    return fitter(config)(lambda nets, problem, config: function(nets, problem, [config])[0]), fit_grid


@torch.no_grad()
def ensemble_nll(stack: Stack, likelihood: Likelihood, valid: Rows) -> Tensor:
    """Return the NLL of every member's ensemble, the same for the M members of a setting, (G·M,)."""
    size, parts = stack.settings * stack.members, list[Tensor]()
    for rows in stack.model.blocks(valid.inputs, size):
        x, y = take_rows(valid.inputs, rows), valid.targets[rows]
        outputs = stack.by_setting(stack.model.outputs(lambda span: stack.weights | stack.fixed, 1, x, members=size))
        parts.append(torch.stack([likelihood.predictive_nll(ensemble, y) for ensemble in outputs]))
    return torch.cat(parts, 1).mean(1).repeat_interleave(stack.members)


def shared(configs: Sequence[Training]) -> Training:
    """Return how all settings of a grid are trained; refuse settings that differ in it, as they take the same steps."""
    if not configs:
        raise ConfigError("Expected at least one setting of a grid, but got none.")
    for name in (f.name for f in fields(Training)):
        values = list(dict.fromkeys(getattr(config, name) for config in configs))
        if len(values) > 1:
            raise ConfigError(f"Expected the settings of a grid to share `{name}`, but got {values}. Fit them one by one.")
    return configs[0]


def per_setting(configs: Sequence[Any], name: str, stack: Stack) -> Tensor:
    """Return one field of every setting, (G,), on the device and in the dtype of the weights."""
    values = [float(getattr(config, name)) for config in configs]
    return next(iter(stack.weights.values())).new_tensor(values)


def ensemble_fitters(
    config: type[T], losses: Callable[[Stack, Likelihood, Sequence[T], int], Losses], *, judge: Judge = member_nll
) -> tuple[Callable[..., Sampled], Callable[..., list[Sampled]]]:
    """The same for an ensemble: members minimise `losses(stack, likelihood, configs, seed)`, and `judge` picks their state."""

    def fit_all(nets: Nets, problem: Problem, configs: Sequence[T]) -> list[Sampled]:
        for each in configs:
            check_fields(each)
        training = shared(configs)
        stack = Stack.build(nets, problem.valid.inputs, problem.runtime, settings=len(configs))
        train_stack(
            stack, losses(stack, problem.likelihood, configs, problem.seed), problem.train, problem.valid,
            likelihood=problem.likelihood, config=training, judge=judge, seed=problem.seed, progress=problem.runtime.progress,
        )  # fmt: skip
        return stack.predictives()

    return grid_fitters(config, fit_all)
