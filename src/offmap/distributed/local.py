"""Independent jobs in a few processes, each telling what it does."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context, parent_process
from multiprocessing.connection import wait
from threading import Thread
from typing import Any

import torch

from offmap.errors import OffmapError

Job = tuple[Callable[..., Any], tuple[Any, ...]]
"""A function of a module and its arguments; it is also given `report`, a function of whatever it tells, and, before its own
arguments, what all jobs share."""

Report = Callable[[int, Any], None]
"""Told (number of the job, what it is about to do or has done)."""

_told: list[Any] = []  # in a worker: the queue that its reports go to
_shared: list[tuple[Any, ...]] = []  # in a worker: what all jobs share


def run_jobs(jobs: Sequence[Job], *, workers: int, report: Report, shared: tuple[Any, ...] = ()) -> list[Any]:
    """The results in the order of the jobs; one worker runs them here, more run them in processes of their own.

    `shared` goes to every process once, not with every job.
    """
    if workers <= 1:
        return [work(*shared, *args, report=lambda doing, n=n: report(n, doing)) for n, (work, args) in enumerate(jobs)]
    context = get_context("spawn")  # a forked torch may hang
    queue = context.SimpleQueue()
    listener = Thread(target=_listen, args=(queue, report), daemon=True)
    listener.start()
    try:
        with ProcessPoolExecutor(workers, mp_context=context, initializer=_start, initargs=(queue, shared)) as pool:
            pending = [pool.submit(_run, number, *job) for number, job in enumerate(jobs)]
            try:
                return [future.result() for future in pending]
            except BaseException:  # Ctrl-C among them: what has not begun never will
                pool.shutdown(wait=False, cancel_futures=True)
                raise
    except BrokenProcessPool as error:
        raise OffmapError("A worker process died. Try again with `--jobs 1`.") from error
    finally:
        queue.put(None)
        listener.join()


def warm_up() -> None:
    """The first step of an optimiser imports half of torch; that is not the first method's time."""
    weight = torch.zeros(1, requires_grad=True, device="cpu")
    weight.sum().backward()
    torch.optim.Adam([weight]).step()


def _start(queue: Any, shared: tuple[Any, ...]) -> None:
    """In a new worker: Ctrl-C ends it at once and in silence, as the parent hears it too; and so does the parent's own end."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    Thread(target=_follow, daemon=True).start()
    _told.append(queue)
    _shared.append(shared)


def _follow() -> None:
    """Wait for the parent's end, be it killed, and end too: what is left behind would work for nobody."""
    parent = parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def _run(number: int, work: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    return work(*_shared[-1], *args, report=lambda doing: _told[-1].put((number, doing)))


def _listen(queue: Any, report: Report) -> None:
    while (message := queue.get()) is not None:
        report(*message)
