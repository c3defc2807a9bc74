"""Run independent jobs on Ray: on this machine or a cluster. The job of a worker that dies is run again."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
from collections import deque
from collections.abc import Generator, Sequence
from contextlib import contextmanager, redirect_stdout
from functools import lru_cache
from typing import Any

from offmap.checks import require
from offmap.distributed.jobs import Job, Report
from offmap.errors import ConfigError, OffmapError, first_line

logger: logging.Logger = logging.getLogger("offmap")

MAX_DEATHS = 3
"""So many workers may die of one job until the run ends."""


def run_on_ray(
    jobs: Sequence[Job], *, workers: int, report: Report, shared: tuple[Any, ...] = (), address: str | None = None
) -> list[Any]:
    """Return the results in the order of the jobs, of which `workers` run at once.

    A job may run twice, if its worker dies: it must then give the same result. Without `address`, Ray is started on this machine
    and ended again, unless the caller has it running.
    """
    ray = require("ray", "ray")
    with connect(ray, workers, address):
        reports = require("ray.util.queue", "ray").Queue(actor_options={"num_cpus": 0})
        task = ray.remote(num_cpus=1, max_retries=MAX_DEATHS - 1)(run_job)
        setup = (list(sys.path), [ray.put(shared)], reports)
        waiting, running, started, results = deque(range(len(jobs))), dict[Any, int](), set[int](), dict[int, Any]()
        try:
            while len(results) < len(jobs):
                while waiting and len(running) < workers:
                    number = waiting.popleft()
                    running[task.remote(number, [ray.put(jobs[number])], *setup)] = number
                finished, _ = ray.wait(list(running), timeout=0.05)
                for number, kind, item in reports.get_nowait_batch(reports.qsize()):
                    if kind == "report":
                        report(number, item)
                    elif number in started:
                        logger.warning("A worker died; its job is run again.")
                    started.add(number)
                for ref in finished:
                    kind, value = ray.get(ref)
                    if kind == "error":
                        raise value
                    results[running.pop(ref)] = value
            return [results[number] for number in range(len(jobs))]
        except ray.exceptions.RayTaskError as error:
            reason = f"A job could not be sent to a worker or its result back: {first_line(error.cause)}."
            raise OffmapError(reason) from error
        except (ray.exceptions.WorkerCrashedError, ray.exceptions.NodeDiedError, ray.exceptions.OutOfMemoryError) as error:
            raise OffmapError(
                f"A worker died in the middle of the same job, {MAX_DEATHS} of {MAX_DEATHS} times: "
                f"{type(error).__name__}: {first_line(error)}. Has each machine enough memory, and the same offmap?"
            ) from error
        except ray.exceptions.RayError as error:
            raise OffmapError(f"Ray failed: {first_line(error)}. Finished jobs are kept: run it again.") from error
        finally:
            for ref in running:  # also those in the middle of a job
                ray.cancel(ref, force=True)
            reports.shutdown(force=True)


def run_job(number: int, job: Sequence[Any], path: Sequence[str], shared: Sequence[Any], reports: Any) -> tuple[str, Any]:
    """Run a job in a worker; return ("result", value) or ("error", error). Objects come as references in lists."""
    sys.path.extend(folder for folder in path if folder not in sys.path)  # to rebuild objects of the user's modules
    reports.put((number, "start", None))
    work, args = require("ray", "ray").get(job[0])
    try:
        return "result", work(*_fetch(shared[0]), *args, report=lambda item: reports.put((number, "report", item)))
    except Exception as error:
        return "error", error


@lru_cache(maxsize=1)
def _fetch(shared: Any) -> tuple[Any, ...]:
    """Get what all jobs share; a worker does it once."""
    return require("ray", "ray").get(shared)


@contextmanager
def connect(ray: Any, workers: int, address: str | None) -> Generator[None]:
    """Connect to the caller's Ray, the one at an address, or a new one of this machine, without usage statistics.

    Ray's messages go to standard error: standard output is for results.
    """
    if ray.is_initialized():
        yield
        return
    # workers of a Ray of our own have the priority of `--engine local` (Ray's default is 15 less)
    options = {"num_cpus": workers, "include_dashboard": False, "_system_config": {"worker_niceness": 0}}
    handler, host, port = signal.getsignal(signal.SIGTERM), *(address or "").rpartition(":")[::2]
    # Ray also writes to the environment how it was started
    before = {name: os.environ.get(name) for name in ("RAY_USAGE_STATS_ENABLED", "RAY_AUTH_MODE")}
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    with redirect_stdout(sys.stderr):
        try:
            if host and port.isdecimal() and "/" not in host:  # Ray itself would try for minutes
                socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
            quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
            ray.init(address=address or "local", **({} if address else options), **quiet)
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, handler)  # Ray sets its own
        except Exception as error:  # of many types, Exception itself among them
            if address is None:
                raise ConfigError(f"Cannot start Ray on this machine: {first_line(error)}.") from error
            raise ConfigError(
                f"Cannot join Ray at {address!r}: {type(error).__name__}: {first_line(error)}. Expected HOST:PORT as "
                "`ray start --head` prints it, or 'auto' inside the cluster; without an address, offmap starts its own Ray."
            ) from error
        else:
            try:
                yield
            finally:
                ray.shutdown()
        finally:
            for name, value in before.items():
                os.environ.pop(name, None)
                os.environ.update({} if value is None else {name: value})
