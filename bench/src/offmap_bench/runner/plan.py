"""Plans: TOML files that name tasks, methods, seeds and grids, and the cells they stand for."""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from importlib import resources
from pathlib import Path
from typing import Any

from offmap.errors import ConfigError, FileError, nearest
from offmap.scores.score import SCORES
from offmap_bench.methods.competitor import check_settings
from offmap_bench.runner.context import BASE, SCORING, candidates, without_scoring
from offmap_bench.runner.methods import METHODS, SIZE
from offmap_bench.tasks.catalog import expand

Settings = dict[str, Any]

PLAN_KEYS = ("name", "note", "figures", "page", "seeds", "seeds_of", "tasks", "defaults", "method", "quick")
METHOD_KEYS = ("name", "label", "members", "from", "config", "grid", "tasks")
QUICK_KEYS = ("seeds", "tasks")
FIGURES = ("synthetic", "moons", "tradeoff", "day")
"""Figures that need more than the numbers of records."""

PAGES = ("means", "ranks")
"""How records are tabulated: means over tasks, or ranks among methods on near, far and open-set images."""


@dataclass(frozen=True)
class Cell:
    """One run of a method on a task.

    Args:
        task: Name of the task.
        method: Name of the method.
        label: Its name in tables; it does not count in the hash.
        config: Its settings, differences from the defaults only.
        seed: Seed of the task's split, the starts and the draws.
        members: Size of the ensemble, or 1: every net alone, metrics averaged over the nets.
        grid: Lists of settings, chosen by validation NLL.
        source: Method, config and grid of the base models it starts from.
    """

    task: str
    method: str
    label: str = field(compare=False)
    config: Settings
    seed: int
    members: int = 1
    grid: Settings = field(default_factory=dict[str, Any])
    source: Settings | None = None

    def as_dict(self) -> Settings:
        """As in a record; an absent grid or source is left out."""
        cell = {"task": self.task, "method": self.method, "config": self.config, "seed": self.seed, "members": self.members}
        return cell | ({"grid": self.grid} if self.grid else {}) | ({"from": self.source} if self.source is not None else {})

    @property
    def hash(self) -> str:
        """16 hexadecimal digits that name the cell."""
        return digest(self.as_dict())

    @property
    def fit_key(self) -> str:
        """The same for cells that can share one fit: all but the score and the number of members."""
        return digest(replace(self, config=self.fit_config, members=1).as_dict())

    @property
    def fit_config(self) -> Settings:
        """The config without the score."""
        return {key: value for key, value in self.config.items() if key != "score"}

    def candidates(self) -> list[Settings]:
        """Every choice of the grid; one empty choice without a grid."""
        return candidates(self.grid)


@dataclass(frozen=True)
class Entry:
    """One [[method]] of a plan; `tasks` are patterns of those it is run on: all, if there are none."""

    name: str
    label: str
    members: int
    config: Settings
    grid: Settings
    source: Settings | None = None
    tasks: tuple[str, ...] = ()


@dataclass(frozen=True)
class Plan:
    """Every entry on every task with every seed.

    Args:
        name: Name of its records and pages.
        seeds: Seeds of all tasks.
        tasks: Names of tasks.
        entries: The methods.
        note: Markdown for its page.
        figures: What else is drawn of it.
        seeds_of: Seeds of tasks that need fewer, by patterns.
        page: How its records are tabulated.
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
        matches = not entry.tasks or any(fnmatchcase(task, pattern) for pattern in entry.tasks)
        return matches and all(seed in seeds for pattern, seeds in self.seeds_of.items() if fnmatchcase(task, pattern))

    @property
    def labels(self) -> list[str]:
        """Labels in the order of the file."""
        return [entry.label for entry in self.entries]


def cells(plan: Plan) -> list[Cell]:
    """All cells, those that share a task and a fit side by side."""
    planned = [
        Cell(task, entry.name, entry.label, entry.config, seed, entry.members, entry.grid, entry.source)
        for seed in plan.seeds
        for task in plan.tasks
        for entry in plan.entries
        if plan.wants(entry, task, seed)
    ]
    first: dict[tuple[int, str, str], int] = {}
    for number, cell in enumerate(planned):
        first.setdefault((cell.seed, cell.task, cell.fit_key), number)
    return sorted(planned, key=lambda cell: first[cell.seed, cell.task, cell.fit_key])


def narrow_plan(
    plan: Plan, *, label: str | None = None, seeds: Sequence[int] | None = None, tasks: Sequence[str] | None = None
) -> Plan:
    """A part of a plan: entries whose label matches `label`, some seeds, and the tasks that match one of the patterns."""
    entries = tuple(e for e in plan.entries if label is None or e.label == label or fnmatchcase(e.label, label))
    if not entries:
        raise ConfigError(f"Expected a label to be {nearest(str(label), plan.labels)}, but got {label!r}.")
    for pattern in tasks or ():
        if not any(fnmatchcase(task, pattern) for task in plan.tasks):
            raise ConfigError(f"Expected a task of the plan to be {nearest(pattern, plan.tasks)}, but got {pattern!r}.")
    names = tuple(t for t in plan.tasks if not tasks or any(fnmatchcase(t, pattern) for pattern in tasks))
    return replace(plan, entries=entries, seeds=tuple(dict.fromkeys(seeds)) if seeds else plan.seeds, tasks=names)


def digest(content: Settings) -> str:
    """A stable hash of JSON content, in 16 hexadecimal digits."""
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


# ------------------------------------------------------------------------------------------------ reading


def read_plan(name: str | Path, *, quick: bool = False) -> Plan:
    """Read a plan that comes with offmap-bench, by its name, or one of your own, by the path of its file."""
    path = Path(name)
    if path.suffix != ".toml":
        texts = read_packaged()
        if str(name) not in texts:
            raise ConfigError(f"Expected a plan to be {nearest(str(name), texts)} or the path of a .toml file, but got {name!s}.")
        return parse(texts[str(name)], f"{name}.toml", quick=quick)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise FileError(f"Expected a plan at {path}, but it cannot be read: {error}.") from error
    return parse(text, str(path), quick=quick)


def read_packaged(folder: str = "plans") -> dict[str, str]:
    """The TOML files that come with offmap-bench: {name: text}."""
    files = (resources.files("offmap_bench") / folder).iterdir()
    texts = {f.name.removesuffix(".toml"): f.read_text(encoding="utf-8") for f in files if f.name.endswith(".toml")}
    return dict(sorted(texts.items()))


def parse(text: str, file: str, *, quick: bool = False) -> Plan:
    """Read the text of a plan; errors name the file, the key and the nearest valid key."""
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise FileError(f"Expected TOML in {file}, but it cannot be read: {error}.") from error
    return Reader(file, quick).plan(content)


@dataclass(frozen=True)
class Reader:
    """Checks the content of a plan file, and names the file in every error."""

    file: str
    quick: bool = False

    def plan(self, content: Settings) -> Plan:
        """The whole file."""
        self.keys(content, PLAN_KEYS, "the plan")
        for key, kind in (("name", str), ("note", str), ("seeds", list), ("tasks", list), ("method", list)):
            self.kind(content.get(key, "" if key == "note" else None), kind, key)
        tables = {key: self.kind(content.get(key, {}), dict, key) for key in ("defaults", "quick")}
        names = [BASE, *(str(entry.get("name")) for entry in content["method"] if isinstance(entry, dict))]
        self.shared(tables["defaults"], names, "defaults", ())
        self.shared(tables["quick"], names, "quick", QUICK_KEYS)
        layers = tables["defaults"], tables["quick"] if self.quick else {}
        entries = [self.entry(entry, *layers) for entry in content["method"]]
        labels = [entry.label for entry in entries]
        for label in labels:
            if labels.count(label) > 1:
                raise self.wrong(f"labels that differ, but two methods have {label!r}; give one of them another `label`")
        entries = [self.started(e, text, entries, *layers) for e, text in zip(entries, content["method"], strict=True)]
        top = {**content, **{key: layers[1][key] for key in QUICK_KEYS if key in layers[1]}}
        page = self.word("page", content.get("page", PAGES[0]), PAGES, "to be")
        fewer = self.kind(content.get("seeds_of", {}), dict, "seeds_of")
        figures = self.kind(content.get("figures", []), list, "figures")
        return Plan(
            content["name"] + "-quick" * self.quick, self.seeds(top["seeds"]), self.tasks(top["tasks"]), tuple(entries),
            content.get("note", "").strip(), tuple(self.word("figures", name, FIGURES, "to hold") for name in figures),
            {pattern: self.seeds(seeds) for pattern, seeds in fewer.items()}, page,
        )  # fmt: skip

    def entry(self, content: Any, defaults: Settings, quick: Settings) -> Entry:
        """One [[method]]: its own config over the defaults, and under [quick]."""
        self.keys(self.kind(content, dict, "method"), METHOD_KEYS, "[[method]]")
        name = content.get("name")
        if not isinstance(name, str) or name not in METHODS:
            raise self.wrong(f"`name` of a [[method]] to be {nearest(str(name), METHODS)}, but got {name!r}")
        method = METHODS[name]
        config, grid = (self.kind(content.get(key, {}), dict, key) for key in ("config", "grid"))
        for key, table in (("config", config), ("grid", grid)):
            self.keys(table, method.keys, f"`{key}` of {name!r}")
        for key, values in grid.items():
            if not isinstance(values, list) or not values or key in SCORING:
                raise self.wrong(f"`grid` of {name!r} to hold lists of settings of the fit, but {key!r} is {values!r}")
        if grid and method.scores_only:
            raise self.wrong(f"no `grid` of {name!r}, which predicts nothing that validation data could judge")
        members = content.get("members", 1)
        if members not in (1, SIZE) or isinstance(members, bool) or (method.scores_only and "members" in content):
            allowed = "left out, as it has none" if method.scores_only else f"1 or {SIZE}"
            raise self.wrong(f"`members` of {name!r} to be {allowed}, but got {members!r}")
        if "from" in content and not (method.from_models and isinstance(content["from"], str)):
            raise self.wrong(
                f"`from` only on methods that start from trained nets, as a name, but {name!r} has {content['from']!r}"
            )
        config = {**chosen(defaults, name), **config, **chosen(quick, name)}
        if name == "maxwent" and "entropy_weight" in grid:  # it chooses itself, by appendix B: the highest entropy below τ
            config, grid = (
                {**config, "entropy_weight": grid["entropy_weight"]},
                {k: v for k, v in grid.items() if k != "entropy_weight"},
            )
        self.possible(name, "config", config)
        for key, values in grid.items():
            for value in values:
                self.possible(name, "grid", {**config, key: value})
        patterns = self.kind(content.get("tasks", []), list, "tasks")
        if patterns:
            self.tasks(patterns)
        return Entry(name, self.kind(content.get("label", name), str, "label"), members, config, grid, tasks=tuple(patterns))

    def possible(self, name: str, key: str, config: Settings) -> None:
        """Refuse settings that the method cannot work with."""
        try:
            check_settings(config)
            score = config.get("score", "default")
            if score not in SCORES:
                raise ConfigError(f"Expected `score` to be {nearest(str(score), SCORES)}, but got {score!r}.")
            METHODS[name].settings(config)
        except ConfigError as error:
            raise ConfigError(f"{self.file}: `{key}` of {name!r}: {error}") from error

    def started(self, entry: Entry, content: Settings, entries: Sequence[Entry], defaults: Settings, quick: Settings) -> Entry:
        """The entry with the method and config of the nets that `from` names."""
        if not METHODS[entry.name].from_models:
            return entry
        source = content.get("from", BASE)
        named = next((e for e in entries if METHODS[e.name].gives_models and source in (e.label, e.name)), None)
        name = named.name if named else source
        if name not in METHODS or not METHODS[name].gives_models:
            labels = {n for n in METHODS if METHODS[n].gives_models} | {e.label for e in entries if METHODS[e.name].gives_models}
            raise self.wrong(f"`from` of {entry.label!r} to be {nearest(source, labels)}, but got {source!r}")
        if named and not set(named.grid) <= METHODS[name].stacks:
            raise self.wrong(f"`from` of {entry.label!r} to name nets without a `grid`, but {named.label!r} has one")
        config = named.config if named else {**chosen(defaults, name), **chosen(quick, name)}
        grid = {"grid": named.grid} if named and named.grid else {}
        return replace(entry, source={"method": name, "config": without_scoring(config), **grid})

    def shared(self, content: Settings, names: Sequence[str], section: str, also: Sequence[str]) -> None:
        """[defaults] and [quick]: keys for every method that has them, and tables for one method by its name."""
        valid = {key for name in names if name in METHODS for key in METHODS[name].keys}
        for key, value in content.items():
            if isinstance(value, dict) and key in names and key in METHODS:
                self.keys(value, METHODS[key].keys, f"[{section}.{key}]")
            else:
                self.keys({key: value}, {*valid, *names, *also}, f"[{section}]")

    def seeds(self, content: Any) -> tuple[int, ...]:
        """Whole numbers."""
        self.kind(content, list, "seeds")
        if not content or not all(type(seed) is int and seed >= 0 for seed in content):
            raise self.wrong(f"`seeds` to be whole numbers ≥ 0, but got {content!r}")
        return tuple(dict.fromkeys(content))

    def tasks(self, content: list[Any]) -> tuple[str, ...]:
        """Names and patterns."""
        if not content or not all(isinstance(name, str) for name in content):
            raise self.wrong(f"`tasks` to be names of tasks, but got {content!r}")
        try:
            return tuple(expand(content))
        except ConfigError as error:
            raise ConfigError(f"{self.file}: {error}") from error

    def word(self, key: str, value: Any, valid: Sequence[str], verb: str) -> str:
        """One of some words."""
        if value not in valid:
            raise self.wrong(f"`{key}` {verb} {nearest(str(value), valid)}, but got {value!r}")
        return value

    def keys(self, content: Mapping[str, Any], valid: Collection[str], place: str) -> None:
        """Refuse unknown keys."""
        for key in content:
            if key not in valid:
                raise self.wrong(f"a key of {place} to be {nearest(key, valid)}, but got {key!r}")

    def kind(self, value: Any, kind: type, key: str) -> Any:
        """Refuse values of another type, and absent ones."""
        if not isinstance(value, kind):
            words = {str: "a string", list: "a list", dict: "a table"}[kind]
            raise self.wrong(f"`{key}` to be {words}, but " + ("it is missing" if value is None else f"got {value!r}"))
        return value

    def wrong(self, what: str) -> ConfigError:
        """The error for something else than was expected."""
        return ConfigError(f"{self.file}: Expected {what}.")


def chosen(shared: Settings, name: str) -> Settings:
    """The settings of [defaults] or [quick] for one method: keys that it has, then its own table."""
    general = {key: value for key, value in shared.items() if key in METHODS[name].keys}
    return {**general, **(shared[name] if isinstance(shared.get(name), dict) else {})}
