"""An exported guard under ONNX Runtime, and a queue that runs waiting requests together."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offmap.errors import FileError, first_line
from offmap.export.onnx import open_session, verify_checksum
from offmap.serve.parsing import Arrays, InputSpec, RequestError

DTYPES = {"tensor(float)": np.float32, "tensor(double)": np.float64, "tensor(int64)": np.int64, "tensor(int32)": np.int32}
"""ONNX Runtime's names of types that requests may have, and numpy's."""


@dataclass(frozen=True)
class Model:
    """A session of ONNX Runtime, its inputs and outputs, the threshold, and quantiles of in-distribution scores."""

    session: Any
    inputs: tuple[InputSpec, ...]
    outputs: tuple[str, ...]
    threshold: float
    levels: tuple[float, ...]

    @staticmethod
    def load(path: Path, threads: int = 1) -> Model:
        """Load a file that `Guard.export` wrote; any other is refused."""
        if not path.is_file():
            raise FileError(f"Expected a file that `Guard.export` wrote, but there is none at {path}.")
        try:
            content = path.read_bytes()
        except OSError as error:
            raise FileError(f"Cannot read {path}: {first_line(error)}.") from error
        verify_checksum(content, path)
        try:
            session = open_session(content, threads)
        except Exception as error:
            reason = f"ONNX Runtime cannot read {path}: {first_line(error)}"
            raise FileError(f"Expected an ONNX file, but {reason}. Export the guard anew.") from error
        metadata = session.get_modelmeta().custom_metadata_map
        outputs = tuple(node.name for node in session.get_outputs() if node.name != "threshold")
        if "offmap.threshold" not in metadata or not {"score", "ood"} <= set(outputs):
            raise FileError(f"Expected a file that `Guard.export` wrote, but {path} is another ONNX model.")
        inputs: list[InputSpec] = []
        for node in session.get_inputs():
            rows, *axes = node.shape or [0]
            if isinstance(rows, int) or node.type not in DTYPES:
                raise FileError(
                    f"Expected inputs with a row per example to serve, but `{node.name}` of {path} is {node.type} {node.shape}. "
                    "Keep what all rows share inside the model."
                )
            shape = tuple(size if isinstance(size, int) else None for size in axes)
            inputs.append(InputSpec(node.name, shape, DTYPES[node.type]))
        levels = tuple(float(word) for word in metadata.get("offmap.levels", "").split())
        return Model(session, tuple(inputs), outputs, float(metadata["offmap.threshold"]), levels)

    def __call__(self, inputs: Mapping[str, NDArray[Any]]) -> Arrays:
        """Return every output for every row."""
        return dict(zip(self.outputs, self.session.run(list(self.outputs), dict(inputs)), strict=True))


@dataclass(frozen=True)
class Waiting:
    """The rows of one request, and where its result goes."""

    inputs: Arrays
    rows: int
    result: asyncio.Future[Arrays]


class Batcher:
    """Run requests in one thread, those that wait together in calls of at most `together` rows, unless one has more.

    At most `max_waiting` rows wait; more are refused.
    """

    def __init__(self, model: Callable[[Arrays], Arrays], *, together: int = 256, max_waiting: int = 16384) -> None:
        self.model, self.together, self.max_waiting = model, together, max_waiting
        self.queue: deque[Waiting] = deque()
        self.rows = self.calls = 0
        self.filled = asyncio.Event()
        self.thread = ThreadPoolExecutor(1, "offmap-model")

    async def __call__(self, inputs: Arrays) -> Arrays:
        """Return the outputs for these rows; refuse them with 503 if too many wait."""
        rows = len(next(iter(inputs.values())))
        if self.rows and self.rows + rows > self.max_waiting:
            raise RequestError(503, "Too many rows are waiting. Try again in a moment.")
        waiting = Waiting(inputs, rows, asyncio.get_running_loop().create_future())
        self.queue.append(waiting)
        self.rows += rows
        self.filled.set()
        return await waiting.result

    async def run(self) -> None:
        """Serve until cancelled: take the oldest requests, as many as fit in a call, without those whose client has left."""
        while True:
            await self.filled.wait()
            batch, rows = list[Waiting](), 0
            while self.queue and (not batch or rows + self.queue[0].rows <= self.together):
                first = self.queue.popleft()
                self.rows -= first.rows
                if not first.result.done():
                    batch.append(first)
                    rows += first.rows
            if batch:
                await self._run_batch(batch)
            elif not self.queue:
                self.filled.clear()

    async def _run_batch(self, batch: list[Waiting]) -> None:
        inputs = {name: np.concatenate([request.inputs[name] for request in batch]) for name in batch[0].inputs}
        self.calls += 1
        try:
            outputs = await asyncio.get_running_loop().run_in_executor(self.thread, self.model, inputs)
        except Exception as error:
            if len(batch) > 1:  # one request is at fault: run each alone
                for request in batch:
                    await self._run_batch([request])
            elif not batch[0].result.done():
                reason = f"The model failed on these rows: {first_line(error)[:200]}."
                batch[0].result.set_exception(RequestError(500, reason))
            return
        start = 0
        for request in batch:
            if not request.result.done():
                request.result.set_result({name: values[start : start + request.rows] for name, values in outputs.items()})
            start += request.rows
