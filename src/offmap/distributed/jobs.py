"""Run independent jobs in processes of this machine or on Ray; jobs report what they do."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context, parent_process
from multiprocessing.connection import wait
from threading import Thread
from typing import Any, Literal

from offmap.checks import one_of
from offmap.errors import ConfigError, OffmapError

Job = tuple[Callable[..., Any], tuple[Any, ...]]
"""A function of a module and its arguments. It is called with what all jobs share, its arguments, and `report`, a function of
anything that Python can send to a process."""

Report = Callable[[int, Any], None]
"""Called with the number of a job and what it reports."""

_queue: Any = None  # in a worker process: where its reports go
_shared: tuple[Any, ...] = ()  # in a worker process: what all jobs share


@dataclass(frozen=True)
class Pool:
    """Where jobs run: in processes of this machine, or on Ray, that of a cluster at HOST:PORT or one of this machine."""

    engine: Literal["local", "ray"] = "local"
    workers: int = 1
    address: str | None = None

    def __post_init__(self) -> None:
        one_of("engine", self.engine, ("local", "ray"))
        if self.address is not None and self.engine != "ray":
            raise ConfigError(f"Expected an address only with the engine 'ray', but got {self.address!r} with {self.engine!r}.")

    @property
    def in_process(self) -> bool:
        """Whether jobs run in this very process."""
        return self.engine == "local" and self.workers <= 1

    def run_jobs(self, jobs: Sequence[Job], *, report: Report, shared: tuple[Any, ...] = ()) -> list[Any]:
        """Return the results in the order of the jobs; `shared`, their first arguments, goes to every process once."""
        if self.engine == "ray":
            from offmap.distributed.ray import run_on_ray

            return run_on_ray(jobs, workers=self.workers, report=report, shared=shared, address=self.address)
        if self.in_process:
            return [work(*shared, *args, report=lambda item, n=n: report(n, item)) for n, (work, args) in enumerate(jobs)]
        return _run_in_processes(jobs, self.workers, report, shared)


def _run_in_processes(jobs: Sequence[Job], workers: int, report: Report, shared: tuple[Any, ...]) -> list[Any]:
    context = get_context("spawn")  # a forked torch may hang
    queue = context.SimpleQueue()
    listener = Thread(target=lambda: [report(*message) for message in iter(queue.get, None)], daemon=True)
    listener.start()
    try:
        with ProcessPoolExecutor(workers, mp_context=context, initializer=_start_worker, initargs=(queue, shared)) as pool:
            futures = [pool.submit(_run_job, number, *job) for number, job in enumerate(jobs)]
            try:
                return [future.result() for future in futures]
            except BaseException:  # also Ctrl-C: jobs that wait are never started
                pool.shutdown(wait=False, cancel_futures=True)
                raise
    except BrokenProcessPool as error:
        raise OffmapError("A worker process died. Try again with `--jobs 1`.") from error
    finally:
        queue.put(None)
        listener.join()


def _start_worker(queue: Any, shared: tuple[Any, ...]) -> None:
    """Set up a worker process: Ctrl-C ends it at once and silently, and so does the end of its parent."""
    global _queue, _shared
    _queue, _shared = queue, shared
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def _run_job(number: int, work: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    return work(*_shared, *args, report=lambda item: _queue.put((number, item)))
