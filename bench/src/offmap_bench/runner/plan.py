"""Plans: TOML files that name tasks, methods, seeds and grids, and the cells they stand for."""

from __future__ import annotations

import hashlib
import json
import sys
import tomllib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from importlib import resources
from pathlib import Path
from typing import Any

from offmap.errors import ConfigError, FileError, nearest
from offmap.scores.score import SCORES
from offmap_bench.methods.competitor import check_settings
from offmap_bench.runner.images import IMAGE_METHODS
from offmap_bench.runner.methods import BASE, SCORING, SIZE, TABLE_METHODS, Methods, without
from offmap_bench.runner.shifts import SHIFT_METHODS
from offmap_bench.tasks.catalog import expand
from offmap_bench.tasks.task import check_name

Settings = dict[str, Any]

METHODS = Methods(TABLE_METHODS | IMAGE_METHODS | SHIFT_METHODS)

PLAN_KEYS = ("name", "title", "note", "figures", "page", "seeds", "seeds_of", "tasks", "defaults", "method", "quick")
METHOD_KEYS = ("name", "label", "members", "from", "config", "grid", "tasks")
QUICK_KEYS = ("seeds", "tasks")
FIGURES = ("synthetic", "moons", "tradeoff", "day")  # those that need more than the numbers of records
PAGES = ("means", "ranks", "shifts")  # over tasks; among methods on near, far and open-set images; by kinds of data


@dataclass(frozen=True)
class Cell:
    """One run of a method on a task."""

    task: str
    method: str
    label: str = field(compare=False)  # its name in tables; it does not count in the hash
    config: Settings  # differences from the defaults only
    seed: int  # of the task's split, the starts and the draws
    members: int = 1  # size of the ensemble; 1: every net alone, metrics averaged over the nets
    grid: Settings = field(default_factory=dict[str, Any])  # lists of settings, chosen by validation NLL
    source: Settings | None = None  # method, config and grid of the base models it starts from

    def as_dict(self) -> Settings:
        """Return it as in a record; an absent grid or source is left out."""
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
        return without(self.config, "score")


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

    @property
    def score(self) -> str:
        """The name of the score that its rows have, or "own"."""
        return self.config.get("score", METHODS[self.name].score)


@dataclass(frozen=True)
class Plan:
    """Every entry on every task with every seed."""

    name: str  # of its records and pages
    seeds: tuple[int, ...]
    tasks: tuple[str, ...]
    entries: tuple[Entry, ...]
    title: str = ""  # of its page, by default the name
    note: str = ""  # Markdown for its page
    figures: tuple[str, ...] = ()  # what else is drawn of it
    seeds_of: Mapping[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])  # fewer, by patterns of tasks
    page: str = "means"  # how its records are tabulated

    def wants(self, entry: Entry, task: str, seed: int) -> bool:
        fewer = (seeds for pattern, seeds in self.seeds_of.items() if fnmatchcase(task, pattern))
        return (not entry.tasks or _matches(task, entry.tasks)) and all(seed in seeds for seeds in fewer)

    @property
    def labels(self) -> list[str]:
        return [entry.label for entry in self.entries]

    @property
    def scores(self) -> dict[str, str]:
        """The score of every label."""
        return {entry.label: entry.score for entry in self.entries}


def cells(plan: Plan) -> list[Cell]:
    """Return all cells, those that share a task and a fit side by side."""
    planned = [
        Cell(task, entry.name, entry.label, entry.config, seed, entry.members, entry.grid, entry.source)
        for seed in plan.seeds
        for task in plan.tasks
        for entry in plan.entries
        if plan.wants(entry, task, seed)
    ]
    groups: dict[tuple[int, str, str], list[Cell]] = {}
    for cell in planned:
        groups.setdefault((cell.seed, cell.task, cell.fit_key), []).append(cell)
    return [cell for group in groups.values() for cell in group]


def narrow_plan(
    plan: Plan, *, label: str | None = None, seeds: Sequence[int] | None = None, tasks: Sequence[str] | None = None
) -> Plan:
    """Return a part of a plan: entries whose label matches `label`, some seeds, and the tasks that match one of the patterns."""
    entries = tuple(e for e in plan.entries if label is None or e.label == label or fnmatchcase(e.label, label))
    if not entries:
        check_name("a label to be", label, plan.labels)
    for pattern in tasks or ():
        if not any(fnmatchcase(task, pattern) for task in plan.tasks):
            check_name("a task of the plan to be", pattern, plan.tasks)
    names = tuple(task for task in plan.tasks if not tasks or _matches(task, tasks))
    return replace(plan, entries=entries, seeds=tuple(dict.fromkeys(seeds)) if seeds else plan.seeds, tasks=names)


def digest(content: Settings) -> str:
    """Return a stable hash of JSON content, in 16 hexadecimal digits."""
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


def read_plan(name: str | Path, *, quick: bool = False) -> Plan:
    """Read a plan that comes with offmap-bench, by its name, or one of your own, by the path of its file."""
    path = Path(name)
    if path.suffix != ".toml":
        texts = read_packaged()
        if str(name) not in texts:
            raise ConfigError(f"Expected a plan to be {nearest(str(name), texts)} or the path of a .toml file, but got {name!s}.")
        return parse(texts[str(name)], f"{name}.toml", quick=quick)
    try:
        text, folder = path.read_text(encoding="utf-8"), str(path.parent.resolve())
    except (OSError, UnicodeDecodeError) as error:
        raise FileError(f"Expected a plan at {path}, but it cannot be read: {error}.") from error
    if folder not in sys.path:
        sys.path.append(folder)  # where methods of the user's own may be; processes of a run inherit it
    return parse(text, str(path), quick=quick)


def read_packaged(folder: str = "plans") -> dict[str, str]:
    """Read the TOML files that come with offmap-bench: {name: text}."""
    files = (resources.files("offmap_bench") / folder).iterdir()
    texts = {f.name.removesuffix(".toml"): f.read_text(encoding="utf-8") for f in files if f.name.endswith(".toml")}
    return dict(sorted(texts.items()))


def parse(text: str, file: str, *, quick: bool = False) -> Plan:
    """Read the text of a plan; errors name the file, the key and the nearest valid key."""
    try:
        return _read_plan(tomllib.loads(text), quick)
    except tomllib.TOMLDecodeError as error:
        raise FileError(f"Expected TOML in {file}, but it cannot be read: {error}.") from error
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from error


def _read_plan(content: Settings, quick: bool) -> Plan:
    _check_keys(content, PLAN_KEYS, "the plan")
    words = (("name", None), ("title", ""), ("note", ""), ("page", PAGES[0]))
    name, title, note, page = (_get(content, key, str, default) for key, default in words)
    methods, figures = _get(content, "method", list), _get(content, "figures", list, [])
    fewer, *layers = (_get(content, key, dict, {}) for key in ("seeds_of", "defaults", "quick"))
    _check_shared(methods, *layers)
    layers = layers if quick else [layers[0], {}]
    entries = [_read_entry(method, *layers) for method in methods]
    labels = [entry.label for entry in entries]
    for label in labels:
        if labels.count(label) > 1:
            raise ConfigError(f"Expected labels that differ, but two methods have {label!r}; give one of them another `label`.")
    top = content | {key: layers[1][key] for key in QUICK_KEYS if key in layers[1]}
    return Plan(
        name + "-quick" * quick, _read_seeds(top), _read_tasks(top), title=title or name, note=note.strip(),
        page=check_name("`page` to be", page, PAGES),
        entries=tuple(_add_source(e, m, entries, *layers) for e, m in zip(entries, methods, strict=True)),
        figures=tuple(check_name("`figures` to hold", figure, FIGURES) for figure in figures),
        seeds_of={pattern: _read_seeds({"seeds": seeds}) for pattern, seeds in fewer.items()},
    )  # fmt: skip


def _check_shared(methods: list[Any], defaults: Settings, quick: Settings) -> None:
    """Check [defaults] and [quick]: keys for every method that has them, and tables for one method by its name."""
    names = [BASE, *(str(method.get("name")) for method in methods if isinstance(method, dict))]
    keys_of = {name: METHODS[name].keys for name in names if name in METHODS or ":" in name}
    for section, content, more in (("defaults", defaults, ()), ("quick", quick, QUICK_KEYS)):
        tables = {key: value for key, value in content.items() if isinstance(value, dict) and key in keys_of}
        for name, table in tables.items():
            _check_keys(table, keys_of[name], f"[{section}.{name}]")
        _check_keys(without(content, *tables), {*names, *more}.union(*keys_of.values()), f"[{section}]")


def _read_entry(content: Any, defaults: Settings, quick: Settings) -> Entry:
    """Read one [[method]]: its own config over the defaults, and under [quick]."""
    _check_keys(_get({"method": content}, "method", dict), METHOD_KEYS, "[[method]]")
    name = content.get("name")
    if not isinstance(name, str) or ":" not in name:  # else `module:callable`
        name = check_name("`name` of a [[method]] to be", name, [name for name in METHODS if ":" not in name])
    method, label = METHODS[name], _get(content, "label", str, name)
    config, grid = (_get(content, key, dict, {}) for key in ("config", "grid"))
    for key, table in (("config", config), ("grid", grid)):
        _check_keys(table, method.keys, f"`{key}` of {name!r}")
    for key, values in grid.items():
        if not isinstance(values, list) or not values or key in SCORING:
            raise ConfigError(f"Expected `grid` of {name!r} to hold lists of settings of the fit, but {key!r} is {values!r}.")
    if grid and method.scores_only:
        raise ConfigError(f"Expected no `grid` of {name!r}, which predicts nothing that validation data could judge.")
    members = content.get("members", 1)
    if members not in (1, SIZE) or isinstance(members, bool) or (method.scores_only and "members" in content):
        allowed = "left out, as it has none" if method.scores_only else f"1 or {SIZE}"
        raise ConfigError(f"Expected `members` of {name!r} to be {allowed}, but got {members!r}.")
    if "from" in content and not (method.from_models and isinstance(content["from"], str)):
        words = "`from` only on methods that start from trained nets, as a name"
        raise ConfigError(f"Expected {words}, but {name!r} has {content['from']!r}.")
    config = {**_select_settings(defaults, name), **config, **_select_settings(quick, name)}
    if name == "maxwent" and "entropy_weight" in grid:  # it chooses itself, by appendix B: the highest entropy below τ
        config, grid = config | {"entropy_weight": grid["entropy_weight"]}, without(grid, "entropy_weight")
    if method.score == "paper":
        config = {"score": "paper"} | config
    for key, changes in [("config", {}), *(("grid", {setting: v}) for setting, values in grid.items() for v in values)]:
        try:
            check_settings({} if ":" in name else config | changes)
            check_name("`score` to be", config.get("score", "default"), SCORES)
            method.settings(config | changes)
        except ConfigError as error:
            raise ConfigError(f"`{key}` of {name!r}: {error}") from error
    if content.get("tasks"):
        _read_tasks(content)
    return Entry(name, label, members, config, grid, tasks=tuple(_get(content, "tasks", list, [])))


def _add_source(entry: Entry, content: Settings, entries: Sequence[Entry], *layers: Settings) -> Entry:
    """Add the method and config of the nets that `from` names."""
    if not METHODS[entry.name].from_models:
        return entry
    source, givers = content.get("from", BASE), [e for e in entries if METHODS[e.name].gives_models]
    named = next((e for e in givers if source in (e.label, e.name)), None)
    names = {name for name, method in METHODS.items() if method.gives_models} | {e.label for e in givers}
    check_name(f"`from` of {entry.label!r} to be", source, names)
    if named and not set(named.grid) <= METHODS[named.name].stacks:
        words = f"`from` of {entry.label!r} to name nets without a `grid`"
        raise ConfigError(f"Expected {words}, but {named.label!r} has one.")
    name = named.name if named else source
    config = named.config if named else {k: v for layer in layers for k, v in _select_settings(layer, name).items()}
    grid = {"grid": named.grid} if named and named.grid else {}
    return replace(entry, source={"method": name, "config": without(config, *SCORING), **grid})


def _select_settings(shared: Settings, name: str) -> Settings:
    """Return the settings of [defaults] or [quick] for one method: keys that it has, then its own table."""
    general = {key: value for key, value in shared.items() if key in METHODS[name].keys}
    return {**general, **(shared[name] if isinstance(shared.get(name), dict) else {})}


def _read_seeds(content: Settings) -> tuple[int, ...]:
    seeds = _get(content, "seeds", list)
    if not seeds or not all(type(seed) is int and seed >= 0 for seed in seeds):
        raise ConfigError(f"Expected `seeds` to be whole numbers ≥ 0, but got {seeds!r}.")
    return tuple(dict.fromkeys(seeds))


def _read_tasks(content: Settings) -> tuple[str, ...]:
    tasks = _get(content, "tasks", list)
    if not tasks or not all(isinstance(name, str) for name in tasks):
        raise ConfigError(f"Expected `tasks` to be names of tasks, but got {tasks!r}.")
    return tuple(expand(tasks))


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _check_keys(content: Iterable[str], valid: Collection[str], place: str) -> None:
    for key in content:
        check_name(f"a key of {place} to be", key, valid)


def _get(content: Settings, key: str, kind: type, default: Any = None) -> Any:
    """Return a value; refuse values of another type, and absent ones without a default."""
    value = content.get(key, default)
    if not isinstance(value, kind):
        words = {str: "a string", list: "a list", dict: "a table"}[kind]
        raise ConfigError(f"Expected `{key}` to be {words}, but " + ("it is missing." if value is None else f"got {value!r}."))
    return value
