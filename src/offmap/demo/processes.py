"""Independent jobs in a few processes, each telling what it does; an error in one ends all."""

from __future__ import annotations

import pickle
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any, cast

from offmap.errors import OffmapError

Job = tuple[Callable[..., Any], tuple[Any, ...]]
"""A function of a module and its arguments; it is also given `report`, a function of one string."""

Report = Callable[[int, str], None]
"""Told (number of the job, what it is about to do)."""


@dataclass(frozen=True)
class Ended:
    """How a job ended: with a value, or with an error."""

    value: Any = None
    error: BaseException | None = None


def run_jobs(jobs: Sequence[Job], *, workers: int, report: Report) -> list[Any]:
    """The results in the order of the jobs; one worker runs them here, more run them in processes of their own."""
    if workers <= 1:
        return [work(*args, report=lambda doing, n=n: report(n, doing)) for n, (work, args) in enumerate(jobs)]
    waiting, results = list(enumerate(jobs)), dict[int, Any]()
    crew = [hire() for _ in range(min(workers, len(jobs)))]
    busy = {connection: (assign(connection, waiting), process) for connection, process in crew}
    try:
        while busy:
            for ready in wait(list(busy)):
                connection = cast(Connection, ready)
                number, process = busy[connection]
                message = receive(connection, process)
                if isinstance(message, str):
                    report(number, message)
                    continue
                results[number] = unwrap(message)
                if waiting:
                    busy[connection] = assign(connection, waiting), process
                else:
                    del busy[connection]
    finally:
        for _, process in crew:
            process.terminate()
    return [results[number] for number in range(len(jobs))]


def hire() -> tuple[Connection, SpawnProcess]:
    """A process that waits for jobs, and the connection to it."""
    context = get_context("spawn")  # a forked torch may hang
    here, there = context.Pipe()
    process = context.Process(target=serve, args=(there,), daemon=True)
    process.start()
    there.close()  # or its end would never be heard of
    return here, process


def assign(connection: Connection, waiting: list[tuple[int, Job]]) -> int:
    """Send the next job, and return its number."""
    number, job = waiting.pop(0)
    send(connection, job)
    return number


def serve(connection: Connection) -> None:
    """Runs in the process: do job after job, sending what is to be said and how each ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears Ctrl-C too, and ends this process
    while True:
        try:
            work, args = pickle.loads(connection.recv_bytes())
        except EOFError:  # the parent is gone
            return
        try:
            ended = Ended(value=work(*args, report=lambda doing: send(connection, doing)))
        except Exception as error:
            ended = Ended(error=error)
        send(connection, ended)


def send(connection: Connection, message: object) -> None:
    """Pickled by value: torch would otherwise pass tensors in shared memory, which dies with the sender."""
    connection.send_bytes(pickle.dumps(message))


def receive(connection: Connection, process: SpawnProcess) -> str | Ended:
    """The next message, or an error if the process has died."""
    try:
        return pickle.loads(connection.recv_bytes())
    except EOFError:
        process.join()
        return Ended(error=OffmapError(f"A worker process died with exit code {process.exitcode}. Try again with `--workers 1`."))


def unwrap(ended: Ended) -> Any:
    """The value of a job, or its error raised here."""
    if ended.error is not None:
        raise ended.error
    return ended.value
