"""Guards of the command: their file is read once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from offmap.cli.options import load_guard
from offmap.data.tables.schema import Schema
from offmap.io.guard_file import GuardFile
from trained import quick, regression, regressor


def test_load_guard_reads_the_file_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "once_model.py").write_text("from trained import regressor\n")
    monkeypatch.syspath_prepend(tmp_path)
    save_file(regressor().state_dict(), tmp_path / "w.safetensors")
    guard = quick(regressor(), regression(100, 0), regression(60, 1), score="paper")
    about = {"model": "once_model:regressor", "weights": ["w.safetensors"], "inputs": ["a", "b", "c"], "targets": ["y"]}
    replace(guard, about=about).save(tmp_path / "guard")
    reads: list[Any] = []
    monkeypatch.setattr(GuardFile, "read", lambda path, read=GuardFile.read: reads.append(path) or read(path))
    loaded, schema = load_guard(tmp_path / "guard", None, (), trust_model=True)
    assert reads == [tmp_path / "guard"]
    assert schema == Schema(("a", "b", "c"), ("y",))
    x = regression(20, 2)[0]
    assert torch.equal(loaded.score(x), guard.score(x))
