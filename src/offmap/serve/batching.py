"""Requests that wait while the model is busy are run together, in one call."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from offmap.serve.body import Refused
from offmap.serve.model import Arrays


@dataclass(frozen=True)
class Waiting:
    """Rows of one request, and where its answer goes."""

    inputs: Arrays
    rows: int
    result: asyncio.Future[Arrays]


class Batcher:
    """Runs `model` in one thread, on at most `together` rows a call unless one request has more; at most `waiting` rows wait."""

    def __init__(self, model: Callable[[Arrays], Arrays], *, together: int = 256, waiting: int = 16384) -> None:
        self.model, self.together, self.most = model, together, waiting
        self.queue: deque[Waiting] = deque()
        self.rows = 0
        self.more = asyncio.Event()
        self.thread = ThreadPoolExecutor(1, "offmap-model")
        self.calls = 0

    async def __call__(self, inputs: Arrays) -> Arrays:
        """The answer to these rows, in company or alone; 503 if too many wait."""
        rows = len(next(iter(inputs.values())))
        if self.rows and self.rows + rows > self.most:
            raise Refused(503, "Too many rows are waiting. Try again in a moment.")
        waiting = Waiting(inputs, rows, asyncio.get_running_loop().create_future())
        self.queue.append(waiting)
        self.rows += rows
        self.more.set()
        return await waiting.result

    async def run(self) -> None:
        """Serve until cancelled."""
        while True:
            await self.more.wait()
            batch = self._next()
            if batch:
                await self._answer(batch)
            elif not self.queue:
                self.more.clear()

    def close(self) -> None:
        """Let the thread go."""
        self.thread.shutdown(wait=False, cancel_futures=True)

    def _next(self) -> list[Waiting]:
        """The requests that came first, as many as go together; those whose client has left are dropped."""
        batch: list[Waiting] = []
        rows = 0
        while self.queue and (not batch or rows + self.queue[0].rows <= self.together):
            first = self.queue.popleft()
            self.rows -= first.rows
            if not first.result.done():
                batch.append(first)
                rows += first.rows
        return batch

    async def _answer(self, batch: list[Waiting]) -> None:
        names = batch[0].inputs
        inputs = batch[0].inputs if len(batch) == 1 else {n: np.concatenate([each.inputs[n] for each in batch]) for n in names}
        self.calls += 1
        try:
            told = await asyncio.get_running_loop().run_in_executor(self.thread, self.model, inputs)
        except Exception as error:
            if len(batch) > 1:  # one of them is at fault: the others must not pay
                for each in batch:
                    await self._answer([each])
            elif not batch[0].result.done():
                batch[0].result.set_exception(Refused(500, f"The model failed on these rows: {_line(error)}."))
            return
        start = 0
        for each in batch:
            if not each.result.done():
                each.result.set_result({name: values[start : start + each.rows] for name, values in told.items()})
            start += each.rows


def _line(error: Exception) -> Any:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200].rstrip(". ")
