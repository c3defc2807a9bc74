"""What all methods share: `Competitor` with `fit` and `fit_grid`, checks of settings, and the training of a grid in one stack."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Generic, Literal, TypeAlias, TypeVar, get_args, get_origin, get_type_hints

from torch import Tensor, nn

from offmap import checks
from offmap.data import Batches, Rows
from offmap.errors import ConfigError
from offmap.posterior.predictive import Sampled
from offmap_bench.methods.stack import Judge, Losses, Problem, Stack, Training, member_nll, train_stack

Nets: TypeAlias = nn.Module | Sequence[nn.Module]
Check: TypeAlias = Callable[[str, Any], object]
"""Raise for a wrong value of the setting of that name."""


def refuse_unless(words: str, test: Callable[[Any], bool]) -> Check:
    """Return a check that a value passes the test, which `words` describe."""

    def check(name: str, value: Any) -> None:
        if not test(value):
            raise ConfigError(f"Expected `{name}` to be {words}, but got {value!r}.")

    return check


def as_list(value: Any) -> list[Any]:
    """Return the entries of a list, or a list of one value."""
    return list(value) if isinstance(value, list | tuple) and value else [value]


def is_count(value: Any) -> bool:
    """Return whether it is a whole number above 0."""
    return type(value) is int and value > 0


COUNT: Check = partial(checks.integer, above=0)
POSITIVE: Check = partial(checks.number, above=0)
SHARE = refuse_unless("a number from 0 to below 1", lambda v: type(v) in (int, float) and 0 <= v < 1)

CHECKS: dict[str, Check] = {
    **dict.fromkeys(("steps", "check_every", "draws", "draws_per_step", "risk_draws", "batch_size", "k", "epochs"), COUNT),
    **dict.fromkeys(("members", "collect_every", "rank", "fan_in_limit"), COUNT),
    **dict.fromkeys(("lr", "adam_epsilon", "init_fraction", "prior_variance", "scale", "start_std"), POSITIVE),
    **dict.fromkeys(("bandwidth", "prior_precision"), partial(checks.number, above=0, optional=True)),
    **dict.fromkeys(("tradeoff", "anchor_scale"), partial(checks.number, at_least=0)),
    **dict.fromkeys(("momentum", "shrinkage", "dropout"), SHARE),
    **dict.fromkeys(("clip_loss", "rescale", "standardise", "augment", "fixed_median", "raw_units", "full_batches"),
                    refuse_unless("true or false", lambda v: isinstance(v, bool))),
    "entropy_weight": lambda name, value: [checks.number(name, v, at_least=0) for v in as_list(value)],
    "eps": lambda name, value: [checks.number(name, v, above=0) for v in as_list(value)],
    "params": refuse_unless("a pattern of names of parameters, or a list of such", lambda v: {*map(type, as_list(v))} == {str}),
    "hidden": refuse_unless("a list of whole numbers above 0", lambda v: as_list(v) != [v] and all(map(is_count, v))),
    "chunk_size": refuse_unless('"auto" or a whole number above 0', lambda v: v == "auto" or is_count(v)),
    "initial_raw_scale": checks.number,
}  # fmt: skip
"""How settings are checked, by their names; what is not here is checked by the method itself."""


def check_settings(settings: Mapping[str, Any], **more_checks: Check) -> None:
    """Refuse settings of the wrong kind, by CHECKS and `more_checks` of the method."""
    for name, value in settings.items():
        (CHECKS | more_checks).get(name, lambda name, value: None)(name, value)


def as_settings(config: Any) -> dict[str, Any]:
    """The fields of a config as they are; `asdict` would copy a noise into a dict."""
    return {field.name: getattr(config, field.name) for field in fields(config)}


def check_fields(config: Any, **more_checks: Check) -> None:
    """Refuse fields of the wrong kind, but for None where it is the default; a `Literal` field must be one of its words."""
    words = {n: get_args(hint) for n, hint in get_type_hints(type(config)).items() if get_origin(hint) is Literal}
    more_checks |= {name: lambda name, value: checks.one_of(name, value, words[name]) for name in words}
    default = as_settings(type(config)())
    check_settings({n: v for n, v in as_settings(config).items() if v is not None or default[n] is not None}, **more_checks)


C = TypeVar("C")
P = TypeVar("P")
T = TypeVar("T", bound=Training)


@dataclass(frozen=True)
class Competitor(Generic[C, P]):
    """A method: `fit` takes one `Config`, `fit_grid` several, which `fit_all` fits together where it can.

    Args:
        Config: The class of its settings.
        fit_all: (nets, problem, configs) -> one Predictive for each config.
        check: Raises for an impossible config.
    """

    Config: type[C]
    fit_all: Callable[[Nets, Problem, Sequence[C]], list[P]]
    check: Callable[[C], None] = check_fields

    def fit(self, nets: Nets, train: Batches, valid: Rows, *, config: C | None = None, **options: Any) -> P:
        """Fit copies of the nets; options are `likelihood`, `seed` and `runtime`."""
        return self.fit_grid(nets, train, valid, configs=[self.Config() if config is None else config], **options)[0]

    def fit_grid(self, nets: Nets, train: Batches, valid: Rows, *, configs: Sequence[C], **options: Any) -> list[P]:
        """Fit several configs; each gives what it would give alone."""
        if not configs:
            raise ConfigError("Expected at least one setting of a grid, but got none.")
        for config in configs:
            self.check(config)
        return self.fit_all(nets, Problem(train, valid, **options), configs)


def one_by_one(fit: Callable[[Nets, Problem, C], P]) -> Callable[[Nets, Problem, Sequence[C]], list[P]]:
    """Return the `fit_all` of a method that fits one config at a time."""
    return lambda nets, problem, configs: [fit(nets, problem, config) for config in configs]


def check_same_training(configs: Sequence[Training]) -> Training:
    """Return how all settings of a grid are trained; refuse settings that differ in it, as they take the same steps."""
    for name in (f.name for f in fields(Training)):
        values = list(dict.fromkeys(getattr(config, name) for config in configs))
        if len(values) > 1:
            raise ConfigError(f"Expected the settings of a grid to share `{name}`, but got {values}. Fit them one by one.")
    return configs[0]


def per_setting(configs: Sequence[Any], name: str, stack: Stack) -> Tensor:
    """Return one field of every setting, (G,), on the device and in the dtype of the weights."""
    return next(iter(stack.weights.values())).new_tensor([float(getattr(config, name)) for config in configs])


def build_ensemble(
    config: type[T], losses: Callable[[Stack, Problem, Sequence[T]], Losses], judge: Judge = member_nll
) -> Competitor[T, Sampled]:
    """Return an ensemble: nets minimise `losses`, all settings in one stack; `judge` picks the state that each member keeps."""

    def fit_all(nets: Nets, problem: Problem, configs: Sequence[T]) -> list[Sampled]:
        stack = Stack.build(nets, problem.valid.inputs, problem.runtime, settings=len(configs))
        train_stack(stack, losses(stack, problem, configs), problem, check_same_training(configs), judge=judge)
        return stack.predictives()

    return Competitor(config, fit_all)
