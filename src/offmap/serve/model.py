"""An exported guard under ONNX Runtime: what it takes, what it was calibrated to, and its answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from offmap.errors import FileError
from offmap.export.checksum import check_seal
from offmap.export.onnx import opened

Arrays: TypeAlias = dict[str, NDArray[Any]]
"""Rows of every input or output, by name."""

KINDS = {"tensor(float)": np.float32, "tensor(double)": np.float64, "tensor(int64)": np.int64, "tensor(int32)": np.int32}
"""ONNX Runtime's names of the numbers that may come, and numpy's."""


@dataclass(frozen=True)
class Wanted:
    """One input: its name, what one row looks like (None: any length), and its numbers."""

    name: str
    shape: tuple[int | None, ...]
    dtype: type[np.generic]

    def __str__(self) -> str:
        axes = ", ".join("any" if size is None else str(size) for size in self.shape)
        return f"{self.name} (rows{', ' if axes else ''}{axes})"


@dataclass(frozen=True)
class Model:
    """A session, its inputs, the threshold of the verdicts, and scores that split in-distribution data evenly."""

    session: Any
    wanted: tuple[Wanted, ...]
    outputs: tuple[str, ...]
    threshold: float
    levels: tuple[float, ...]
    false_alarms: float

    @staticmethod
    def open(path: Path, threads: int = 1) -> Model:
        """Read a file that `Guard.export` wrote; any other is refused."""
        if not path.is_file():
            raise FileError(f"Expected a file that `Guard.export` wrote, but there is none at {path}.")
        try:
            content = path.read_bytes()
        except OSError as error:
            raise FileError(f"Cannot read {path}: {error.strerror}.") from error
        check_seal(content, path)
        try:
            session = opened(content, threads)
        except Exception as error:
            line = str(error).strip().splitlines()[0]
            raise FileError(
                f"Expected an ONNX file, but ONNX Runtime cannot read {path}: {line}. Export the guard anew."
            ) from error
        facts = session.get_modelmeta().custom_metadata_map
        outputs = tuple(node.name for node in session.get_outputs())
        if "offmap.threshold" not in facts or not {"score", "ood"} <= set(outputs):
            raise FileError(f"Expected a file that `Guard.export` wrote, but {path} is another ONNX model.")
        wanted = tuple(_wanted(node, path) for node in session.get_inputs())
        levels = tuple(float(word) for word in facts.get("offmap.levels", "").split())
        return Model(
            session, wanted, outputs, float(facts["offmap.threshold"]), levels, float(facts.get("offmap.false_alarms", "0.05"))
        )

    def __call__(self, inputs: Mapping[str, NDArray[Any]]) -> Arrays:
        """Every output for every row."""
        return dict(zip(self.outputs, self.session.run(list(self.outputs), dict(inputs)), strict=True))


def _wanted(node: Any, path: Path) -> Wanted:
    rows, *rest = node.shape or [0]
    if isinstance(rows, int) or node.type not in KINDS:
        raise FileError(f"Expected inputs with a row per example to serve, but `{node.name}` of {path} is {node.type} "
                        f"{node.shape}. Keep what all rows share inside the host.")  # fmt: skip
    return Wanted(node.name, tuple(size if isinstance(size, int) else None for size in rest), KINDS[node.type])
