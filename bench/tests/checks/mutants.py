"""Small changes to the code, and whether a test notices: `python -m checks.mutants run`, `... again`, `... left`.

`run` draws changes that cosmic-ray can make, in an order set by a seed, and gives each to the tests that reach its line, as
`checks.coverage` recorded them, in a copy of the repository (`build/mutants`); a mutant that none of them fails has
survived. A test that fails without any change too kills nothing. `again` gives survivors to the tests once more, after new tests
and coverage; `left` lists survivors that `mutants.toml` does not explain.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import random
import re
import shlex
import shutil
import sys
import time
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import chdir, suppress
from dataclasses import asdict, dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

from checks import records
from checks.coverage import Reach
from offmap_bench.paths import ROOT

SUBJECTS = ("model", "posterior", "maxwent", "metrics.py", "scores", "conformal.py")
"""Folders and files below `src/offmap`."""

EXPLAINED, COPY = Path(__file__).with_name("mutants.toml"), ROOT / "build" / "mutants"

Span = tuple[tuple[int, int], tuple[int, int]]
Entry = dict[str, Any]
"""Fields of a mutant, its `end`, `by` which of so many `tests`, the line `before` and `after`, and the `source` as a digest."""


@dataclass(frozen=True)
class Mutant:
    """The `occurrence`-th change that an operator of cosmic-ray can make to a file."""

    file: str
    operator: str
    occurrence: int
    line: int

    @staticmethod
    def of(entry: Entry) -> Mutant:
        return Mutant(entry["file"], entry["operator"], entry["occurrence"], entry["line"])

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.operator.removeprefix('core/')} {self.occurrence}"

    def text(self) -> str:
        from cosmic_ray.mutating import mutate_code
        from cosmic_ray.plugins import get_operator

        text = mutate_code(read(self.file), get_operator(self.operator)(), self.occurrence)
        if text is None:
            raise ValueError(f"{self} is no longer there; draw mutants anew")
        return text


@cache
def read(file: str) -> str:
    return (ROOT / file).read_text(encoding="utf-8")


def digest(file: str) -> str:
    return hashlib.sha256(read(file).encode()).hexdigest()[:16]


def draw(seed: int) -> Iterator[Mutant]:
    """Yield one mutant of each place, the places in an order by seed: each beginning of it is a fair sample of the code."""
    chance, source = random.Random(seed), ROOT / "src" / "offmap"
    paths = (path for name in SUBJECTS for path in ([source / name] if name.endswith(".py") else (source / name).rglob("*.py")))
    files = sorted(path.relative_to(ROOT).as_posix() for path in paths)
    places = [choices for file in files for choices in mutants_of(file).values()]
    for choices in chance.sample(places, len(places)):
        chance.shuffle(choices)
        for mutant in choices:
            with suppress(SyntaxError):  # the star before keyword arguments is no product
                if count_positional(mutant.text()) == count_positional(read(mutant.file)):
                    yield mutant
                    break


def mutants_of(file: str) -> dict[Span, list[Mutant]]:
    """All mutants of a file, by the place that they change; annotations are left out, as nothing reads them at run time."""
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.plugins import get_operator, operator_names

    nodes, spared = list(ast_nodes(get_ast(read(file)))), find_annotations(read(file))
    by_span: dict[Span, list[Mutant]] = {}
    for name in operator_names():
        if (kind := get_operator(name)).arguments():
            continue  # those need arguments
        spans = (span for node in nodes for span in kind().mutation_positions(node))
        for i, span in enumerate(spans):
            if not any(start <= span[0] and span[1] <= stop for start, stop in spared):
                by_span.setdefault(span, []).append(Mutant(file, name, i, span[0][0]))
    return by_span


def find_annotations(text: str) -> list[Span]:
    kinds = (getattr(node, name, None) for node in ast.walk(ast.parse(text)) for name in ("annotation", "returns"))
    nodes = [kind for kind in kinds if isinstance(kind, ast.expr)]
    return [((n.lineno, n.col_offset), (n.end_lineno or n.lineno, n.end_col_offset or 0)) for n in nodes]


def count_positional(text: str) -> list[int]:
    """How many arguments of each function are positional only."""
    return [len(node.posonlyargs) for node in ast.walk(ast.parse(text)) if isinstance(node, ast.arguments)]


def changed_line(before: str, after: str, line: int) -> tuple[str, str]:
    """The line of a change in both texts; in the second, empty where it is gone."""
    lines = before.splitlines(), after.splitlines()
    return lines[0][line - 1].strip(), "" if len(lines[1]) < len(lines[0]) else lines[1][line - 1].strip()


class Judge:
    """Gives mutants to tests, in a copy of the repository; tests that fail without any change too count for nothing."""

    def __init__(self) -> None:
        unneeded = shutil.ignore_patterns(".*", "build", "records", "__pycache__", "figures")
        shutil.rmtree(COPY, ignore_errors=True)
        shutil.copytree(ROOT, COPY, ignore=unneeded)
        self._sound, self._unsound = set[str](), set[str]()

    def fate(self, mutant: Mutant, tests: Sequence[str]) -> tuple[str, str, int]:
        """How a mutant ends, by which test, and how many it was given."""
        while sound := [name for name in tests if name not in self._unsound]:
            end, by = self.run(sound, mutant)
            if end == "hung" and self.run(sound)[0] == "hung":
                end = "survived"  # the tests themselves take so long
            if end == "killed" and by not in self._sound and self.run([by] if by else sound)[0] != "survived":
                self._unsound |= {by} if by in sound else set(sound)
                continue
            self._sound.add(by)
            return end, by, len(sound)
        return "survived", "", 0

    def run(self, tests: Sequence[str], mutant: Mutant | None = None) -> tuple[str, str]:
        """Run tests on a mutant, or on the code as it is: "killed" and by which, "hung", or "survived"."""
        from cosmic_ray.mutating import mutate_and_test
        from cosmic_ray.work_item import MutationSpec, TestOutcome

        words = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:cov", "-rfE", *tests]
        spec = mutant and MutationSpec(mutant.file, mutant.operator, mutant.occurrence, (mutant.line, 0), (mutant.line, 1))
        with chdir(COPY):
            result = mutate_and_test([spec] if spec else [], shlex.join(words), 300.0)
        if result.output == "timeout":
            return "hung", ""
        by = re.search(r"^(?:FAILED|ERROR) (\S+)", result.output or "", re.MULTILINE)
        return ("survived", "") if result.test_outcome == TestOutcome.SURVIVED else ("killed", by[1] if by else "")


def judge(chosen: Iterable[Mutant], minutes: float, budget: float = 10.0) -> None:
    """Try mutants one after the other, and record how each ends; drop what is on record of earlier versions of their files."""
    reach, bench, deadline = Reach(), Judge(), time.monotonic() + 60 * minutes
    for mutant in chosen:
        if time.monotonic() > deadline:
            return
        start = time.monotonic()
        end, by, count = bench.fate(mutant, reach.tests(mutant.file, mutant.line, budget))
        before, after = changed_line(read(mutant.file), mutant.text(), mutant.line)
        entry = asdict(mutant) | {"end": end, "by": by, "tests": count, "before": before, "after": after}
        others = [e for e in records.read("mutants") if e["file"] != mutant.file or (is_current(e) and Mutant.of(e) != mutant)]
        entries = [*others, entry | {"source": digest(mutant.file)}]
        records.write("mutants", sorted(entries, key=lambda e: (e["file"], e["line"])))
        print(f"{end:9} {mutant}  {count} tests, {time.monotonic() - start:.1f} s  {by}", flush=True)


def is_current(entry: Entry) -> bool:
    """Whether an entry is of the file as it is now."""
    return (ROOT / entry["file"]).exists() and entry["source"] == digest(entry["file"])


def change_of(entry: Entry) -> tuple[str, str, str]:
    return entry["file"], entry["before"], entry["after"]


def read_reasons() -> set[tuple[str, str, str]]:
    """Changes of which `mutants.toml` says why no test can tell them from the code."""
    return {change_of(entry) for entry in tomllib.loads(EXPLAINED.read_text(encoding="utf-8")).get("mutant", [])}


def find_survivors() -> list[Entry]:
    reasons = read_reasons()
    return [e for e in records.read("mutants") if e["end"] == "survived" and is_current(e) and change_of(e) not in reasons]


def table() -> str:
    reasons, entries = read_reasons(), records.read("mutants")
    rows = ["| file | mutants | killed | survived | explained |", "|---|--:|--:|--:|--:|"]
    for name in [*sorted({entry["file"] for entry in entries}), "all"]:
        some = [entry for entry in entries if name in (entry["file"], "all")]
        survived = [entry for entry in some if entry["end"] == "survived"]
        killed, reasoned = f"{1 - len(survived) / max(1, len(some)):.0%}", sum(change_of(entry) in reasons for entry in survived)
        rows.append(f"| {name.removeprefix('src/offmap/')} | {len(some)} | {killed} | {len(survived)} | {reasoned} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m checks.mutants", description=__doc__)
    parser.add_argument("command", choices=["run", "again", "left"])
    parser.add_argument("files", nargs="*", default=[], help="all by default, else some: src/offmap/posterior/noise.py")
    parser.add_argument("--count", type=int, default=600, help="so many of the drawn mutants")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop before the next mutant after so long")
    parser.add_argument("--budget", type=float, default=10.0, help="so many seconds of tests for a mutant")
    asked = parser.parse_args()
    if asked.command == "left":
        print("\n".join(f"{Mutant.of(e)}  ({e['tests']} tests)\n  - {e['before']}\n  + {e['after']}" for e in find_survivors()))
        return
    judged = {Mutant.of(entry) for entry in records.read("mutants") if is_current(entry)}
    drawn = (mutant for mutant in islice(draw(asked.seed), asked.count) if mutant not in judged)
    chosen = drawn if asked.command == "run" else map(Mutant.of, find_survivors())
    judge((mutant for mutant in chosen if not asked.files or mutant.file in asked.files), asked.minutes, asked.budget)


if __name__ == "__main__":
    main()
