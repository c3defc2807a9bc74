"""A table format is one file: JSON lines, added from outside, is read and written by `offmap fit` and `offmap score`."""

from __future__ import annotations

import json
import sys
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

import numpy as np
import pytest
from safetensors.torch import save_file

from offmap import cli
from offmap.data.tables import table as tables
from offmap.data.tables.table import FORMATS, Columns, Table, Write, rows_per_block
from trained import regression, regressor

# ---------------------------------------------------------------------------------------------------- the one file


class JsonLinesTable(Table):
    kind, writable = "a table as JSON lines", True

    def open(self, separator: str | None, stack: ExitStack) -> list[str]:
        self.file = stack.enter_context(self.path.open(encoding="utf-8"))
        names = list(json.loads(self.file.readline() or "{}"))
        self.file.seek(0)
        return names

    def chunks(self, columns: Sequence[str]) -> Iterator[dict[str, list[Any]]]:
        while lines := list(islice(self.file, rows_per_block(len(self.names)))):
            rows = [json.loads(line) for line in lines]
            yield {name: [row[name] for row in rows] for name in columns}

    @staticmethod
    @contextmanager
    def write(file: BinaryIO, path: Path) -> Generator[Write]:
        def append(columns: Columns) -> None:
            for values in zip(*(column.tolist() for column in columns.values()), strict=True):
                file.write(json.dumps(dict(zip(columns, values, strict=True))).encode() + b"\n")

        yield append


def register() -> None:
    FORMATS[".jsonl"] = JsonLinesTable


# ---------------------------------------------------------------------------------------------------- its use


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package that declares the format as an entry point, a model, and a table."""
    monkeypatch.setattr(
        tables, "entry_points", lambda group: [SimpleNamespace(load=register)] if group == "offmap.tables" else []
    )
    tables._load_formats.cache_clear()
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    save_file(regressor().state_dict(), tmp_path / "w.safetensors")
    (tmp_path / "extending_net.py").write_text("from trained import regressor\n")
    (x, y), names = regression(120, 0), ("a", "b", "c", "y")
    rows = np.column_stack([x.numpy(), y.numpy()])
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in rows.tolist()))
    yield tmp_path
    FORMATS.pop(".jsonl", None)
    tables._load_formats.cache_clear()


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> Any:
    monkeypatch.setattr(sys, "argv", ["offmap", *words])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return ended.value.code


def test_format_from_outside_is_fitted_scored_and_written(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    net = ("--model", "extending_net:regressor")
    fit = ["fit", *net, "--weights", "w.safetensors", "--train", "t.jsonl", "--valid", "t.jsonl", "-o", "guard"]
    assert run(monkeypatch, *fit, "--set", "steps=10", "--set", "check_every=5") == 0
    assert run(monkeypatch, "score", "guard", "t.jsonl", *net, "-o", "scores.jsonl", "--keep", "y") == 0
    assert run(monkeypatch, "score", "guard", "t.jsonl", *net, "-o", "scores.npz") == 0
    scores = [json.loads(line) for line in (folder / "scores.jsonl").read_text().splitlines()]
    assert list(scores[0])[:4] == ["y", "score", "ood", "p_value"]
    with np.load(folder / "scores.npz") as expected:
        np.testing.assert_array_equal([row["score"] for row in scores], expected["score"].astype(float))


def test_format_from_outside_has_the_error_messages_of_all_formats(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    net = ("--model", "extending_net:regressor")
    for text, message in (
        ('{"a": 1, "b": null, "y": 0}\n', "row 1 has no value in column 'b'"),
        ('{"a": 1, "b": "red", "y": 0}\n', "Expected numbers in column 'b' of bad.jsonl, but row 1 has 'red'"),
        ('{"a": 1, "b": \n', "Expected a table as JSON lines at bad.jsonl, but it cannot be read"),
    ):
        (folder / "bad.jsonl").write_text(text)
        assert run(monkeypatch, "fit", *net, "--train", "bad.jsonl", "-o", "guard") == 1
        assert message in capsys.readouterr().err
