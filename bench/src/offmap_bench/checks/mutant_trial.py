"""One mutant and its tests, in a forked process: nothing is written to disk.

The process imports the changed text in place of the module or, if the change is inside a function, gives its code to the
functions that are there already.
"""

from __future__ import annotations

import ast
import gc
import importlib.abc
import importlib.machinery
import importlib.util
import io
import os
import resource
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import redirect_stdout, suppress
from itertools import groupby
from multiprocessing import Pipe
from types import CodeType, FunctionType, ModuleType
from typing import Any

from offmap_bench.checks.covered import SOURCE
from offmap_bench.checks.mutating import Mutant, read

BUDGET = 10.0
"""Seconds of the processor after which no further test is given to a mutant: other work beside does not count."""

PATIENCE = 40
"""Seconds of the processor after which a mutant hangs, and is killed; so does one that goes on for a hundred times as long."""


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
