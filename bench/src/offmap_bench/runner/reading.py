"""How a plan is read: TOML that states only differences. Errors name the key, the file and the nearest valid key."""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

from offmap.errors import ConfigError, FileError, nearest
from offmap_bench.runner import kinds
from offmap_bench.runner.context import HOSTS, READING, without_reading
from offmap_bench.runner.methods import ENSEMBLE, METHODS
from offmap_bench.runner.plan import Entry, Plan, Settings
from offmap_bench.tasks.catalog import expand

PLAN_KEYS = ("name", "note", "figures", "page", "seeds", "seeds_of", "tasks", "defaults", "method", "quick")
FIGURES = ("synthetic", "moons", "tradeoff", "day")
"""Figures that need more than the numbers of records."""

PAGES = ("means", "ranks")
"""How records are tabulated: means over tasks, or ranks among methods on near, far and open-set images."""

METHOD_KEYS = ("name", "label", "members", "from", "config", "grid", "tasks")
QUICK_KEYS = ("seeds", "tasks")


def read_plan(name: str | Path, *, quick: bool = False) -> Plan:
    """A plan that comes with offmap, by its name, or one of your own, by the path of its file."""
    path = Path(name)
    if path.suffix != ".toml":
        found = packaged()
        if str(name) not in found:
            raise ConfigError(f"Expected a plan to be {nearest(str(name), found)} or the path of a .toml file, but got {name!s}.")
        return parse(found[str(name)], f"{name}.toml", quick=quick)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise FileError(f"Expected a plan at {path}, but it cannot be read: {error}.") from error
    return parse(text, str(path), quick=quick)


def packaged() -> dict[str, str]:
    """The plans that come with offmap: {name: text}."""
    folder = resources.files("offmap_bench") / "plans"
    files = {file.name.removesuffix(".toml"): file for file in folder.iterdir() if file.name.endswith(".toml")}
    return {name: files[name].read_text(encoding="utf-8") for name in sorted(files)}


def parse(text: str, file: str, *, quick: bool = False) -> Plan:
    """The text of a plan; errors name the key, the file and the nearest valid key."""
    try:
        told = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise FileError(f"Expected TOML in {file}, but it cannot be read: {error}.") from error
    return Reader(file).plan(told, quick=quick)


@dataclass(frozen=True)
class Reader:
    """Checks what a file says, and names the file when it is wrong."""

    file: str

    def plan(self, told: Settings, *, quick: bool) -> Plan:
        """The whole file."""
        self.keys(told, PLAN_KEYS, "the plan")
        for key, kind in (("name", str), ("note", str), ("seeds", list), ("tasks", list), ("method", list)):
            self.kind(told.get(key, "" if key == "note" else None), kind, key)
        defaults, hurry = (self.table(told.get(key, {}), key) for key in ("defaults", "quick"))
        names = [HOSTS, *(str(entry.get("name")) for entry in told["method"] if isinstance(entry, dict))]
        self.shared(defaults, names, "defaults", ())
        self.shared(hurry, names, "quick", QUICK_KEYS)
        entries = [self.entry(entry, defaults, hurry if quick else {}) for entry in told["method"]]
        labels = [entry.label for entry in entries]
        for label in labels:
            if labels.count(label) > 1:
                raise self.wrong(f"labels that differ, but two methods have {label!r}; give one of them another `label`")
        entries = [
            self.started(entry, told, entries, defaults, hurry if quick else {})
            for entry, told in zip(entries, told["method"], strict=True)
        ]
        top = {**told, **{key: hurry[key] for key in QUICK_KEYS if quick and key in hurry}}
        name, note = told["name"] + "-quick" * quick, told.get("note", "").strip()
        page = told.get("page", PAGES[0])
        if page not in PAGES:
            raise self.wrong(f"`page` to be {nearest(str(page), PAGES)}, but got {page!r}")
        fewer = {pattern: self.seeds(seeds) for pattern, seeds in self.table(told.get("seeds_of", {}), "seeds_of").items()}
        figures, tasks = self.figures(told.get("figures", [])), self.tasks(top["tasks"])
        return Plan(name, self.seeds(top["seeds"]), tasks, tuple(entries), note, figures, fewer, page)

    def entry(self, told: Any, defaults: Settings, hurry: Settings) -> Entry:
        """One [[method]]: its own config over the defaults, and under what is quick."""
        self.kind(told, dict, "method")
        self.keys(told, METHOD_KEYS, "[[method]]")
        name = told.get("name")
        if not isinstance(name, str) or name not in METHODS:
            raise self.wrong(f"`name` of a [[method]] to be {nearest(str(name), METHODS)}, but got {name!r}")
        method = METHODS[name]
        own, grid = (self.table(told.get(key, {}), key) for key in ("config", "grid"))
        for key, table in (("config", own), ("grid", grid)):
            self.keys(table, method.keys, f"`{key}` of {name!r}")
        for key, values in grid.items():
            if not isinstance(values, list) or not values or key in READING:
                raise self.wrong(f"`grid` of {name!r} to hold lists of settings of the fit, but {key!r} is {values!r}")
        if grid and method.single:
            raise self.wrong(f"no `grid` of {name!r}, which predicts nothing that validation data could judge")
        self.kind(told.get("label", name), str, "label")
        members = told.get("members", 1)
        if members not in (1, ENSEMBLE) or isinstance(members, bool) or (method.single and "members" in told):
            allowed = "left out, as it has none" if method.single else f"1 or {ENSEMBLE}"
            raise self.wrong(f"`members` of {name!r} to be {allowed}, but got {members!r}")
        if "from" in told and not (method.hosted and isinstance(told["from"], str)):
            raise self.wrong(f"`from` only on methods that start from trained nets, as a name, but {name!r} has {told['from']!r}")
        config = {**chosen(defaults, name), **own, **chosen(hurry, name)}
        config, grid = passed_on(config, name, grid), own_grid(name, grid)
        self.possible(name, "config", config)
        for key, values in grid.items():
            for value in values:
                self.possible(name, "grid", {**config, key: value})
        return Entry(name, told.get("label", name), members, config, grid, None, self.patterns(told.get("tasks", [])))

    def possible(self, name: str, where: str, config: Settings) -> None:
        """Refuse settings that the method cannot work with."""
        try:
            kinds.check(config)
            METHODS[name].settings(config)
        except ConfigError as error:
            raise ConfigError(f"{self.file}: `{where}` of {name!r}: {error}") from error

    def started(self, entry: Entry, told: Settings, entries: Sequence[Entry], defaults: Settings, hurry: Settings) -> Entry:
        """The entry with the method and config of the nets that `from` names."""
        if not METHODS[entry.name].hosted:
            return entry
        source = told.get("from", HOSTS)
        named = [e for e in entries if METHODS[e.name].source and source in (e.label, e.name)]
        name = named[0].name if named else source
        if name not in METHODS or not METHODS[name].source:
            labels = {n for n in METHODS if METHODS[n].source} | {e.label for e in entries if METHODS[e.name].source}
            raise self.wrong(f"`from` of {entry.label!r} to be {nearest(source, labels)}, but got {source!r}")
        grid = named[0].grid if named else {}
        if not set(grid) <= METHODS[name].stacks:
            raise self.wrong(f"`from` of {entry.label!r} to name nets without a `grid`, but {named[0].label!r} has one")
        config = named[0].config if named else {**chosen(defaults, name), **chosen(hurry, name)}
        made = {"method": name, "config": without_reading(config)} | ({"grid": grid} if grid else {})
        return replace(entry, source=made)

    def shared(self, told: Settings, names: Sequence[str], where: str, also: Sequence[str]) -> None:
        """[defaults] and [quick]: keys for every method that has them, and tables for one method by its name."""
        valid = {key for name in names if name in METHODS for key in METHODS[name].keys}
        for key, value in told.items():
            if isinstance(value, dict) and key in names and key in METHODS:
                self.keys(value, METHODS[key].keys, f"[{where}.{key}]")
            else:
                self.keys({key: value}, {*valid, *names, *also}, f"[{where}]")

    def patterns(self, told: Any) -> tuple[str, ...]:
        """Patterns of tasks, each of which must fit some task there is."""
        self.kind(told, list, "tasks")
        if told:
            self.tasks(told)
        return tuple(told)

    def seeds(self, told: Any) -> tuple[int, ...]:
        """Whole numbers."""
        self.kind(told, list, "seeds")
        if not told or not all(type(seed) is int and seed >= 0 for seed in told):
            raise self.wrong(f"`seeds` to be whole numbers ≥ 0, but got {told!r}")
        return tuple(dict.fromkeys(told))

    def tasks(self, told: list[Any]) -> tuple[str, ...]:
        """Names and patterns."""
        if not told or not all(isinstance(name, str) for name in told):
            raise self.wrong(f"`tasks` to be names of tasks, but got {told!r}")
        try:
            return tuple(expand(told))
        except ConfigError as error:
            raise ConfigError(f"{self.file}: {error}") from error

    def figures(self, told: Any) -> tuple[str, ...]:
        """Names of figures."""
        self.kind(told, list, "figures")
        for name in told:
            if name not in FIGURES:
                raise self.wrong(f"`figures` to hold {nearest(str(name), FIGURES)}, but got {name!r}")
        return tuple(told)

    def keys(self, told: Mapping[str, Any], valid: Collection[str], where: str) -> None:
        """Refuse unknown keys."""
        for key in told:
            if key not in valid:
                raise self.wrong(f"a key of {where} to be {nearest(key, valid)}, but got {key!r}")

    def kind(self, value: Any, kind: type, key: str) -> None:
        """Refuse values of another type, and absent ones."""
        if not isinstance(value, kind):
            words = {str: "a string", list: "a list", dict: "a table"}[kind]
            raise self.wrong(f"`{key}` to be {words}, but " + ("it is missing" if value is None else f"got {value!r}"))

    def table(self, value: Any, key: str) -> Settings:
        """A table, checked."""
        self.kind(value, dict, key)
        return value

    def wrong(self, what: str) -> ConfigError:
        """The error for something else than was expected."""
        return ConfigError(f"{self.file}: Expected {what}.")


def chosen(shared: Settings, name: str) -> Settings:
    """What [defaults] or [quick] say to one method: keys that it has, then its own table."""
    general = {key: value for key, value in shared.items() if key in METHODS[name].keys}
    return {**general, **(shared[name] if isinstance(shared.get(name), dict) else {})}


def passed_on(config: Settings, name: str, grid: Settings) -> Settings:
    """MaxWEnt chooses among several entropy weights itself, by the paper's rule (appendix B): the highest entropy below τ."""
    return {**config, "entropy_weight": grid["entropy_weight"]} if name == "maxwent" and "entropy_weight" in grid else config


def own_grid(name: str, grid: Settings) -> Settings:
    """What is left to be chosen by the benchmark, by validation risk."""
    return {key: values for key, values in grid.items() if not (name == "maxwent" and key == "entropy_weight")}
