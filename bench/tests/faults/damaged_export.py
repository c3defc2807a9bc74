"""An exported guard that was cut or changed is refused by the server, by its name."""

from __future__ import annotations

import random
import re
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from checks.trust import Check
from faults.damage import damage
from offmap.errors import FileError
from trained import inputs, quick, regression, regressor


@cache
def _export() -> bytes:
    from offmap.serve.model import Model

    guard = quick(regressor(), regression(60), regression(30, seed=1))
    with TemporaryDirectory() as folder:
        path = Path(folder) / "guard.onnx"
        guard.export(path, inputs(4))
        assert Model.load(path).threshold == guard.threshold
        return path.read_bytes()


def trial(seed: int, folder: Path) -> str:
    model = pytest.importorskip("offmap.serve.model", reason="needs onnxruntime").Model
    what, content = damage(_export(), seed, random.Random(seed))
    path = folder / "guard.onnx"
    path.write_bytes(content)
    with pytest.raises(FileError, match=re.escape(str(path))):
        model.load(path)
    return f"{what}, refused"


CHECK = Check(
    "An exported guard that was cut or changed is refused, and the error names it.", trial, trials=1_000, quick=0
)  # an export takes long; a test of the server has one
