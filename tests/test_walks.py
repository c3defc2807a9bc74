"""How far a reader must go: the files, functions and levels that real calls enter."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import offmap

ROOT = str(Path(offmap.__file__).parent) + "/"
MOST = {"fit": (30, 14), "guard": (10, 10), "score": (25, 14)}
"""Files and levels of each walk, which may only become smaller."""

FIT = {"steps": 10, "check_every": 5, "progress": False}


@dataclass
class Walk:
    """The files of the library that a call entered, and how deep its functions were nested."""

    files: set[str] = field(default_factory=set)
    depth: int = 0

    def trace(self, call: Callable[[], Any]) -> Any:
        """Run `call` and note every function of the library that it enters; comprehensions and lambdas do not count."""
        stack: list[object] = []

        def watch(frame: FrameType, event: str, _: Any) -> None:
            code = frame.f_code
            if not code.co_filename.startswith(ROOT) or code.co_name.startswith("<"):
                return
            if event == "call":
                self.files.add(code.co_filename.removeprefix(ROOT))
                stack.append(code)
                self.depth = max(self.depth, len(stack))
            elif event == "return" and stack and stack[-1] is code:
                stack.pop()

        before = sys.getprofile()
        sys.setprofile(watch)
        try:
            return call()
        finally:
            sys.setprofile(before)


def check(walk: Walk, name: str) -> None:
    files, depth = MOST[name]
    assert len(walk.files) <= files, " ".join(sorted(walk.files))
    assert walk.depth <= depth


def data() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(200, 3, generator=torch.Generator().manual_seed(0))
    return x, torch.sin(x[:, 0])


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 2))


@pytest.mark.parametrize("kind", ["regression", "classification"])
def test_fit_enters_few_files_and_levels(kind: str) -> None:
    x, y = data()
    y = y if kind == "regression" else (y > 0).long()
    walk = Walk()
    walk.trace(lambda: offmap.fit(net(), (x[:150], y[:150]), (x[150:], y[150:]), **FIT))
    check(walk, "fit")


def test_guard_enters_few_files_and_levels() -> None:
    x, y = data()
    guard = offmap.fit(net(), (x[:150], y[:150]), (x[150:], y[150:]), **FIT)
    for rows in (x[:5], x[5:10]):  # the first call, and one after it
        walk = Walk()
        walk.trace(lambda rows=rows: guard(rows))
        check(walk, "guard")


@pytest.fixture
def logging_restored() -> Iterator[None]:
    """The command sets up the process's logging: give level, handlers and filters back."""
    loggers = [logging.getLogger(name) for name in (None, "offmap")]
    before = [(each.level, each.propagate, each.disabled, each.handlers[:], each.filters[:]) for each in loggers]
    yield
    for each, (level, propagate, disabled, handlers, filters) in zip(loggers, before, strict=True):
        each.setLevel(level)
        each.propagate, each.disabled, each.handlers[:], each.filters[:] = propagate, disabled, handlers, filters


@pytest.mark.usefixtures("logging_restored")
def test_score_of_a_csv_enters_few_files_and_reads_the_guard_file_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "walked_net.py").write_text(
        "import torch\nfrom torch import nn\n\ndef make():\n    torch.manual_seed(0)\n"
        "    return nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 2))\n",
        encoding="utf-8",
    )
    x, y = data()
    lines = [
        "a,b,c,y",
        *(",".join(f"{value:.6f}" for value in (*row, target)) for row, target in zip(x.tolist(), y.tolist(), strict=True)),
    ]
    (tmp_path / "data.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    run = import_module("offmap.cli.app").create_app()
    made = ["--model", "walked_net:make"]
    run(
        args=["fit", "--train", "data.csv", "--target", "y", "--out", "g.safetensors", "--set", "steps=5", *made],
        standalone_mode=False,
    )
    opened: list[str] = []
    OPENED.append(opened)
    walk = Walk()
    walk.trace(lambda: run(args=["score", "g.safetensors", "data.csv", "--out", "scores.csv", *made], standalone_mode=False))
    OPENED.clear()
    assert (tmp_path / "scores.csv").exists()
    check(walk, "score")
    assert sum(name.endswith("g.safetensors") for name in opened) == 1


OPENED: list[list[str]] = []
"""Where opened files are noted while a walk asks for it: an audit hook cannot be taken back."""


def _note(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and OPENED and isinstance(arguments[0], str | Path):
        OPENED[-1].append(str(arguments[0]))


sys.addaudithook(_note)
