"""Run independent jobs on Ray: on this machine or a cluster. The job of a worker that dies is run again by a new one."""

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

from offmap.distributed.jobs import Job, Report
from offmap.errors import ConfigError, OffmapError
from offmap.extras import require

logger = logging.getLogger("offmap")

MAX_DEATHS = 3
"""So many workers may die of one job, or before they are ready, until the run ends."""

REACH_SECONDS = 10

OWN_RAY: dict[str, Any] = {"include_dashboard": False, "_system_config": {"worker_niceness": 0}}
"""Workers of a Ray of our own have the priority of `--engine local` (Ray's default is 15 less)."""

QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}


def run_on_ray(
    jobs: Sequence[Job], *, workers: int, report: Report, shared: tuple[Any, ...] = (), address: str | None = None
) -> list[Any]:
    """Return the results in the order of the jobs, by `workers` actors with one job each at a time.

    A job may run twice, if its worker dies: it must then give the same result. Without `address`, Ray is started on this machine
    and ended again, unless the caller has it running.
    """
    ray = require("ray", "ray")
    with connect(ray, workers, address):
        scheduler = Scheduler(ray, jobs, report, ray.put(shared))
        try:
            return scheduler.run(min(workers, len(jobs)))
        except ray.exceptions.RayError as error:
            raise OffmapError(f"Ray failed: {_first_line(error)}. What is done stays done: run it again.") from error
        finally:
            for actor, _ in scheduler.streams.values():  # also those in the middle of a job
                ray.kill(actor)


class Worker:
    """An actor that runs one job after another."""

    def __init__(self, path: Sequence[str], shared: Sequence[Any]) -> None:
        sys.path.extend(folder for folder in path if folder not in sys.path)  # `shared` may need the user's modules
        self.shared = require("ray", "ray").get(shared[0])

    def run(self, work: Callable[..., Any] | None, args: tuple[Any, ...]) -> Iterator[tuple[str, Any]]:
        """Yield ("report", item) for each report of the job as it comes, then ("result", value) or ("error", error)."""
        queue: SimpleQueue[tuple[str, Any]] = SimpleQueue()

        def run_job() -> None:
            try:
                result = None if work is None else work(*self.shared, *args, report=lambda item: queue.put(("report", item)))
                queue.put(("result", result))
            except BaseException as error:
                queue.put(("error", error))

        threading.Thread(target=run_job, daemon=True).start()
        kind = "report"
        while kind == "report":
            kind, value = queue.get()
            yield kind, value


class Scheduler:
    """Gives jobs to actors; `streams` maps what an actor yields to the actor and the number of its job."""

    def __init__(self, ray: Any, jobs: Sequence[Job], report: Report, shared: Any) -> None:
        self.ray, self.jobs, self.report, self.shared = ray, jobs, report, shared
        self.actor = ray.remote(num_cpus=1, max_restarts=0)(Worker)
        self.waiting, self.deaths = deque(range(len(jobs))), Counter[int | None]()
        self.results: dict[int, Any] = {}
        self.streams: dict[Any, tuple[Any, int | None]] = {}

    def run(self, workers: int) -> list[Any]:
        """Run all jobs. They go to workers that are ready: one for which the cluster has no room delays nothing."""
        for _ in range(workers):
            self._add_worker()
        while len(self.results) < len(self.jobs):
            (stream, *_), _ = self.ray.wait(list(self.streams), num_returns=1, fetch_local=False)
            try:
                kind, value = self.ray.get(next(stream))
            except self.ray.exceptions.RayTaskError as error:
                reason = _first_line(error.cause)
                raise OffmapError(f"A job could not be sent to a worker or its result back: {reason}.") from error
            except self.ray.exceptions.RayError as error:  # the actor, its process or its machine is gone
                self._replace_worker(stream, error)
            else:
                self._handle(stream, kind, value)
        return [self.results[number] for number in range(len(self.jobs))]

    def _add_worker(self) -> None:
        """Start a worker; its first job is none, and it is ready when that is done."""
        self._assign(self.actor.remote(list(sys.path), [self.shared]), None)

    def _assign(self, actor: Any, number: int | None) -> None:
        work, args = (None, ()) if number is None else self.jobs[number]
        self.streams[actor.run.options(num_returns="streaming").remote(work, args)] = (actor, number)

    def _handle(self, stream: Any, kind: str, value: Any) -> None:
        actor, number = self.streams[stream]
        if kind == "error":
            raise value
        if kind == "report":
            assert number is not None
            self.report(number, value)
            return
        del self.streams[stream]
        if number is None:
            del self.deaths[None]  # workers can start: earlier deaths were bad luck
        else:
            self.results[number] = value
        if self.waiting:
            self._assign(actor, self.waiting.popleft())
        else:
            self.ray.kill(actor)

    def _replace_worker(self, stream: Any, error: BaseException) -> None:
        """Start a new worker for a dead one; its job comes next."""
        actor, number = self.streams.pop(stream)
        self.ray.kill(actor)  # it may only be out of reach
        self.deaths[number] += 1
        if self.deaths[number] >= MAX_DEATHS:
            moment = "before it had work" if number is None else "in the middle of the same job"
            raise OffmapError(
                f"A worker died {moment}, {MAX_DEATHS} of {MAX_DEATHS} times: {_first_line(error)}. Has each machine enough "
                "memory, and the same offmap?"
            ) from error
        logger.warning("A worker died; its job is run again.")
        if number is not None:
            self.waiting.appendleft(number)
        self._add_worker()


@contextmanager
def connect(ray: Any, workers: int, address: str | None) -> Generator[None]:
    """Connect to the caller's Ray, the one at an address, or a new one of this machine, without usage statistics.

    Ray's messages go to standard error: standard output is for results.
    """
    if ray.is_initialized():
        yield
        return
    if address is not None:
        _check_reachable(address)
    handler = signal.getsignal(signal.SIGTERM)
    # Ray also writes to the environment how it was started
    before = {name: os.environ.get(name) for name in ("RAY_USAGE_STATS_ENABLED", "RAY_AUTH_MODE")}
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    with redirect_stdout(sys.stderr):
        try:
            ray.init(address=address or "local", **({} if address else {"num_cpus": workers, **OWN_RAY}), **QUIET)
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, handler)  # Ray sets its own
        except Exception as error:  # of many types, Exception itself among them
            raise _unreachable(address, error) from error
        else:
            try:
                yield
            finally:
                ray.shutdown()
        finally:
            for name, value in before.items():
                os.environ.pop(name, None)
                os.environ.update({} if value is None else {name: value})


def _check_reachable(address: str) -> None:
    """Try to connect to HOST:PORT: Ray itself would try for minutes."""
    host, mark, port = address.rpartition(":")
    if mark and port.isdecimal() and "/" not in host:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=REACH_SECONDS).close()
        except (OSError, OverflowError) as error:
            raise _unreachable(address, error) from error


def _unreachable(address: str | None, error: Exception) -> ConfigError:
    if address is None:
        return ConfigError(f"Cannot start Ray on this machine: {_first_line(error)}.")
    return ConfigError(
        f"Cannot join Ray at {address!r}: {_first_line(error)}. Expected HOST:PORT as `ray start --head` tells it, or 'auto' on a "
        "machine of the cluster; without an address, offmap starts a Ray of its own."
    )


def _first_line(error: BaseException | None) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}{f': {lines[0]}' if lines else ''}".rstrip(".")
