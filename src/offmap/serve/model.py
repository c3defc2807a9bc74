"""An exported guard under ONNX Runtime, and a queue that runs waiting requests together."""

from __future__ import annotations

import asyncio
import json
import math
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

DTYPES: dict[str, type[np.generic[Any]]] = {
    "tensor(float)": np.float32, "tensor(double)": np.float64, "tensor(int64)": np.int64, "tensor(int32)": np.int32,
}  # fmt: skip
"""ONNX Runtime's names of types that requests may have, and numpy's."""


@dataclass(frozen=True)
class Model:
    """A session of ONNX Runtime, its inputs and its outputs that have a row per example, and what its file says of it.

    `levels` are quantiles of in-distribution scores, `terms` name the columns of the output of that name, `columns` those of
    the only input. `false_alarms` is the promised share of in-distribution rows that are flagged, by `calibration_rows` of them,
    which the model has not seen if it is `calibrated`.
    """

    session: Any
    inputs: tuple[InputSpec, ...]
    outputs: tuple[str, ...]
    threshold: float
    levels: tuple[float, ...] = ()
    terms: tuple[str, ...] = ()
    columns: tuple[str, ...] | None = None
    false_alarms: float = 0.05
    calibration_rows: int | None = None
    calibrated: bool = True

    @staticmethod
    def load(path: Path, threads: int = 1) -> Model:
        """Load a file that `Guard.export` wrote; any other is refused."""
        if not path.is_file():
            raise FileError(f"Expected a file that `Guard.export` wrote, but there is none at {path}.")
        try:
            content = path.read_bytes()
        except OSError as error:
            raise FileError(f"Cannot read {path}: {first_line(error)}.") from error
        _check_kind(content, path)
        verify_checksum(content, path)
        try:
            session = open_session(content, threads)
        except Exception as error:
            reason = f"ONNX Runtime cannot read {path}: {first_line(error)}"
            raise FileError(f"Expected an ONNX file, but {reason}. Export the guard again.") from error
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
            missing = metadata.get("offmap.allow_nan") == "true" and node.type in ("tensor(float)", "tensor(double)")
            inputs.append(InputSpec(node.name, shape, DTYPES[node.type], missing))
        try:
            facts = _read_facts({key.removeprefix("offmap."): value for key, value in metadata.items()})
            columns, terms = facts["columns"], facts["terms"]
            if columns is not None and [spec.shape for spec in inputs] != [(len(columns),)]:
                raise ValueError(f"{len(columns)} columns")
            if ("terms" in outputs) != bool(terms):
                raise ValueError(f"{len(terms)} terms")
        except (ValueError, KeyError, TypeError) as error:
            reason = f"{path} has {first_line(error)}"
            raise FileError(f"Expected metadata as `Guard.export` writes it, but {reason}. Export the guard again.") from error
        return Model(session, tuple(inputs), outputs, **facts)

    def __call__(self, inputs: Mapping[str, NDArray[Any]]) -> Arrays:
        """Return every output for every row."""
        return dict(zip(self.outputs, self.session.run(list(self.outputs), dict(inputs)), strict=True))


def _check_kind(content: bytes, path: Path) -> None:
    """Raise if the file is a guard or a torch.export archive, which are not served."""
    if content[8:10] == b'{"':  # safetensors: the length of a JSON header, then that
        raise FileError(
            f"{path} is a guard file, which needs its model and Python. Export both as one ONNX file and serve that: "
            f"`offmap export {path} g.onnx --model MODULE:CALLABLE`, or `guard.export('g.onnx', example=x)` in Python."
        )
    if content[:2] == b"PK":
        raise FileError(f"{path} is an archive for torch. Export the guard to .onnx to serve it.")


def _read_facts(metadata: Mapping[str, str]) -> dict[str, Any]:
    """Read what the file says of the guard, as the fields of `Model`."""
    rows, columns, terms = (json.loads(metadata.get(key, "null")) for key in ("calibration_rows", "columns", "terms"))
    for names in (columns, terms):
        if names is not None and (not all(isinstance(name, str) for name in names) or len(set(names)) < len(names)):
            raise ValueError(f"the names {names}"[:100])
    false_alarms = float(metadata.get("false_alarms", "0.05"))
    if not 0 < false_alarms < 1 or (rows is not None and (type(rows) is not int or rows < 1)):
        raise ValueError(f"a share of {false_alarms:g} false alarms by {rows} rows"[:100])
    threshold, levels = float(metadata["threshold"]), tuple(float(word) for word in metadata.get("levels", "").split())
    if math.isnan(threshold):
        raise ValueError("no number as the threshold")
    columns = None if columns is None else tuple(columns)
    calibrated = metadata.get("calibrated", "true").lower() == "true"
    return {
        "threshold": threshold, "levels": levels, "terms": tuple(terms or ()), "columns": columns,
        "false_alarms": false_alarms, "calibration_rows": rows, "calibrated": calibrated,
    }  # fmt: skip


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
        self._model, self._together, self._max_waiting = model, together, max_waiting
        self.queue: deque[Waiting] = deque()
        self.rows: int = 0
        self.calls: int = 0
        self._filled = asyncio.Event()
        self.thread: ThreadPoolExecutor = ThreadPoolExecutor(1, "offmap-model")

    async def __call__(self, inputs: Arrays) -> Arrays:
        """Return the outputs for these rows; refuse them with 503 if too many wait."""
        rows = len(next(iter(inputs.values())))
        if self.rows and self.rows + rows > self._max_waiting:
            raise RequestError(503, "Too many rows are waiting. Try again in a moment.")
        waiting = Waiting(inputs, rows, asyncio.get_running_loop().create_future())
        self.queue.append(waiting)
        self.rows += rows
        self._filled.set()
        return await waiting.result

    async def run(self) -> None:
        """Serve until cancelled: take the oldest requests, as many as fit in a call, without those whose client has left."""
        while True:
            await self._filled.wait()
            batch, rows = list[Waiting](), 0
            while self.queue and (not batch or rows + self.queue[0].rows <= self._together):
                first = self.queue.popleft()
                self.rows -= first.rows
                if not first.result.done():
                    batch.append(first)
                    rows += first.rows
            if batch:
                await self._run_batch(batch)
            elif not self.queue:
                self._filled.clear()

    async def _run_batch(self, batch: list[Waiting]) -> None:
        inputs = {name: np.concatenate([request.inputs[name] for request in batch]) for name in batch[0].inputs}
        self.calls += 1
        try:
            outputs = await asyncio.get_running_loop().run_in_executor(self.thread, self._model, inputs)
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
