"""A module of frozen draws becomes a file: ONNX or torch.export, checked against the guard before it is written."""

from __future__ import annotations

import hashlib
import io
import logging
import os
import re
import time
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from offmap import checks
from offmap._version import __version__
from offmap.atomic import write_whole
from offmap.checks import require
from offmap.detector import Calibration
from offmap.errors import ConfigError, FileError, ModelError, first_line
from offmap.metrics import rank_correlation
from offmap.model.forward import no_fast_path

TOLERANCE = 1e-4
"""Of a number, in units of 1 plus its size: what the file may differ by from the guard, beside what rounding does to both."""

MAGNIFIED, SAME_ORDER = 1e-2, 0.999
"""What a score may differ by where a logarithm magnifies rounding, and the least rank correlation with the guard's."""

CHECKSUM = b"\x72\x53\x0a\x0foffmap.checksum\x12\x40"
"""One more of the `metadata_props` (field 14) of an ONNX model, as protobuf writes it, up to the 64 digits of its value."""

Run: TypeAlias = Callable[[Sequence[Tensor]], dict[str, Tensor]]
"""Tensors of the inputs, in order -> outputs by name."""


@dataclass(frozen=True)
class ExportInfo:
    """What was written. `difference` is the largest one to the guard on the example, in units of 1 plus the number's size, and
    `changed` the number of verdicts that are not the guard's; `milliseconds` are per row, by batch size, under ONNX Runtime on
    the machine that exported (None for `.pt2`). `exact`: the threshold keeps the guard's rate of false alarms.
    """

    path: Path
    size: int
    draws: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    threshold: float
    exact: bool
    difference: float
    changed: int
    milliseconds: Mapping[int, float] | None


@dataclass(frozen=True)
class ExportTask:
    """What is to be exported."""

    module: nn.Module  # tensors of the inputs, in order -> outputs by name
    tensors: tuple[Tensor, ...]  # those of the example
    names: tuple[str, ...]
    rows: tuple[bool, ...]  # which of them have a row per example
    expected: Mapping[str, Tensor]  # what the detector gives for the example
    calibration: Calibration
    ties: Tensor | None  # in which rows rounding decides the score, (B,) bool
    facts: Mapping[str, Any]  # kept in the file

    @cached_property
    def rounding_errors(self) -> dict[str, float]:
        """How far each output moves, at most, when the last digits of the inputs do: no runtime can be nearer."""
        nudged: list[Tensor] = []
        for t in self.tensors:
            signs = torch.ones(t.numel(), dtype=t.dtype, device=t.device)
            signs[1::2] = -1
            nudged.append(t * (1 + torch.finfo(t.dtype).eps * signs.view(t.shape)) if t.is_floating_point() else t)
        before, after = self.module(*self.tensors), self.module(*nudged)
        return {name: float((after[name] - before[name]).abs().nan_to_num(0.0, 0.0, 0.0).max()) for name in self.numbers}

    @property
    def numbers(self) -> list[str]:
        """Outputs that must be the detector's but for rounding; verdicts and p-values may jump with the last digit of a score."""
        return [name for name in self.expected if name not in ("ood", "p_value", "threshold")]

    def take(self, count: int) -> list[Tensor]:
        """Return the example's first rows, again and again if there are fewer."""
        size = next(len(t) for t, row in zip(self.tensors, self.rows, strict=True) if row)
        index = torch.arange(count, device="cpu") % size
        return [t[index] if row else t for t, row in zip(self.tensors, self.rows, strict=True)]


def check_path(path: str | Path) -> Path:
    """Return the path, refused unless its suffix names a format and its folder can be written to: an export takes a while."""
    path = checks.path("path", path)
    if path.suffix not in FORMATS:
        raise ConfigError(f"Expected `path` to end in {' or '.join(FORMATS)}, but got {path.name!r}.")
    if path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise FileError(f"Cannot write {path}. Check that its folder exists and is writable, and that it is not a folder.")
    return path


def export(task: ExportTask, path: Path) -> ExportInfo:
    """Trace, check on the example, write. Differences above 1e-4 are refused; in half precision they are reported."""
    rows = torch.export.Dim("rows", min=1)
    shapes = tuple({0: rows} if row else None for row in task.rows)
    with torch.no_grad():
        compare(task, task.module(*task.tensors), "the module before export")
        with quiet(), no_fast_path, redirect_stderr(io.StringIO()):  # where torch prints graphs that it cannot finish
            try:
                program = torch.export.export(task.module, task.tensors, dynamic_shapes=(shapes,), strict=False)
            except Exception as error:
                raise ModelError(
                    f"torch.export cannot trace this model: {_reason(error)}. Avoid Python branches and numbers that depend on "
                    "the values or the number of rows (use torch.where, keep shapes symbolic), or serve the guard itself."
                ) from error
        content, run = FORMATS[path.suffix](task, program)
        outputs = run(task.tensors)
        difference, changed = compare(task, outputs, f"the {path.suffix} file")
        one = run(task.take(1))
        if any(not torch.allclose(one[n], outputs[n][:1], rtol=1e-3, atol=1e-3, equal_nan=True) for n in task.numbers):
            raise ModelError(
                "Expected the same numbers for a row alone and in a batch, but the exported graph differs. The model fixes "
                "its batch size while it is traced: write it without `int(x.shape[0])`."
            )
        milliseconds = {n: _milliseconds(run, task.take(n)) for n in (1, 32)} if path.suffix == ".onnx" else None
    write_whole(path, content, folders=False)
    draws, threshold, exact = (task.facts[name] for name in ("draws", "threshold", "exact"))
    return ExportInfo(path, len(content), draws, task.names, tuple(outputs), threshold, exact, difference, changed, milliseconds)


def _to_onnx(task: ExportTask, program: torch.export.ExportedProgram) -> tuple[bytes, Run]:
    """Return ONNX bytes and how ONNX Runtime runs them."""
    for package in ("onnx", "onnxscript", "onnxruntime"):
        require(package, "onnx")
    with quiet():
        try:
            onnx_program = torch.onnx.export(program, verbose=False, external_data=False)
        except Exception as error:
            raise ModelError(
                f"ONNX cannot express this model: {_reason(error)}. Replace the operator, or export to .pt2, which keeps it."
            ) from error
    assert onnx_program is not None
    _rename(onnx_program.model.graph, task)
    model = onnx_program.model_proto
    for key, value in {**task.facts, "version": __version__}.items():
        model.metadata_props.add(key=f"offmap.{key}", value=str(value))
    try:
        content = add_checksum(model.SerializeToString())
    except ValueError as error:  # protobuf ends at 2 GB
        raise ConfigError("Expected a graph of less than 2 GB. Export fewer `draws`, with half=True, or to .pt2.") from error
    try:
        session = open_session(content)
    except Exception as error:
        raise ModelError(
            f"ONNX Runtime cannot run this model: {first_line(error)}. Convert it with `model.float()` before the fit if its "
            "dtype is unusual, or export to .pt2."
        ) from error

    def run(tensors: Sequence[Tensor]) -> dict[str, Tensor]:
        feed = {name: t.detach().cpu().numpy() for name, t in zip(task.names, tensors, strict=True)}
        used = {node.name for node in session.get_inputs()}  # inputs that no output needs are left out of the graph
        outputs = session.run(list(task.expected), {name: a for name, a in feed.items() if name in used})
        return {name: torch.from_numpy(a) for name, a in zip(task.expected, outputs, strict=True)}

    return content, run


def _rename(graph: Any, task: ExportTask) -> None:
    """Inputs and outputs by our names; the exporter calls what is in between after operators, one of which is `mean`.

    Where in the sources a node comes from is left out: it names files of the machine that exports, and is long.
    """
    for node in graph:
        node.metadata_props.clear()
        node.doc_string = None
    for place, value in enumerate(value for node in graph for value in node.outputs):
        value.metadata_props.clear()
        value.name = f"value_{place}"
    for values, names in ((graph.inputs, task.names), (graph.outputs, task.expected)):
        for value, name in zip(values, names, strict=True):
            value.name = name


def _to_pt2(task: ExportTask, program: torch.export.ExportedProgram) -> tuple[bytes, Run]:
    """Return the bytes of a torch.export archive, and how torch runs them."""
    file = io.BytesIO()
    with quiet():
        torch.export.save(program, file, extra_files={"offmap": "\n".join(f"{k}={v}" for k, v in task.facts.items())})
        loaded = torch.export.load(io.BytesIO(file.getvalue())).module()
    return file.getvalue(), lambda tensors: loaded(*tensors)


FORMATS = {".onnx": _to_onnx, ".pt2": _to_pt2}
"""Suffixes, and how each is written."""


def open_session(content: bytes | str, threads: int = 1) -> Any:
    """Open an ONNX Runtime session on the CPU."""
    runtime = require("onnxruntime", "onnx")
    options = runtime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads, options.log_severity_level = threads, 1, 4  # errors are raised
    return runtime.InferenceSession(content, options, providers=["CPUExecutionProvider"])


def add_checksum(model: bytes) -> bytes:
    """Append the SHA-256 of all bytes of a serialised ONNX model, as one more of its facts: ONNX itself has none."""
    return model + CHECKSUM + hashlib.sha256(model).hexdigest().encode()


def verify_checksum(content: bytes, path: Path) -> None:
    """Raise a FileError unless the bytes are those that were written."""
    if content != add_checksum(content[: -len(CHECKSUM) - 64]):
        raise FileError(f"{path} has a wrong checksum: damaged, changed, or not written by `Guard.export`. Export it again.")


def compare(task: ExportTask, outputs: Mapping[str, Tensor], what: str) -> tuple[float, int]:
    """Return the largest difference to the guard in units of 1 + |number|, and how many verdicts differ beyond rounding."""
    largest, refuse = 0.0, not task.facts["half"]
    score, threshold = task.expected["score"].double().cpu(), float(task.facts["threshold"])
    margin = TOLERANCE * (1 + abs(threshold)) + 10 * task.rounding_errors["score"]
    clear = (score - threshold).abs() > (margin if refuse else 0.0)
    if task.ties is not None and refuse:
        clear &= ~task.ties
    changed = int(((task.expected["ood"].cpu() != outputs["ood"].cpu()) & clear).sum())
    if refuse and changed:
        raise ModelError(f"Expected the verdicts of the guard, but {changed} of {what} differ.")
    for name in task.numbers:
        mine, other = task.expected[name].double().cpu(), outputs[name].double().cpu()
        differences = torch.where(mine == other, 0.0, (mine - other).abs() / (1 + mine.abs())).nan_to_num(nan=torch.inf)
        scored = name in ("score", "terms")
        if scored and task.ties is not None:
            differences[task.ties] = 0.0
        worst = float(differences.max())
        largest = max(largest, worst)
        if not refuse or worst <= TOLERANCE + 10 * task.rounding_errors[name]:
            continue
        if not scored:
            raise ModelError(
                f"Expected the numbers of the guard to {TOLERANCE:g}, but `{name}` of {what} is up to {worst:.2g} off. The model "
                "may depend on something else than its inputs and weights."
            )
        # predictions agree: the logarithm of a tiny disagreement magnifies their rounding, which may not change the order
        order = rank_correlation(score, outputs["score"].double().cpu())
        if worst > MAGNIFIED or order < SAME_ORDER:
            raise ModelError(
                f"Expected the score of the guard, but `{name}` of {what} is up to {worst:.2g} off (rank correlation "
                f"{float(order):.4f}) while predictions agree: the draws differ by little more than rounding, which the score "
                "magnifies. Fit in double precision (`model.double()`), or with score='epistemic'."
            )
    if not torch.allclose(outputs["p_value"], task.calibration.p_value(outputs["score"]), atol=1e-6):
        raise ModelError(f"Expected the p-values of the guard's calibration, but those of {what} differ.")
    return largest, changed


def _milliseconds(run: Run, tensors: Sequence[Tensor]) -> float:
    """Measure the time per row: the median of as many calls as fit in 0.2 seconds."""
    run(tensors)
    spent: list[float] = []
    end = time.perf_counter() + 0.2
    while len(spent) < 3 or time.perf_counter() < end:
        start = time.perf_counter()
        run(tensors)
        spent.append(time.perf_counter() - start)
    return 1e3 * sorted(spent)[len(spent) // 2] / max(len(t) for t in tensors)


def _reason(error: BaseException) -> str:
    """Return the operator that the innermost error names, if there is one, and its first line."""
    chain = [error]
    while (inner := chain[-1].__cause__) is not None:  # not what it met on its way, `__context__`
        chain.append(inner)
    operators = [re.search(r"\b(aten|prims|torchvision|torch\.ops)[.:]+\w+", str(each)) for each in reversed(chain)]
    named, line = next((match.group(0) for match in operators if match), ""), first_line(chain[-1])
    return line if named in line else f"{named} ({line})"


@contextmanager
def quiet() -> Generator[None]:
    """Exporters warn of their own workings, and log them: nothing that a user could act on."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "onnx_ir", "torch.export")]
    levels = [each.level for each in loggers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for each in loggers:
            each.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for each, level in zip(loggers, levels, strict=True):
                each.setLevel(level)
