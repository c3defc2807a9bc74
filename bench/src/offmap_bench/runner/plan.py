"""A plan: every method on every task with every seed, as a list of cells."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from itertools import product
from typing import Any

from offmap.errors import ConfigError, nearest

Settings = dict[str, Any]


@dataclass(frozen=True)
class Cell:
    """One benchmark run. `source` is the method and config of the nets it starts from; `label` names it in tables only.

    `members` is the size of the ensemble, or 1: every net alone, metrics averaged over the nets.
    """

    task: str
    method: str
    label: str = field(compare=False)
    config: Settings
    seed: int
    members: int = 1
    grid: Settings = field(default_factory=dict[str, Any])
    source: Settings | None = None

    def told(self) -> Settings:
        """As in a record; a grid or models that are not there are not told, so that new fields leave old hashes alone."""
        told = {"task": self.task, "method": self.method, "config": self.config, "seed": self.seed, "members": self.members}
        return told | ({"grid": self.grid} if self.grid else {}) | ({"from": self.source} if self.source is not None else {})

    @property
    def hash(self) -> str:
        """16 hexadecimal digits of what is told."""
        return digest(self.told())

    @property
    def fit_key(self) -> str:
        """The same for cells that can share one fit: all but the score, and how many members are looked at."""
        return digest(replace(self, config=self.fit_config, members=1).told())

    @property
    def fit_config(self) -> Settings:
        """What the fit is told."""
        return {key: value for key, value in self.config.items() if key != "score"}

    def candidates(self) -> list[Settings]:
        """Every choice of the grid, {key: value}; one empty choice without a grid."""
        return [dict(zip(self.grid, values, strict=True)) for values in product(*self.grid.values())]


@dataclass(frozen=True)
class Entry:
    """One [[method]] of a plan; `source` is the method and config of the nets that it starts from, `tasks` are patterns of those
    it is run on: all, if there are none.
    """

    name: str
    label: str
    members: int
    config: Settings
    grid: Settings
    source: Settings | None
    tasks: tuple[str, ...] = ()


@dataclass(frozen=True)
class Plan:
    """Every entry on every task with every seed; `note` is Markdown for its page, `figures` what else is drawn of it.

    `seeds_of` are the seeds of tasks that need fewer, by patterns; `page` is how its records are tabulated.
    """

    name: str
    seeds: tuple[int, ...]
    tasks: tuple[str, ...]
    entries: tuple[Entry, ...]
    note: str = ""
    figures: tuple[str, ...] = ()
    seeds_of: Mapping[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])
    page: str = "means"

    def wants(self, entry: Entry, task: str, seed: int) -> bool:
        """Whether this cell is part of the plan."""
        fits = not entry.tasks or any(fnmatchcase(task, pattern) for pattern in entry.tasks)
        return fits and all(seed in seeds for pattern, seeds in self.seeds_of.items() if fnmatchcase(task, pattern))

    @property
    def labels(self) -> list[str]:
        """In the order of the file."""
        return [entry.label for entry in self.entries]


def cells(plan: Plan) -> list[Cell]:
    """All cells, those that share a task and a fit side by side."""
    made = [
        Cell(task, entry.name, entry.label, entry.config, seed, entry.members, entry.grid, entry.source)
        for seed in plan.seeds
        for task in plan.tasks
        for entry in plan.entries
        if plan.wants(entry, task, seed)
    ]
    first: dict[tuple[int, str, str], int] = {}
    for number, cell in enumerate(made):
        first.setdefault((cell.seed, cell.task, cell.fit_key), number)
    return sorted(made, key=lambda cell: first[cell.seed, cell.task, cell.fit_key])


def narrowed(
    plan: Plan, *, label: str | None = None, seeds: Sequence[int] | None = None, tasks: Sequence[str] | None = None
) -> Plan:
    """A part of a plan: the entries whose label is, or matches, `label`, some of the seeds, and the tasks that match one of the
    patterns; models stay the same.
    """
    kept = tuple(e for e in plan.entries if label is None or e.label == label or fnmatchcase(e.label, label))
    if not kept:
        raise ConfigError(f"Expected a label to be {nearest(str(label), plan.labels)}, but got {label!r}.")
    for pattern in tasks or ():
        if not any(fnmatchcase(task, pattern) for task in plan.tasks):
            raise ConfigError(f"Expected a task of the plan to be {nearest(pattern, plan.tasks)}, but got {pattern!r}.")
    chosen = tuple(t for t in plan.tasks if not tasks or any(fnmatchcase(t, pattern) for pattern in tasks))
    return replace(plan, entries=kept, seeds=tuple(dict.fromkeys(seeds)) if seeds else plan.seeds, tasks=chosen)


def digest(told: Settings) -> str:
    """A stable hash of what a cell tells, in 16 hexadecimal digits."""
    canonical = json.dumps(told, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]
