"""Which lines and branches the tests reach: `python -m offmap_bench.checks.coverage [PYTEST ARGUMENTS]`; `... more TESTS` adds some.

The tests run once, with the name of the test beside each line that it reaches and the seconds that it takes: both stay in
`build/coverage` for the mutants. `bench/records/coverage.json` has the shares of each package. Processes that tests start are
followed too, except those that they kill. Nothing of offmap is imported here: what is imported before the tests is not seen.
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from offmap_bench.checks.records import replace_file
from offmap_bench.paths import RECORDS, ROOT

COVERED = ROOT / "build" / "coverage"
SECONDS = COVERED / "seconds.json"
RECORD = RECORDS / "coverage.json"
COUNTS = ("num_statements", "covered_lines", "num_branches", "covered_branches")
SOURCES = {"src/offmap/": "tests/", "bench/src/offmap_bench/": "bench/tests/"}
"""Where sources are, and their tests."""


class Clock:
    """A pytest plugin that adds up the seconds of each test."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Called for the setup, the call and the teardown of a test."""
        self.seconds[report.nodeid] = round(self.seconds.get(report.nodeid, 0.0) + report.duration, 4)


def cover(arguments: Sequence[str]) -> int:
    """Run the tests under coverage, after "more" in addition to earlier ones; return pytest's exit code."""
    import pytest

    more, clock = list(arguments[:1]) == ["more"], Clock()
    options = ["-q", "--cov", "--cov-context=test", "--cov-report=", "-p", "no:cacheprovider", *["--cov-append"] * more]
    code = pytest.main([*options, *arguments[more:]], plugins=[clock])
    before = json.loads(SECONDS.read_text(encoding="utf-8")) if more else {}
    replace_file(SECONDS, json.dumps(before | clock.seconds, indent=0, sort_keys=True))
    return int(code)


def record() -> dict[str, dict[str, int]]:
    """Count lines and branches of each package, and how many of them the tests reach; keep them on record."""
    import coverage

    measured = coverage.Coverage(data_file=str(COVERED / "data"), config_file=str(ROOT / "pyproject.toml"))
    measured.load()
    measured.json_report(outfile=str(COVERED / "report.json"), pretty_print=True)
    packages: dict[str, dict[str, int]] = {}
    for name, file in sorted(json.loads((COVERED / "report.json").read_text(encoding="utf-8"))["files"].items()):
        counts = packages.setdefault(package_of(name), dict.fromkeys(COUNTS, 0))
        for key in COUNTS:
            counts[key] += file["summary"][key]
    replace_file(RECORD, json.dumps(packages, indent=1) + "\n")
    return packages


def package_of(name: str) -> str:
    """The folder below `offmap` or `offmap_bench`, or the module.

    >>> package_of("/home/me/src/offmap/model/params.py"), package_of("src/offmap/fit.py")
    ('model', 'fit')
    >>> package_of("bench/src/offmap_bench/speed/page.py")
    'bench/speed'
    """
    _, slash, below = name.replace("\\", "/").rpartition("src/offmap_bench/")
    below = f"bench/{below}" if slash else name.replace("\\", "/").rpartition("src/offmap/")[2]
    return "/".join(below.split("/")[: 2 if slash else 1]).removesuffix(".py")


def shares(packages: Mapping[str, Mapping[str, int]]) -> tuple[float, ...]:
    """The shares of lines and of branches that the tests reach, in all packages together; 1 of none."""
    total = {key: sum(counts[key] for counts in packages.values()) for key in COUNTS}
    pairs = ((total[part], total[every]) for every, part in (COUNTS[:2], COUNTS[2:]))
    return tuple(part / every if every else 1.0 for part, every in pairs)


def table() -> str:
    """The shares on record, package by package."""
    packages: dict[str, dict[str, int]] = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}
    rows = ["| package | lines | reached | branches | reached |", "|---|--:|--:|--:|--:|"]
    for name, some in [*((name, {name: counts}) for name, counts in packages.items()), ("all", packages)]:
        sizes = (sum(counts[key] for counts in some.values()) for key in ("num_statements", "num_branches"))
        cells = [f"{size:,} | {share:.1%}" for size, share in zip(sizes, shares(some), strict=True)]
        rows.append(f"| `{name}` | {' | '.join(cells)} |")
    return "\n".join(rows)


# -------------------------------------------------------------------------------------------------------- tests of a line


class Reach:
    """Which tests reach which lines, and how long they take."""

    def __init__(self) -> None:
        from coverage import CoverageData

        self._data = CoverageData(str(COVERED / "data"))
        self._data.read()
        self._seconds: dict[str, float] = json.loads(SECONDS.read_text(encoding="utf-8"))

    def tests(self, file: str, line: int, budget: float) -> list[str]:
        """Tests that reach the statement of a line, of at most `budget` seconds.

        First the module's own, then those of its folder, then all others, file by file and the quickest first; before all, its own
        test file if that is newer than the coverage. A line that runs on import belongs to every test that reaches the module.
        """
        reached = self._data.contexts_by_lineno(str(ROOT / file))
        lines = statement((ROOT / file).read_text(encoding="utf-8"), line)
        names = {name.rpartition("|")[0] for n in lines or reached for name in reached.get(n, ()) if name}
        files: dict[str, list[str]] = {}
        for name in sorted(names, key=self._took):
            files.setdefault(name.partition("::")[0], []).append(name)
        own = ROOT / own_test(file)
        fresh = [own_test(file)] if own.exists() and (not lines or own.stat().st_mtime > SECONDS.stat().st_mtime) else []
        folder = own_test(file).rpartition("/")[0]

        def rank(path: str) -> tuple[bool, bool, float]:
            return path not in (file, own_test(file)), not path.startswith(folder), sum(map(self._took, files[path]))

        chosen: list[str] = []
        for name in (name for path in sorted(files, key=rank) if path not in fresh for name in files[path]):
            if (seconds := self._took(name)) <= budget:
                budget -= seconds
                chosen.append(without_group(name))
        return fresh + chosen

    def _took(self, name: str) -> float:
        return self._seconds.get(name, 1.0)


def without_group(name: str) -> str:
    """The name of a test without the group that xdist puts behind it.

    >>> without_group("test_a.py::test_b[1]@c"), without_group("test_a.py::test_b[x@y]")
    ('test_a.py::test_b[1]', 'test_a.py::test_b[x@y]')
    """
    bare, _, group = name.rpartition("@")
    return name if not bare or "]" in group else bare


def own_test(file: str) -> str:
    """The test file of a module.

    >>> own_test("src/offmap/posterior/noise.py"), own_test("src/offmap/metrics/__init__.py")
    ('tests/posterior/test_noise.py', 'tests/metrics/test_metrics.py')
    >>> own_test("bench/src/offmap_bench/runner/store.py")
    'bench/tests/runner/test_store.py'
    """
    source, tests = next(pair for pair in SOURCES.items() if file.startswith(pair[0]))
    folder, slash, module = f"{tests}{file.removeprefix(source).removesuffix('.py')}".rpartition("/")
    return f"{folder}{slash}test_{folder.rpartition('/')[2] if module == '__init__' else module}.py"


def statement(text: str, line: int) -> list[int]:
    """Lines of the smallest statement of a function that holds a line; of a compound one the head alone, of a function all of it.
    What runs on import has none: no test owns it.

    >>> text = "@cache\\ndef f():\\n    if a:\\n        b = (1 +\\n             2)\\n"
    >>> statement(text, 1), statement(text, 3), statement(text, 5), statement("a = 1\\n", 1)
    ([2, 3, 4, 5], [3], [4, 5], [])
    """

    def span(node: ast.stmt) -> tuple[int, int]:
        decorators: Iterable[ast.expr] = getattr(node, "decorator_list", [])
        return min([node.lineno, *(d.lineno for d in decorators)]), node.end_lineno or node.lineno

    functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
    inner = [node for function in functions for node in ast.walk(function) if isinstance(node, ast.stmt)]
    nodes = [node for node in inner if span(node)[0] <= line <= span(node)[1]]
    if not nodes:
        return []
    node = min(nodes, key=lambda node: span(node)[1] - span(node)[0])
    body: list[ast.stmt] = getattr(node, "body", [])
    if isinstance(node, ast.FunctionDef | ast.ClassDef) or not body:
        return list(range(node.lineno, span(node)[1] + 1))
    return list(range(node.lineno, max(body[0].lineno, node.lineno + 1)))


if __name__ == "__main__":
    failed = cover(sys.argv[1:])
    lines, branches = shares(record())
    print(f"{lines:.1%} of lines, {branches:.1%} of branches")
    sys.exit(failed)
