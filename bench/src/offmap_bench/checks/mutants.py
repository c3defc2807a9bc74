"""Small changes to the code, and whether a test notices: `python -m offmap_bench.checks.mutants run`, `... again`, `... left`.

`run` draws changes that cosmic-ray can make, in an order set by a seed, and gives each to the tests that reach its line, as
`offmap_bench.checks.coverage` recorded them, for at most `BUDGET` seconds of the processor; a mutant that no test fails in that time
has survived. A test that fails without any change too kills nothing. `again` gives survivors to the tests once more, after new
tests and coverage; `left` lists survivors that `mutants.toml` does not explain. A trial is a forked process that imports the
changed text in place of the module: nothing is written to disk. Nothing of offmap is imported before.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import random
import resource
import signal
import time
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from itertools import groupby, islice
from pathlib import Path
from types import CodeType
from typing import Any

from offmap_bench.checks import records
from offmap_bench.checks.coverage import Reach
from offmap_bench.paths import ROOT

SUBJECTS = ("model", "posterior", "maxwent", "metrics", "scores", "conformal.py")
"""Folders and files below `src/offmap`."""

EXPLAINED = Path(__file__).with_name("mutants.toml")
HEAVY = (
    "pytest", "hypothesis", "torch", "torch._dynamo", "torch.distributed", "torch.testing", "numpy.testing", "safetensors.torch",
    "sklearn.metrics", "scipy.stats",
)  # fmt: skip
"""Imported once, before processes are forked."""

BUDGET, PATIENCE = 10.0, 40
"""Seconds of the processor after which no further test is given to a mutant, and after which it hangs and is killed."""

Span = tuple[tuple[int, int], tuple[int, int]]

# ---------------------------------------------------------------------------------------------------------------- changes


@dataclass(frozen=True)
class Mutant:
    """The `occurrence`-th change that an operator of cosmic-ray can make to a file."""

    file: str
    operator: str
    occurrence: int
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.operator.removeprefix('core/')} {self.occurrence}"

    def text(self) -> str:
        """The text of the file with the change."""
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


def subjects() -> list[str]:
    """The files whose mutants are drawn."""
    source = ROOT / "src" / "offmap"
    paths = (path for name in SUBJECTS for path in ([source / name] if name.endswith(".py") else (source / name).rglob("*.py")))
    return sorted(path.relative_to(ROOT).as_posix() for path in paths)


def mutants_of(file: str) -> dict[Span, list[Mutant]]:
    """All mutants of a file, by the place that they change; annotations are left out, as nothing reads them at run time."""
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.plugins import get_operator, operator_names

    nodes, spared = list(ast_nodes(get_ast(read(file)))), annotations(read(file))
    found: dict[Span, list[Mutant]] = {}
    for name in operator_names():
        if (kind := get_operator(name)).arguments():
            continue  # those need to be told what to change
        spans = (span for node in nodes for span in kind().mutation_positions(node))
        for i, span in enumerate(spans):
            if not any(start <= span[0] and span[1] <= stop for start, stop in spared):
                found.setdefault(span, []).append(Mutant(file, name, i, span[0][0]))
    return found


def annotations(text: str) -> list[Span]:
    """Where annotations stand."""
    nodes: list[ast.expr] = []
    for node in ast.walk(ast.parse(text)):
        match node:
            case (
                ast.arg(annotation=ast.expr() as kind)
                | ast.AnnAssign(annotation=kind)
                | ast.FunctionDef(returns=ast.expr() as kind)
            ):
                nodes.append(kind)
            case _:
                pass
    return [((n.lineno, n.col_offset), (n.end_lineno or n.lineno, n.end_col_offset or 0)) for n in nodes]


def draw(seed: int) -> Iterator[Mutant]:
    """Yield one mutant of each place, the places in an order by seed: each beginning of it is a fair sample of the code."""
    chance = random.Random(seed)
    places = [choices for file in subjects() for choices in mutants_of(file).values()]
    for choices in chance.sample(places, len(places)):
        chance.shuffle(choices)
        yield from islice(filter(changes_code, choices), 1)


def changes_code(mutant: Mutant) -> bool:
    """Whether the change is one of code: the star before keyword arguments is no product."""
    with suppress(SyntaxError):
        return count_positional(mutant.text()) == count_positional(read(mutant.file))
    return False


def count_positional(text: str) -> list[int]:
    """How many arguments of each function are positional only."""
    return [len(node.posonlyargs) for node in ast.walk(ast.parse(text)) if isinstance(node, ast.arguments)]


def changed_line(before: str, after: str, line: int) -> tuple[str, str]:
    """The line of a change in both texts; in the second, empty where it is gone."""
    lines = before.splitlines(), after.splitlines()
    return lines[0][line - 1].strip(), "" if len(lines[1]) < len(lines[0]) else lines[1][line - 1].strip()


# ----------------------------------------------------------------------------------------------------------------- trials


class ChangedModule(importlib.abc.MetaPathFinder, importlib.machinery.SourceFileLoader):
    """Finds one module, whose text is another than on disk."""

    def __init__(self, file: str, text: str) -> None:
        name = file.removeprefix("src/").removesuffix(".py").replace("/", ".").removesuffix(".__init__")
        super().__init__(name, str(ROOT / file))
        self.text = text

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> importlib.machinery.ModuleSpec | None:
        return importlib.util.spec_from_file_location(fullname, self.path, loader=self) if fullname == self.name else None

    def get_code(self, fullname: str) -> CodeType:
        return compile(self.text, self.path, "exec", dont_inherit=True)


class Witness:
    """A pytest plugin that ends the process: with the name of the first failure in a pipe, or when the time is up."""

    def __init__(self, pipe: int, budget: float) -> None:
        self.pipe, self.budget = pipe, budget

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Called for the setup, the call and the teardown of a test."""
        if report.failed:
            os.write(self.pipe, f"{report.nodeid}\n".encode())
            os._exit(1)

    pytest_collectreport = pytest_runtest_logreport

    def pytest_runtest_logfinish(self) -> None:
        """Called after each test."""
        if time.process_time() > self.budget:
            os._exit(0)


def trial(file: str, text: str | None, tests: Sequence[str], budget: float = BUDGET) -> tuple[str, str]:
    """Give a changed text, or the code as it is, to tests: "killed" and by which, "hung", or "survived"."""
    ours, theirs = os.pipe()
    child = os.fork()
    if not child:
        _run_tests(file, text, tests, Witness(theirs, budget))
    os.close(theirs)
    deadline, status = time.monotonic() + 100 * PATIENCE, -1
    with os.fdopen(ours, encoding="utf-8") as output:
        while time.monotonic() < deadline:
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid:
                break
            time.sleep(0.02)
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # what the child has left running, or the child itself
        if time.monotonic() >= deadline or (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU):
            with suppress(ChildProcessError):
                os.waitpid(child, 0)
            return "hung", ""
        return ("survived", "") if status == 0 else ("killed", output.readline().strip())


def _run_tests(file: str, text: str | None, tests: Sequence[str], witness: Witness) -> None:
    """In the child: have the changed module imported, run the tests file by file, and exit with 1 if one fails."""
    code = 1
    try:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_CPU, (PATIENCE, PATIENCE + 1))
        silence = os.open(os.devnull, os.O_RDWR)
        for stream in range(3):
            os.dup2(silence, stream)
        if text is not None:
            import sys

            sys.meta_path.insert(0, ChangedModule(file, text))
        import pytest

        # plain: else pytest's own finder stands before ours, and reads files whose doctests are asked for from disk
        options = ["-q", "-x", "--assert=plain", "-p", "no:cacheprovider", "-p", "no:cov"]
        groups = [list(some) for _, some in groupby(tests, lambda name: name.partition("::")[0])]
        code = int(any(int(pytest.main([*options, *some], plugins=[witness])) in (1, 2, 3) for some in groups))
    finally:
        os._exit(code)


class Judge:
    """Gives mutants to tests; those that fail without any change too count for nothing."""

    def __init__(self, budget: float = BUDGET) -> None:
        self.budget, self._sound, self._unsound = budget, set[str](), set[str]()

    def fate(self, mutant: Mutant, text: str, tests: Sequence[str]) -> tuple[str, str, int]:
        """How a mutant ends, by which test, and how many it was given."""
        while sound := [name for name in tests if name not in self._unsound]:
            end, by = trial(mutant.file, text, sound, self.budget)
            if end == "hung" and trial(mutant.file, None, sound, self.budget)[0] == "hung":
                end = "survived"  # the tests themselves take so long
            if end != "killed" or by in self._sound:
                return end, by, len(sound)
            same = [name for name in sound if by in (name, name.partition("::")[0], "")]
            if trial(mutant.file, None, same or [by], PATIENCE)[0] == "survived":
                self._sound.add(by)
                return end, by, len(sound)
            self._unsound |= set(same or sound)
        return "survived", "", 0


# ---------------------------------------------------------------------------------------------------------------- records


@dataclass(frozen=True)
class Fate:
    """A mutant, its end, `by` which of so many tests, the line before and after; `source` is the digest of the file."""

    mutant: Mutant
    end: str
    by: str
    tests: int
    before: str
    after: str
    source: str

    @property
    def change(self) -> tuple[str, str, str]:
        return self.mutant.file, self.before, self.after


def recorded() -> list[Fate]:
    """What is on record, of files as they were then."""
    return [Fate(**entry | {"mutant": Mutant(**entry["mutant"])}) for entry in records.read("mutants")]


def current() -> dict[Mutant, Fate]:
    """What is on record, of files as they are now."""
    present = set(subjects())
    return {f.mutant: f for f in recorded() if f.mutant.file in present and f.source == digest(f.mutant.file)}


def judge(chosen: Iterable[Mutant], minutes: float, budget: float = BUDGET) -> None:
    """Try mutants one after the other, and record how each ends; drop what is on record of earlier versions of their files."""
    for name in HEAVY:
        importlib.import_module(name)
    reach, bench, deadline = Reach(), Judge(budget), time.monotonic() + 60 * minutes
    for mutant in chosen:
        if time.monotonic() > deadline:
            return
        text, tests, start = mutant.text(), reach.tests(mutant.file, mutant.line, 4 * budget), time.monotonic()
        end, by, count = bench.fate(mutant, text, tests)
        fate = Fate(mutant, end, by, count, *changed_line(read(mutant.file), text, mutant.line), digest(mutant.file))
        others = [f for f in recorded() if f.mutant.file != mutant.file or (f.source == fate.source and f.mutant != mutant)]
        records.write("mutants", map(asdict, sorted([*others, fate], key=lambda f: (f.mutant.file, f.mutant.line))))
        print(f"{end:9} {mutant}  {count} tests, {time.monotonic() - start:.1f} s  {by}", flush=True)


def explained() -> dict[tuple[str, str, str], str]:
    """{(file, line before, line after): why no test can tell}, from `mutants.toml`."""
    entries = tomllib.loads(EXPLAINED.read_text(encoding="utf-8")).get("mutant", [])
    return {(entry["file"], entry["before"], entry["after"]): entry["why"] for entry in entries}


def left() -> list[Fate]:
    """Survivors on record that nothing explains."""
    reasons = explained()
    return [fate for fate in current().values() if fate.end == "survived" and fate.change not in reasons]


def table() -> str:
    """What is on record, file by file."""
    reasons, fates = explained(), recorded()
    rows = ["| file | mutants | killed | survived | explained |", "|---|--:|--:|--:|--:|"]
    for name in [*sorted({fate.mutant.file for fate in fates}), "all"]:
        some = [fate for fate in fates if name in (fate.mutant.file, "all")]
        survived = [fate for fate in some if fate.end == "survived"]
        killed, known = f"{1 - len(survived) / max(1, len(some)):.0%}", sum(fate.change in reasons for fate in survived)
        rows.append(f"| {name.removeprefix('src/offmap/')} | {len(some)} | {killed} | {len(survived)} | {known} |")
    return "\n".join(rows)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m offmap_bench.checks.mutants", description=__doc__)
    parser.add_argument("command", choices=["run", "again", "left"])
    parser.add_argument("files", nargs="*", default=[], help="all by default, else some: src/offmap/posterior/noise.py")
    parser.add_argument("--count", type=int, default=600, help="so many of the drawn mutants")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop before the next mutant after so long")
    parser.add_argument("--budget", type=float, default=BUDGET, help="so many seconds of the processor for a mutant")
    asked = parser.parse_args()
    if asked.command == "left":
        for fate in left():
            print(f"{fate.mutant}  ({fate.tests} tests)\n  - {fate.before}\n  + {fate.after}")
        return
    known = current()
    drawn = (mutant for mutant in islice(draw(asked.seed), asked.count) if mutant not in known)
    chosen = drawn if asked.command == "run" else [fate.mutant for fate in left()]
    judge((mutant for mutant in chosen if not asked.files or mutant.file in asked.files), asked.minutes, asked.budget)


if __name__ == "__main__":
    main()
