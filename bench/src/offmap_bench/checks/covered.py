"""Which lines and branches the tests reach: `python -m offmap_bench.checks.covered`, or `make coverage`; `... more TESTS` adds some.

The tests run once, with the name of the test beside each line that it reaches and the seconds that it takes: both stay in
`build/coverage` for the mutants. `bench/records/coverage.json` keeps the shares of each room. Processes that tests start are
followed too, except those that they kill. Nothing of offmap is imported here: what is imported before the tests is not seen.
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from offmap_bench.paths import RECORDS, ROOT

SOURCE = ROOT / "src" / "offmap"
COVERED = ROOT / "build" / "coverage"
SECONDS = COVERED / "seconds.json"
LOOKING = ("tests/test_frozen.py",)
"""Tests that look at all modules, and run no line of them."""

RECORD = RECORDS / "coverage.json"


def write(path: Path, text: str) -> None:
    """Writes a file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


class Clock:
    """A pytest plugin that adds up the seconds of each test."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Called for the beginning, the middle and the end of a test."""
        self.seconds[report.nodeid] = round(self.seconds.get(report.nodeid, 0.0) + report.duration, 4)


def cover(arguments: Sequence[str]) -> int:
    """Runs the tests under coverage and keeps what it saw, after "more" beside what was seen before; pytest's exit code."""
    import pytest

    more, clock = list(arguments[:1]) == ["more"], Clock()
    options = ["-q", "--cov", "--cov-context=test", "--cov-report=", "-p", "no:cacheprovider"]
    code = pytest.main([*options, *(["--cov-append"] if more else []), *arguments[more:]], plugins=[clock])
    write(SECONDS, json.dumps((timed() if more else {}) | clock.seconds, indent=0, sort_keys=True))
    return int(code)


def timed() -> dict[str, float]:
    """The seconds of each test that coverage saw."""
    return json.loads(SECONDS.read_text(encoding="utf-8"))


# ------------------------------------------------------------------------------------------------------------ the shares


def record() -> dict[str, dict[str, int]]:
    """Lines and branches of each room, and how many of them the tests reach; kept on record."""
    import coverage

    measured = coverage.Coverage(data_file=str(COVERED / "data"), config_file=str(ROOT / "pyproject.toml"))
    measured.load()
    measured.json_report(outfile=str(COVERED / "report.json"), pretty_print=True)
    files = json.loads((COVERED / "report.json").read_text(encoding="utf-8"))["files"]
    rooms: dict[str, dict[str, int]] = {}
    for name, found in sorted(files.items()):
        counts, summary = rooms.setdefault(room_of(name), dict.fromkeys(COUNTS, 0)), found["summary"]
        for key in COUNTS:
            counts[key] += summary[key]
    write(RECORD, json.dumps(rooms, indent=1) + "\n")
    return rooms


COUNTS = ("num_statements", "covered_lines", "num_branches", "covered_branches")


def room_of(name: str) -> str:
    """The folder below `offmap`, or the module."""
    return below(name).split("/")[0].removesuffix(".py")


def below(name: str) -> str:
    """A source file's path below `src/offmap`."""
    return name.replace("\\", "/").rpartition("src/offmap/")[2]


def shares(rooms: Mapping[str, Mapping[str, int]]) -> tuple[float, ...]:
    """The shares of lines and of branches that the tests reach, in all rooms together; all of none."""
    total = {key: sum(counts[key] for counts in rooms.values()) for key in COUNTS}
    lines, branches = ((total[part], total[whole]) for whole, part in (COUNTS[:2], COUNTS[2:]))
    return tuple(part / whole if whole else 1.0 for part, whole in (lines, branches))


def section() -> str:
    """The figures, as a part of the page of trials."""
    if not RECORD.exists():
        return ""
    rooms: dict[str, dict[str, int]] = json.loads(RECORD.read_text(encoding="utf-8"))
    lines = ["", "## Coverage", "", INTRODUCTION, "", "| room | lines | reached | branches | reached |", "|---|--:|--:|--:|--:|"]
    for name, some in [*((name, {name: counts}) for name, counts in rooms.items()), ("all", rooms)]:
        sizes = (sum(counts[key] for counts in some.values()) for key in ("num_statements", "num_branches"))
        cells = [f"{size:,} | {share:.1%}" for size, share in zip(sizes, shares(some), strict=True)]
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


INTRODUCTION = "Lines and branches that `make test` reaches (`make coverage`), without exclusions."


# --------------------------------------------------------------------------------------------------- tests of a line


class Reach:
    """Which tests reach which lines, and how long they take."""

    def __init__(self) -> None:
        from coverage import CoverageData

        self._data = CoverageData(str(COVERED / "data"))
        self._data.read()
        self._seconds = timed()
        self._files = {below(name): name for name in self._data.measured_files()}
        self._lines: dict[str, dict[int, list[str]]] = {}

    def tests(self, file: str, line: int, budget: float) -> list[str]:
        """Tests that reach the statement of a line, of at most `budget` seconds, file by file: the module's own, those of its
        room, then all others, the quickest first; before all, own files that are newer than what coverage saw. A line that runs
        on import belongs to all tests of the module's own, and to others that reach the module.
        """
        if file not in self._lines:
            self._lines[file] = self._data.contexts_by_lineno(self._files[file])
        reached = self._lines[file]
        lines = statement((SOURCE / file).read_text(encoding="utf-8"), line)
        names = _names(reached, lines or reached)
        files: dict[str, list[str]] = {}
        for name in sorted(names, key=self._took):
            files.setdefault(name.partition("::")[0], []).append(name)

        def rank(path: str) -> tuple[bool, bool, float]:
            module, room = own(file)
            return path not in module, not path.startswith(room), sum(map(self._took, files[path]))

        fresh = self._fresh(file) if lines else [n for n in (*own(file)[0][1:], *LOOKING) if (ROOT / n).exists()]
        known = (name for path in sorted(files, key=rank) for name in files[path] if path not in fresh)
        return [*fresh, *map(ungrouped, self._affordable(known, budget))]

    def _took(self, name: str) -> float:
        return self._seconds.get(name, 1.0)

    def _fresh(self, file: str) -> list[str]:
        """Files of a module's own tests that were changed since: all of their tests may reach any line."""
        seen = SECONDS.stat().st_mtime
        return [name for name in own(file)[0][1:] if (ROOT / name).exists() and (ROOT / name).stat().st_mtime > seen]

    def _affordable(self, names: Iterable[str], budget: float) -> Iterator[str]:
        for name in names:
            if (seconds := self._took(name)) <= budget:
                budget -= seconds
                yield name


def _names(reached: Mapping[int, Sequence[str]], lines: Iterable[int]) -> set[str]:
    """The tests of some lines, without the phase that coverage puts behind their names."""
    return {name.rpartition("|")[0] for line in lines for name in reached.get(line, ()) if name}


def ungrouped(name: str) -> str:
    """The name of a test without the group that xdist puts behind it.

    >>> ungrouped("test_a.py::test_b[1]@c"), ungrouped("test_a.py::test_b[x@y]")
    ('test_a.py::test_b[1]', 'test_a.py::test_b[x@y]')
    """
    bare, _, group = name.rpartition("@")
    return name if not bare or "]" in group else bare


def own(file: str) -> tuple[tuple[str, str], str]:
    """The files of a module's own tests, and the folder of those of its room.

    >>> own("core/noise.py")
    (('src/offmap/posterior/noise.py', 'tests/posterior/test_noise.py'), 'tests/model/')
    >>> own("metrics/__init__.py")
    (('src/offmap/metrics/__init__.py', 'tests/metrics/test_metrics.py'), 'tests/metrics/')
    """
    room, slash, module = f"tests/{file.removesuffix('.py')}".rpartition("/")
    module = room.rpartition("/")[2] if module == "__init__" else module
    return (f"src/offmap/{file}", f"{room}{slash}test_{module}.py"), f"{room}{slash}"


def statement(text: str, line: int) -> list[int]:
    """Lines of the smallest statement of a function that holds a line; of a compound one the head alone, of a function the whole.
    What runs on import has none: whoever came first is no more its test than others.

    >>> text = "@cache\\ndef f():\\n    if a:\\n        b = (1 +\\n             2)\\n"
    >>> statement(text, 1), statement(text, 3), statement(text, 5), statement("a = 1\\n", 1)
    ([2, 3, 4, 5], [3], [4, 5], [])
    """
    tree = ast.parse(text)
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    inner = [node for function in functions for node in ast.walk(function) if isinstance(node, ast.stmt)]
    nodes = [node for node in inner if first(node) <= line <= last(node)]
    if not nodes:
        return []
    node = min(nodes, key=lambda node: last(node) - first(node))
    body: list[ast.stmt] = getattr(node, "body", [])
    whole = isinstance(node, ast.FunctionDef | ast.ClassDef) or not body
    return list(range(node.lineno, last(node) + 1 if whole else max(body[0].lineno, node.lineno + 1)))


def first(node: ast.stmt) -> int:
    """The first line of a statement, with decorators."""
    return min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", []))])


def last(node: ast.stmt) -> int:
    """The last line of a statement."""
    return node.end_lineno or node.lineno


if __name__ == "__main__":
    failed = cover(sys.argv[1:])
    lines, branches = shares(record())
    print(f"{lines:.1%} of lines, {branches:.1%} of branches")
    sys.exit(failed)
