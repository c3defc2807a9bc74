"""What the settings of a plan must look like, by their names, so that a slip is refused before anything runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from offmap.errors import ConfigError, nearest
from offmap.guard import SCORES

Test = Callable[[Any], bool]


def whole(value: Any) -> bool:
    """A whole number above 0."""
    return type(value) is int and value > 0


def number(value: Any) -> bool:
    """A finite number; True is none.

    >>> number(0.5), number(True), number("0.5")
    (True, False, False)
    """
    return type(value) in (int, float) and math.isfinite(value)


def above_zero(value: Any) -> bool:
    """A finite number above 0."""
    return number(value) and value > 0


def below_one(value: Any) -> bool:
    """A number from 0 to 1, without 1."""
    return number(value) and 0 <= value < 1


def wholes(value: Any) -> bool:
    """A list of whole numbers above 0."""
    return isinstance(value, list) and bool(value) and all(map(whole, value))


def truth(value: Any) -> bool:
    """True or false."""
    return isinstance(value, bool)


def numbers(value: Any) -> bool:
    """A number of at least 0, or a list of such."""
    return (number(value) and value >= 0) or (isinstance(value, list) and bool(value) and all(map(numbers, value)))


def above_zeros(value: Any) -> bool:
    """A number above 0, or a list of such."""
    return above_zero(value) or (isinstance(value, list) and bool(value) and all(map(above_zero, value)))


def words(value: Any) -> bool:
    """A pattern, or a list of patterns."""
    return isinstance(value, str) or (isinstance(value, list) and bool(value) and all(isinstance(v, str) for v in value))


WHOLE, ABOVE, SHARE = "a whole number above 0", "a number above 0", "a number from 0 to 1, without 1"

KINDS: dict[str, tuple[str, Test]] = {
    **dict.fromkeys(("steps", "check_every", "draws", "draws_per_step", "risk_draws", "batch_size", "k"), (WHOLE, whole)),
    **dict.fromkeys(("epochs", "members"), (WHOLE, whole)),
    **dict.fromkeys(("lr", "adam_epsilon", "init_fraction"), (ABOVE, above_zero)),
    **dict.fromkeys(("dropout", "shrinkage"), (SHARE, below_one)),
    **dict.fromkeys(("clip_loss", "rescale", "standardise", "augment"), ("true or false", truth)),
    **dict.fromkeys(("tradeoff", "entropy_weight"), ("a number of at least 0, or a list of such", numbers)),
    "eps": ("a number above 0, or a list of such", above_zeros),
    "params": ("a pattern of names of parameters, or a list of such", words),
    "hidden": ("a list of whole numbers above 0", wholes),
    "chunk_size": ('"auto" or a whole number above 0', lambda value: value == "auto" or whole(value)),
}  # fmt: skip
"""{setting: (what it must be, in words; the test)}; what a method checks itself, or nobody knows, is not here."""


def check(settings: Mapping[str, Any]) -> None:
    """Refuse settings of the wrong kind; the score must be one that has a name."""
    for key, value in settings.items():
        kind, test = KINDS.get(key, ("", lambda value: True))
        if not test(value):
            raise ConfigError(f"Expected `{key}` to be {kind}, but got {value!r}.")
    score = settings.get("score", "default")
    if score not in SCORES:
        raise ConfigError(f"Expected `score` to be {nearest(str(score), SCORES)}, but got {score!r}.")
