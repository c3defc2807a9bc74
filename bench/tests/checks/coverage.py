"""Which lines and branches the tests reach: `python -m checks.coverage [ARGUMENTS]`; `... more TESTS` adds some.

The tests run once, with the name of the test beside each line that it reaches and the seconds that it takes: both stay in
`build/coverage` for the mutants. `bench/records/coverage.json` has the shares of each package. Processes that tests start are
followed too, except those that they kill. Nothing of offmap is imported here: what is imported before the tests is not seen.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from checks.records import replace_file
from offmap_bench.paths import RECORDS, ROOT

COVERED = ROOT / "build" / "coverage"
SECONDS = COVERED / "seconds.json"
RECORD = RECORDS / "coverage.json"
COUNTS = ("num_statements", "covered_lines", "num_branches", "covered_branches")


class Clock(dict[str, float]):
    """A pytest plugin that adds up the seconds of each test."""

    def pytest_runtest_logreport(self, report: Any) -> None:
        self[report.nodeid] = round(self.get(report.nodeid, 0.0) + report.duration, 4)


def cover(arguments: Sequence[str]) -> int:
    """Run the tests under coverage, after "more" in addition to earlier ones; return pytest's exit code."""
    import pytest

    more, clock = list(arguments[:1]) == ["more"], Clock()
    options = ["-q", "--cov", "--cov-context=test", "--cov-report=", "-p", "no:cacheprovider", *["--cov-append"] * more]
    code = pytest.main([*options, *arguments[more:]], plugins=[clock])
    before = json.loads(SECONDS.read_text(encoding="utf-8")) if more else {}
    replace_file(SECONDS, json.dumps(before | clock, indent=0, sort_keys=True))
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

    >>> [package_of(f"src/{name}.py") for name in ("offmap/model/params", "offmap/fit", "offmap_bench/speed/page")]
    ['model', 'fit', 'bench/speed']
    """
    match = re.search(r"src/offmap(_bench)?/([^/]+)", name.replace("\\", "/"))
    return f"{'bench/' if match[1] else ''}{match[2]}".removesuffix(".py") if match else name


def shares(packages: Mapping[str, Mapping[str, int]]) -> tuple[float, ...]:
    """The shares of lines and of branches that the tests reach, in all packages together; 1 of none."""
    total = {key: sum(counts[key] for counts in packages.values()) for key in COUNTS}
    pairs = ((total[part], total[every]) for every, part in (COUNTS[:2], COUNTS[2:]))
    return tuple(part / every if every else 1.0 for part, every in pairs)


def table() -> str:
    packages: dict[str, dict[str, int]] = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}
    rows = ["| package | lines | reached | branches | reached |", "|---|--:|--:|--:|--:|"]
    for name, some in [*((name, {name: counts}) for name, counts in packages.items()), ("all", packages)]:
        sizes = (sum(counts[key] for counts in some.values()) for key in ("num_statements", "num_branches"))
        cells = [f"{size:,} | {share:.1%}" for size, share in zip(sizes, shares(some), strict=True)]
        rows.append(f"| `{name}` | {' | '.join(cells)} |")
    return "\n".join(rows)


class Reach:
    """Which tests reach which lines, and how long they take."""

    def __init__(self) -> None:
        from coverage import CoverageData

        self._data = CoverageData(str(COVERED / "data"))
        self._data.read()
        self._seconds: dict[str, float] = json.loads(SECONDS.read_text(encoding="utf-8"))

    def tests(self, file: str, line: int, budget: float) -> list[str]:
        """Tests that reach a line, of at most `budget` seconds: the module's own first, then those of its folder, then others.

        A line inside a statement of several lines counts as the nearest one above that is reached; what runs on import belongs
        to every test that reaches the module. The module's own test file comes first if it is newer than the coverage.
        """
        reached = {n: [name for name in names if name] for n, names in self._data.contexts_by_lineno(str(ROOT / file)).items()}
        near = max((n for n in reached if n <= line), default=line)
        names = {n.rpartition("|")[0] for n in reached.get(near) or (name for some in reached.values() for name in some)}
        test_file, folder = own_test(file), own_test(file).rpartition("/")[0]
        is_new = (ROOT / test_file).exists() and (ROOT / test_file).stat().st_mtime > SECONDS.stat().st_mtime
        chosen = [test_file] if is_new or ((ROOT / test_file).exists() and not reached.get(near)) else []

        def rank(name: str) -> tuple[bool, bool, str, float]:
            path = name.partition("::")[0]
            return path not in (file, test_file), not path.startswith(folder), path, self._seconds.get(name, 1.0)

        for name in sorted(names, key=rank):
            seconds = self._seconds.get(name, 1.0)
            if seconds <= budget and name.partition("::")[0] not in chosen:
                budget -= seconds
                chosen.append(re.sub(r"@[^]]*$", "", name))  # without the group of xdist
        return chosen


def own_test(file: str) -> str:
    """The test file of a module.

    >>> own_test("src/offmap/posterior/noise.py"), own_test("bench/src/offmap_bench/report/__init__.py")
    ('tests/posterior/test_noise.py', 'bench/tests/report/test_report.py')
    """
    folder, _, module = re.sub(r"src/offmap(_bench)?/", "tests/", file).removesuffix(".py").rpartition("/")
    return f"{folder}/test_{folder.rpartition('/')[2] if module == '__init__' else module}.py"


if __name__ == "__main__":
    failed = cover(sys.argv[1:])
    lines, branches = shares(record())
    print(f"{lines:.1%} of lines, {branches:.1%} of branches")
    sys.exit(failed)
