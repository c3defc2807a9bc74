"""The paper's printed tables as data: plans/printed/NAME.toml says which of our numbers stand beside which of theirs."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from importlib import resources
from typing import Any, Literal

from offmap.errors import ConfigError, nearest

STRANGE = "OOD"
"""The part of a record that holds its OOD sets, whatever they are called."""


@dataclass(frozen=True)
class Number:
    """One column of a table: a measure, averaged over the tasks that match, and what was printed for each method, in order.

    `better` is "higher", "lower" or the value that is best; `relative` names the label whose number each is divided by. A printed
    text such as "> 50" is shown and not judged.
    """

    title: str
    tasks: str
    measure: str
    printed: tuple[float | str, ...]
    part: str = STRANGE
    better: Literal["higher", "lower"] | float = "higher"
    show: Literal["percent", "plain"] = "percent"
    relative: str | None = None


@dataclass(frozen=True)
class Printed:
    """One printed table: `methods` are pairs of the printed name and our labels that answer to it."""

    title: str
    methods: tuple[tuple[str, tuple[str, ...]], ...]
    numbers: tuple[Number, ...]


@dataclass(frozen=True)
class Sheet:
    """What is compared: printed tables, the plans whose records answer, and a note in Markdown."""

    plans: tuple[str, ...]
    tables: tuple[Printed, ...]
    note: str


def sheets() -> dict[str, Sheet]:
    """The printed tables by the name of the plan that reproduces them."""
    folder = resources.files("offmap_bench") / "plans" / "printed"
    files = {file.name.removesuffix(".toml"): file for file in folder.iterdir() if file.name.endswith(".toml")}
    return {name: parse_sheet(files[name].read_text(encoding="utf-8")) for name in sorted(files)}


def sheet(name: str) -> Sheet:
    """The printed tables that a plan reproduces."""
    found = sheets()
    if name not in found:
        raise ConfigError(f"Expected a plan with printed numbers to compare with, {nearest(name, found)}, but got {name!r}.")
    return found[name]


def parse_sheet(text: str) -> Sheet:
    """The text of such a file; every number states only what differs from the table's `all`."""
    told = tomllib.loads(text)
    return Sheet(tuple(told["plans"]), tuple(map(_table, told["table"])), told.get("note", "").strip())


def _number(told: dict[str, Any]) -> Number:
    return Number(**{**told, "printed": tuple(told["printed"])})  # pyright: ignore[reportArgumentType] - data of our own


def _table(told: dict[str, Any]) -> Printed:
    methods = tuple((name, tuple(labels)) for name, *labels in told["methods"])
    shared: dict[str, Any] = told.get("all", {})
    numbers = tuple(_number({**shared, **number}) for number in told["numbers"])
    for number in numbers:
        if len(number.printed) != len(methods):
            count = f"{len(methods)} printed numbers, one for each method, in {number.title!r} of {told['title']!r}"
            raise ConfigError(f"Expected {count}, but got {len(number.printed)}.")
    return Printed(told["title"], methods, numbers)
