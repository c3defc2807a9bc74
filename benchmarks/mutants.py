"""Small changes to the code, and whether a test notices: `python -m benchmarks.mutants run`, `... again`, `... left`.

`run` draws mutants of the files in `SUBJECTS` in an order set by a seed and gives each to the tests that reach its line, as
`benchmarks.covered` saw them, the room's own tests first, for at most `BUDGET` seconds of the processor; a mutant that no test
fails in that time has survived. A test that fails without any change too kills nothing. `again` gives survivors to the tests
once more, after new tests and `covered`; `left` lists survivors that nothing explains.

Mutants are made by cosmic-ray and never written to disk: a forked process imports the changed text in place of the module or, if
the change is inside a function, gives its code to the functions that are there already.
Changes inside annotations are left out, as nothing reads those at run time, and so are stars between arguments.
"""

from __future__ import annotations

import argparse
import ast
import gc
import hashlib
import importlib.abc
import importlib.machinery
import importlib.util
import io
import json
import os
import random
import resource
import signal
import sys
import time
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import asdict, dataclass
from functools import cache
from importlib import import_module
from itertools import groupby, islice
from multiprocessing import Pipe
from types import CodeType, FunctionType, ModuleType
from typing import Any

from benchmarks.covered import ROOT, SOURCE, Reach, own, write

FOLDER = ROOT / "benchmarks" / "records" / "mutants"
EXPLAINED = ROOT / "benchmarks" / "mutants.toml"
SUBJECTS = ("core/*.py", "solve/*.py", "metrics/*.py", "scores.py", "conformal.py")
"""Below `src/offmap`."""

BUDGET = 10.0
"""Seconds of the processor after which no further test is given to a mutant: other work beside does not count."""

PATIENCE = 40
"""Seconds of the processor after which a mutant hangs, and is killed; so does one that goes on for a hundred times as long."""

Place = tuple[tuple[int, int], tuple[int, int]]


@dataclass(frozen=True)
class Mutant:
    """The `occurrence`-th change that an operator of cosmic-ray can make to a file."""

    file: str  # below src/offmap
    operator: str
    occurrence: int
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.operator.removeprefix('core/')} {self.occurrence}"


@dataclass(frozen=True)
class Fate:
    """What became of a mutant: "killed" `by` a test, "hung" or "survived"; `source` is the digest of the file that it changed."""

    mutant: Mutant
    end: str
    by: str
    tests: int
    before: str
    after: str
    source: str

    @property
    def change(self) -> tuple[str, str, str]:
        """The file, and the line before and after."""
        return self.mutant.file, self.before, self.after


# ------------------------------------------------------------------------------------------------------- making mutants


def subjects() -> list[str]:
    """The files whose mutants are drawn, below `src/offmap`."""
    paths = (path for pattern in SUBJECTS for path in SOURCE.glob(pattern))
    return sorted(path.relative_to(SOURCE).as_posix() for path in paths)


def mutants(file: str) -> dict[Place, list[Mutant]]:
    """All mutants of a file, by the place that they change."""
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.plugins import get_operator, operator_names

    text = read(file)
    nodes, spared = list(ast_nodes(get_ast(text))), annotations(text)
    found: dict[Place, list[Mutant]] = {}
    for name in operator_names():
        if (kind := get_operator(name)).arguments():
            continue  # those need to be told what to change
        places = (place for node in nodes for place in kind().mutation_positions(node))
        for i, place in enumerate(places):
            if not inside(place, spared):
                found.setdefault(place, []).append(Mutant(file, name, i, place[0][0]))
    return found


def mutated(mutant: Mutant) -> str:
    """The text of the mutant's file with its change."""
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator

    text = mutate_code(read(mutant.file), get_operator(mutant.operator)(), mutant.occurrence)
    if text is None:
        raise ValueError(f"{mutant} is no longer there; draw mutants anew")
    return text


def annotations(text: str) -> list[Place]:
    """Where a file's annotations and docstrings stand."""
    nodes: list[ast.expr] = []
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.arg(annotation=ast.expr() as kind) | ast.AnnAssign(annotation=kind):
                nodes.append(kind)
            case ast.FunctionDef(returns=ast.expr() as kind):
                nodes.append(kind)
            case _:
                pass
    return [((n.lineno, n.col_offset), (n.end_lineno or n.lineno, n.end_col_offset or 0)) for n in nodes]


def inside(place: Place, spans: Sequence[Place]) -> bool:
    """Whether a place lies within one of the spans."""
    return any(start <= place[0] and place[1] <= stop for start, stop in spans)


@cache
def read(file: str) -> str:
    return (SOURCE / file).read_text(encoding="utf-8")


def digest(file: str) -> str:
    return hashlib.sha256(read(file).encode()).hexdigest()[:16]


# ---------------------------------------------------------------------------------------------------------- the trial


class Changed(importlib.abc.MetaPathFinder, importlib.machinery.SourceFileLoader):
    """Finds one module, whose text is another than on disk."""

    def __init__(self, mutant: Mutant, text: str) -> None:
        name = "offmap." + mutant.file.removesuffix(".py").replace("/", ".")
        super().__init__(name.removesuffix(".__init__"), str(SOURCE / mutant.file))
        self.text = text

    def find_spec(
        self, fullname: str, path: object = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        return importlib.util.spec_from_file_location(fullname, self.path, loader=self) if fullname == self.name else None

    def get_code(self, fullname: str) -> CodeType:
        return compile(self.text, self.path, "exec", dont_inherit=True)

    def enter(self) -> None:
        """Has the text imported, or its code given to the functions of the module if that is there."""
        if self.name not in sys.modules:
            sys.meta_path.insert(0, self)
            return
        codes: dict[tuple[str, int], list[CodeType]] = {}
        for code in nested(self.get_code(self.name)):
            codes.setdefault((code.co_qualname, code.co_firstlineno), []).append(code)
        for each in FUNCTIONS.get(self.path, []):
            found = codes.get((each.__code__.co_qualname, each.__code__.co_firstlineno), [])
            if len(found) == 1 and found[0].co_freevars == each.__code__.co_freevars:
                each.__code__ = found[0]


FUNCTIONS: dict[str, list[FunctionType]] = {}
"""Those of offmap that are there when processes are forked, by file."""


def nested(code: CodeType) -> Iterator[CodeType]:
    """A code and all that it holds."""
    yield code
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from nested(each)


def within(mutant: Mutant) -> bool:
    """Whether the change is inside a function, and not in its head: one that is made after the import."""
    functions = (node for node in ast.walk(ast.parse(read(mutant.file))) if isinstance(node, ast.FunctionDef))
    return any(node.lineno < node.body[0].lineno <= mutant.line <= (node.end_lineno or 0) for node in functions)


def trial(mutant: Mutant | None, text: str, tests: Sequence[str], budget: float = BUDGET) -> tuple[str, str]:
    """How a mutant, or the code as it is, ends with these tests: "killed" and by which, "hung", or "survived"."""
    ours, theirs = os.pipe()
    child = os.fork()
    if not child:
        _die_with(mutant, text, tests, Witness(theirs, budget))
    os.close(theirs)
    with os.fdopen(ours, encoding="utf-8") as said:
        deadline = time.monotonic() + 100 * PATIENCE
        while time.monotonic() < deadline:
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid:
                _sweep(child)
                hung = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU
                return ("survived", "") if status == 0 else ("hung", "") if hung else ("killed", said.readline().strip())
            time.sleep(0.02)
        _sweep(child)
        os.waitpid(child, 0)
        return "hung", ""


def _sweep(group: int) -> None:
    """Ends what a child has left running."""
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


class Witness:
    """A pytest plugin that writes the name of the first test that fails, or of a file that cannot be imported, to a pipe;
    then, or when the time is up, it ends the process.
    """

    def __init__(self, pipe: int, budget: float) -> None:
        self.pipe, self.budget = pipe, budget

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Called for the beginning, the middle and the end of a test."""
        if report.failed:
            os.write(self.pipe, f"{report.nodeid}\n".encode())
            os._exit(1)

    def pytest_runtest_logfinish(self) -> None:
        """Called after each test."""
        if time.process_time() > self.budget:
            os._exit(0)

    def pytest_collectreport(self, report: Any) -> None:
        """Called for each file."""
        self.pytest_runtest_logreport(report)


def _die_with(mutant: Mutant | None, text: str, tests: Sequence[str], witness: Witness) -> None:
    """In the child: has the changed module imported, runs the tests and exits with what pytest says."""
    code = 3
    try:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_CPU, (PATIENCE, PATIENCE + 1))
        silence = os.open(os.devnull, os.O_RDWR)
        for stream in range(3):
            os.dup2(silence, stream)
        if mutant:
            Changed(mutant, text).enter()
        import pytest

        files = [list(some) for _, some in groupby(tests, lambda name: name.partition("::")[0])]
        codes = (int(pytest.main([*OPTIONS, "-x", *some], plugins=[witness])) for some in files)
        code = next(filter(FAILED.__contains__, codes), 0)
    finally:
        os._exit(code)


# plain: else pytest's own finder stands before ours, and reads files whose doctests are asked for from disk
OPTIONS = ["-q", "--assert=plain", "-p", "no:cacheprovider", "-p", "no:cov"]


def warm(tests: Iterable[str]) -> None:
    """Imports the files of tests, and offmap with them, for the processes that are forked from now on."""
    import pytest

    with redirect_stdout(io.StringIO()):
        pytest.main([*OPTIONS, "--collect-only", *sorted({name.partition("::")[0] for name in tests})])
    for each in gc.get_objects():
        if type(each) is FunctionType and each.__code__.co_filename.startswith(str(SOURCE)):
            FUNCTIONS.setdefault(each.__code__.co_filename, []).append(each)
    gc.freeze()  # pytest collects garbage five times before it ends: not among all that is there already


FAILED = (1, 2, 3)
"""Exit codes of tests that fail or cannot be imported; others say that a test of that name is gone."""


class Elsewhere:
    """A process forked before offmap is imported: trials of changes that are made on import."""

    def __init__(self) -> None:
        self.pipe, theirs = Pipe()
        if not os.fork():
            gc.freeze()
            self.pipe.close()
            with suppress(EOFError):
                while True:
                    theirs.send(trial(*theirs.recv()))
            os._exit(0)
        theirs.close()

    def trial(self, mutant: Mutant | None, text: str, tests: Sequence[str], budget: float) -> tuple[str, str]:
        """As the function."""
        self.pipe.send((mutant, text, tests, budget))
        return self.pipe.recv()


class Bench:
    """Gives mutants to tests, of which those that fail without any change too count for nothing."""

    def __init__(self, tests: Iterable[str], budget: float = BUDGET) -> None:
        self._budget = budget
        self._sound: set[str] = set()
        self._unsound: set[str] = set()
        self._elsewhere = Elsewhere()
        warm(tests)

    def fate(self, mutant: Mutant, text: str, tests: Sequence[str]) -> tuple[str, str, int]:
        """How a mutant ends, by which test, and how many it was given."""
        run = trial if within(mutant) else self._elsewhere.trial
        while sound := [name for name in tests if name not in self._unsound]:
            end, by = run(mutant, text, sound, self._budget)
            if end == "hung" and run(None, "", sound, self._budget)[0] == "hung":
                end = "survived"  # so long do the tests take
            if end != "killed" or self._is_sound(by, sound):
                return end, by, len(sound)
        return "survived", "", 0

    def _is_sound(self, by: str, tests: Sequence[str]) -> bool:
        """Whether a test, or all of those that a failure may stand for, pass without a change."""
        if by not in self._sound:
            same = [name for name in tests if of(by, name)]
            run = trial if by in same else self._elsewhere.trial
            end, failed = run(None, "", same or [by], PATIENCE)
            self._sound |= {by} if end == "survived" else set()
            self._unsound |= {name for name in tests if end != "survived" and of(failed or by, name)}
        return by in self._sound


def of(failed: str, test: str) -> bool:
    """Whether what failed is the test, or its file.

    >>> of("tests/test_a.py::test_b", "tests/test_a.py::test_b"), of("tests/test_a.py", "tests/test_a.py::test_b")
    (True, True)
    """
    return failed in (test, test.partition("::")[0], "")


# ------------------------------------------------------------------------------------------------------------- records


def drawn(seed: int) -> Iterator[Mutant]:
    """One mutant of each place, the places in an order by seed: each beginning of it is a fair sample of the code."""
    chance = random.Random(seed)
    places = [choices for file in subjects() for choices in mutants(file).values()]
    for choices in chance.sample(places, len(places)):
        chance.shuffle(choices)
        if (mutant := next(filter(changes, choices), None)) is not None:
            yield mutant


def changes(mutant: Mutant) -> bool:
    """Whether the change is one of code: the star before keyword arguments is no product."""
    try:
        return stars(mutated(mutant)) == stars(read(mutant.file))
    except SyntaxError:
        return False


def stars(text: str) -> list[int]:
    """How many arguments of each function are positional only."""
    return [len(node.posonlyargs) for node in ast.walk(ast.parse(text)) if isinstance(node, ast.arguments)]


def recorded() -> list[Fate]:
    """What is on record, of files as they were then."""
    paths = sorted(FOLDER.glob("*.json"))
    return [fate_of(entry) for path in paths for entry in json.loads(path.read_text(encoding="utf-8"))]


def fates() -> dict[Mutant, Fate]:
    """What is on record, of files as they are now."""
    present = set(subjects())
    found = (fate for fate in recorded() if fate.mutant.file in present)
    return {fate.mutant: fate for fate in found if fate.source == digest(fate.mutant.file)}


def fate_of(entry: dict[str, object]) -> Fate:
    return Fate(**{**entry, "mutant": Mutant(**entry["mutant"])})  # type: ignore[arg-type]


def keep(known: dict[Mutant, Fate]) -> None:
    """Writes the records, a file for each module."""
    for file in {mutant.file for mutant in known}:
        entries = [asdict(fate) for fate in known.values() if fate.mutant.file == file]
        text = "[\n" + ",\n".join(json.dumps(entry, ensure_ascii=False) for entry in entries) + "\n]\n"
        write(FOLDER / f"{file.removesuffix('.py').replace('/', '.')}.json", text)


HEAVY = (
    "pytest", "hypothesis", "torch", "torch._dynamo", "torch.distributed", "torch.testing", "numpy.testing", "safetensors.torch",
    "sklearn.metrics", "scipy.stats",
)  # fmt: skip


def judge(chosen: Iterable[Mutant], minutes: float, budget: float = BUDGET) -> None:
    """Tries mutants one after the other, and records how each ends."""
    for name in HEAVY:
        import_module(name)  # once here, and found there by every forked process
    rooms = [place for file in subjects() for place in own(file)[0] if (ROOT / place).exists()]
    reach, bench, known, deadline = Reach(), Bench(rooms, budget), fates(), time.monotonic() + 60 * minutes
    for mutant in chosen:
        if time.monotonic() > deadline:
            return
        text, tests, began = mutated(mutant), reach.tests(mutant.file, mutant.line, 4 * budget), time.monotonic()
        end, by, count = bench.fate(mutant, text, tests)
        before, after = difference(read(mutant.file), text, mutant.line)
        known[mutant] = Fate(mutant, end, by, count, before, after, digest(mutant.file))
        keep({m: f for m, f in known.items() if m.file == mutant.file})
        print(f"{end:9} {mutant}  {count} tests, {time.monotonic() - began:.1f} s  {by}", flush=True)


def difference(before: str, after: str, line: int) -> tuple[str, str]:
    """The line of a change in both texts; of the second, empty where it is gone."""
    lines = before.splitlines(), after.splitlines()
    gone = len(lines[1]) < len(lines[0])
    return lines[0][line - 1].strip(), "" if gone else lines[1][line - 1].strip()


def explained() -> dict[tuple[str, str, str], str]:
    """{(file, line before, line after): why no test can tell}, from `benchmarks/mutants.toml`."""
    entries = tomllib.loads(EXPLAINED.read_text(encoding="utf-8")).get("mutant", []) if EXPLAINED.exists() else []
    return {(entry["file"], entry["before"], entry["after"]): entry["why"] for entry in entries}


def left() -> list[Fate]:
    """Survivors on record that nothing explains."""
    reasons = explained()
    return [f for f in fates().values() if f.end == "survived" and f.change not in reasons]


def section() -> str:
    """The figures, as a part of the page of trials: a row for each file."""
    reasons, known = explained(), recorded()
    if not known:
        return ""
    lines = ["| file | mutants | killed | survived | explained |", "|---|--:|--:|--:|--:|"]
    for name in [*sorted({fate.mutant.file for fate in known}), "all"]:
        some = [fate for fate in known if name in (fate.mutant.file, "all")]
        survived = [fate for fate in some if fate.end == "survived"]
        counts = (
            len(some),
            f"{1 - len(survived) / len(some):.0%}",
            len(survived),
            sum(fate.change in reasons for fate in survived),
        )
        lines.append(f"| {name} | {' | '.join(map(str, counts))} |")
    return INTRODUCTION + "\n" + "\n".join(lines) + "\n"


INTRODUCTION = """
## Mutants

Small changes to the code (`make mutants`, by cosmic-ray), drawn by a seed, one at a place; each is given to the tests that reach
its line, for at most ten seconds of the processor. Changes inside annotations are left out. Why no test can tell a survivor from
the code is written in `benchmarks/mutants.toml`.
"""


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mutants", description=__doc__)
    parser.add_argument("command", choices=["run", "again", "left"])
    parser.add_argument("files", nargs="*", default=[], help="all by default, else some below src/offmap: core/noise.py")
    parser.add_argument("--count", type=int, default=600, help="so many of the drawn mutants")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop before the next mutant after so long")
    parser.add_argument("--budget", type=float, default=BUDGET, help="so many seconds of the processor for a mutant")
    asked = parser.parse_args()
    if asked.command == "left":
        for fate in left():
            print(f"{fate.mutant}  ({fate.tests} tests)\n  - {fate.before}\n  + {fate.after}")
        return
    if asked.command == "again":
        chosen = [fate.mutant for fate in left()]
    else:
        known = fates()
        chosen = (mutant for mutant in islice(drawn(asked.seed), asked.count) if mutant not in known)
    judge((mutant for mutant in chosen if not asked.files or mutant.file in asked.files), asked.minutes, asked.budget)


if __name__ == "__main__":
    main()
