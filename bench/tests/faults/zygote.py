"""Processes to be killed, forked from one that has imported torch and has no threads: a start costs little, a SIGKILL is real.

A child tells through a pipe when it begins and when it ends a file (`offmap.atomic` writes `.part` files and renames them), so
that it can be killed at a moment of its life, or at one of a file's.
"""

from __future__ import annotations

import atexit
import io
import json
import os
import random
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import chdir, redirect_stdout, suppress
from dataclasses import asdict, dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).parents[3]
PATHS = os.pathsep.join(str(ROOT / folder) for folder in ("src", "bench/src", "tests", "bench/tests"))
ENVIRONMENT = os.environ | {"PYTHONPATH": PATHS, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}

LIMIT = 150.0
"""Seconds after which a child hangs."""


@dataclass(frozen=True)
class Moment:
    """When to kill: so many seconds after the start, or after the n-th file was begun."""

    seconds: float
    file: int = 0


NEVER = Moment(LIMIT)


@dataclass(frozen=True)
class Ended:
    """How a child ended: its exit code, negative for a signal; how many files it began and ended, and how long each took."""

    code: int
    seconds: float
    begun: int
    ended: int
    writing: float
    said: str

    @property
    def killed(self) -> bool:
        """By us, and not for hanging."""
        assert self.seconds < LIMIT, f"It hangs: {self.said}"
        return self.code == -signal.SIGKILL

    def check(self) -> Ended:
        """Itself, unless something went wrong."""
        assert self.code == 0, f"Exit code {self.code} after {self.seconds:.1f} s: {self.said}"
        return self


class Zygote:
    """Forks a child for each call."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "faults.zygote"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT
        )

    def __call__(self, work: Callable[..., Any], folder: Path, *args: Any, moment: Moment = NEVER, warm: bool = False) -> Ended:
        """Run `work(folder, *args)`, a function of a module, in a child whose current folder it is.

        With `warm` the zygote does the same before, elsewhere: what is imported on the way, children need not import again.
        """
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        order = [work.__module__, work.__name__, str(folder), list(args), asdict(moment), warm]
        print(json.dumps(order), file=self.process.stdin, flush=True)
        result = self.process.stdout.readline()
        if not result:
            zygote.cache_clear()
            raise RuntimeError("The zygote itself died; what it said is on standard error.")
        return Ended(**json.loads(result))

    def close(self) -> None:
        self.process.communicate()


@cache
def zygote() -> Zygote:
    """The one of this process."""
    made = Zygote()
    atexit.register(made.close)
    return made


def draw_moment(rng: random.Random, usual: Ended) -> Moment:
    """Half of the time any moment of a life like the usual one, and a little beyond; else one while a file is written."""
    if rng.random() < 0.5 or not usual.begun:
        return Moment(rng.uniform(0, 1.05 * usual.seconds))
    return Moment(rng.uniform(0, 1.2 * usual.writing), rng.randint(1, usual.begun))


# ----------------------------------------------------------------------------------------------- in the zygote


def _serve() -> None:
    import torch

    from offmap.cli.doctor import self_test

    torch.set_num_threads(1)
    self_test()  # torch, too, imports much when it is first needed
    for line in sys.stdin:
        module, name, folder, args, moment, warm = json.loads(line)
        work = getattr(import_module(module), name)
        if warm:
            with TemporaryDirectory() as other, redirect_stdout(io.StringIO()), suppress(SystemExit), chdir(other):
                work(Path(other), *args)
        threads = len(os.listdir("/proc/self/task")) if os.path.exists("/proc/self/task") else 1
        assert threads == 1, "A process with threads cannot be forked soundly."
        print(json.dumps(asdict(_fork(work, Path(folder), args, Moment(**moment)))), flush=True)


def _fork(work: Callable[..., Any], folder: Path, args: list[Any], moment: Moment) -> Ended:
    log = folder.with_name(f"{folder.name}.log")
    log.touch()
    read, write = os.pipe()
    start = time.monotonic()
    child = os.fork()
    if not child:
        os.close(read)
        os._exit(_live(work, folder, args, log, write))
    os.close(write)
    begun, ended, writing = _watch(read, moment, start)
    os.kill(child, signal.SIGKILL)  # it is gone already, or it is time; its number is its own until we have waited for it
    os.close(read)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    said = log.read_text(encoding="utf-8", errors="replace")
    log.unlink()
    return Ended(code, time.monotonic() - start, begun, ended, writing / max(ended, 1), said)


def _watch(pipe: int, moment: Moment, start: float) -> tuple[int, int, float]:
    """Until the child's end or the moment: how many files it began and ended, and the seconds from the one to the other."""
    begun, ended, writing, since = 0, 0, 0.0, start
    end = start + (LIMIT if moment.file else moment.seconds)
    while (left := end - time.monotonic()) > 0:
        if select.select([pipe], [], [], left)[0]:
            byte = os.read(pipe, 1)
            if not byte:
                break
            now = time.monotonic()
            begun, ended = begun + (byte == b"<"), ended + (byte == b">")
            writing += now - since if byte == b">" else 0.0
            since = now
            if byte == b"<" and begun == moment.file:
                end = now + moment.seconds
    return begun, ended, writing


def _live(work: Callable[..., Any], folder: Path, args: list[Any], log: Path, pipe: int) -> int:
    """The child's whole life; its exit code."""
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.chdir(folder)

    def hear(event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and str(args[0]).endswith(".part"):
            os.write(pipe, b"<")
        elif event == "os.rename" and str(args[0]).endswith(".part"):
            os.write(pipe, b">")

    sys.addaudithook(hear)
    try:
        work(folder, *args)
        return 0
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
        return 99
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


if __name__ == "__main__":
    _serve()
