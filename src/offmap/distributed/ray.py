"""Independent jobs on Ray: a machine's own or a cluster. A worker that dies is replaced, and its job run again."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from queue import SimpleQueue
from typing import Any

from offmap.distributed.local import Job, Report
from offmap.errors import ConfigError, OffmapError
from offmap.extras import require

logger = logging.getLogger("offmap")

DEATHS = 3
"""So many workers may die of one job, or before they are ready, until it is given up."""

REACH_SECONDS = 10

OWN: dict[str, Any] = {"include_dashboard": False, "_system_config": {"worker_niceness": 0}}
"""Workers of a Ray of one's own are as urgent as the processes of `--engine local` (Ray's are 15 less)."""

QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}


def run_jobs(
    jobs: Sequence[Job], *, workers: int, report: Report, shared: tuple[Any, ...] = (), address: str | None = None
) -> list[Any]:
    """The results in the order of the jobs, by `workers` actors that have one job each at a time.

    `shared` is put into Ray's store once. Without `address`, a Ray of this machine alone is started and ended again, unless the
    caller has one running. A job may be run twice, if its worker dies: it must then give the same again.
    """
    ray = require("ray", "ray")
    with joined(ray, workers, address):
        crew = Crew(ray, jobs, report, ray.put(shared))
        try:
            return crew.run(min(workers, len(jobs)))
        except ray.exceptions.RayError as error:
            raise OffmapError(f"Ray failed: {_line(error)}. What is done stays done: run it again.") from error
        finally:
            crew.leave()


class Worker:
    """An actor: does one job after another."""

    def __init__(self, path: Sequence[str], shared: Sequence[Any]) -> None:
        sys.path.extend(folder for folder in path if folder not in sys.path)  # what is shared may need the user's modules
        self.shared = require("ray", "ray").get(shared[0])

    def run(self, work: Callable[..., Any] | None, args: tuple[Any, ...]) -> Iterator[tuple[str, Any]]:
        """("told", what) for each report of the job as it comes, then ("done", result) or ("failed", error); no work is done."""
        queue: SimpleQueue[tuple[str, Any]] = SimpleQueue()

        def do() -> None:
            try:
                result = None if work is None else work(*self.shared, *args, report=lambda doing: queue.put(("told", doing)))
                queue.put(("done", result))
            except BaseException as error:
                queue.put(("failed", error))

        threading.Thread(target=do, daemon=True).start()
        kind = "told"
        while kind == "told":
            kind, value = queue.get()
            yield kind, value


class Crew:
    """Workers and who does what: `streams` are what they tell, each with its actor and the number of its job."""

    def __init__(self, ray: Any, jobs: Sequence[Job], report: Report, shared: Any) -> None:
        self.ray, self.jobs, self.report, self.shared = ray, jobs, report, shared
        self.actor = ray.remote(num_cpus=1, max_restarts=0)(Worker)
        self.left, self.deaths = deque(range(len(jobs))), Counter[int | None]()
        self.results: dict[int, Any] = {}
        self.streams: dict[Any, tuple[Any, int | None]] = {}

    def run(self, workers: int) -> list[Any]:
        """All results. Jobs go to workers that are ready, so one that the cluster has no place for keeps nobody waiting."""
        for _ in range(workers):
            self.hire()
        while len(self.results) < len(self.jobs):
            (stream, *_), _ = self.ray.wait(list(self.streams), num_returns=1, fetch_local=False)
            try:
                kind, value = self.ray.get(next(stream))
            except self.ray.exceptions.RayTaskError as error:
                raise OffmapError(f"A job could not be sent to a worker or its result back: {_line(error.cause)}.") from error
            except self.ray.exceptions.RayError as error:  # the actor, its process or its machine is gone
                self.bury(stream, error)
                continue
            self.hear(stream, kind, value)
        return [self.results[number] for number in range(len(self.jobs))]

    def hire(self) -> None:
        """A new worker, whose first job is none: it is ready when that is done."""
        self.give(self.actor.remote(list(sys.path), [self.shared]), None)

    def give(self, actor: Any, number: int | None) -> None:
        """Send a job to a worker."""
        work, args = (None, ()) if number is None else self.jobs[number]
        self.streams[actor.run.options(num_returns="streaming").remote(work, args)] = (actor, number)

    def hear(self, stream: Any, kind: str, value: Any) -> None:
        """What a worker tells; who is done has the next job or leaves."""
        actor, number = self.streams[stream]
        if kind == "failed":
            raise value
        if kind == "told":
            assert number is not None
            self.report(number, value)
            return
        del self.streams[stream]
        if number is None:
            del self.deaths[None]  # workers can start: earlier deaths were bad luck
        else:
            self.results[number] = value
        if self.left:
            self.give(actor, self.left.popleft())
        else:
            self.ray.kill(actor)

    def bury(self, stream: Any, error: BaseException) -> None:
        """The job of a dead worker comes next, for a new one."""
        actor, number = self.streams.pop(stream)
        self.ray.kill(actor)  # it may only be out of reach
        self.deaths[number] += 1
        if self.deaths[number] >= DEATHS:
            doing = "before it had work" if number is None else "in the middle of the same job"
            raise OffmapError(
                f"A worker died {doing}, {DEATHS} of {DEATHS} times: {_line(error)}. Has each machine enough memory, and the "
                "same offmap?"
            ) from error
        logger.warning("A worker died; its job is run again.")
        if number is not None:
            self.left.appendleft(number)
        self.hire()

    def leave(self) -> None:
        """End the workers, also those in the middle of a job."""
        for actor, _ in self.streams.values():
            self.ray.kill(actor)


@contextmanager
def joined(ray: Any, workers: int, address: str | None) -> Generator[None]:
    """A Ray that runs: the caller's, the one at an address, or a new one of this machine, which tells nobody about its use.

    What Ray has to say meanwhile goes to standard error: standard output is for results.
    """
    if ray.is_initialized():
        yield
        return
    if address is not None:
        _reach(address)
    handler = signal.getsignal(signal.SIGTERM)
    with _silent(), redirect_stdout(sys.stderr):
        try:
            ray.init(address=address or "local", **({} if address else {"num_cpus": workers, **OWN}), **QUIET)
        except Exception as error:  # of many kinds, Exception itself among them
            raise _unreachable(address, error) from error
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)  # Ray sets its own
        try:
            yield
        finally:
            ray.shutdown()


def _reach(address: str) -> None:
    """Knock at HOST:PORT: Ray itself would try for minutes."""
    model, mark, port = address.rpartition(":")
    if mark and port.isdecimal() and "/" not in model:
        try:
            socket.create_connection((model.strip("[]"), int(port)), timeout=REACH_SECONDS).close()
        except (OSError, OverflowError) as error:
            raise _unreachable(address, error) from error


def _unreachable(address: str | None, error: Exception) -> ConfigError:
    if address is None:
        return ConfigError(f"Cannot start Ray on this machine: {_line(error)}.")
    return ConfigError(
        f"Cannot join Ray at {address!r}: {_line(error)}. Expected HOST:PORT as `ray start --head` tells it, or 'auto' on a "
        "machine of the cluster; without an address, offmap starts a Ray of its own."
    )


@contextmanager
def _silent() -> Generator[None]:
    """No statistics on use for the makers of Ray; and the environment as it was, for Ray writes there how it was started."""
    before = {name: os.environ.get(name) for name in ("RAY_USAGE_STATS_ENABLED", "RAY_AUTH_MODE")}
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            os.environ.update({} if value is None else {name: value})


def _line(error: BaseException | None) -> str:
    """An error of Ray's in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}{f': {lines[0]}' if lines else ''}".rstrip(".")
