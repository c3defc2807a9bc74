"""Records: whole or absent, exact to six digits, and never dropped in silence."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from offmap.errors import FileError
from offmap.io.atomic import write_whole
from offmap_bench.runner.plan import Cell
from offmap_bench.runner.store import Record, read, read_all, settings_of, write

CELL = Cell("regression", "nearest", "Nearest row", {"k": 1}, 0)


def record(**changes: Any) -> Record:
    made = Record(CELL.told(), "ok", settings_of(CELL), {"outside": {"auroc": 0.5}}, seconds={"fit": 1.0, "score": 2.0})
    return replace(made, **changes)


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = write(tmp_path, record())
    assert path.name == f"{CELL.hash}.json"
    assert read(path) == record()
    assert read_all(tmp_path).state(CELL) == "ok"
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_numbers_have_six_digits_and_those_that_do_not_exist_are_null(tmp_path: Path) -> None:
    metrics = {"test": {"nll": -1.23456789, "rows": 1234567, "width": math.inf, "ece": math.nan, "small": 1.23456789e-7}}
    text = write(tmp_path, record(metrics=metrics)).read_text(encoding="utf-8")
    assert json.loads(text)["metrics"]["test"] == {
        "nll": -1.23457, "rows": 1234567, "width": None, "ece": None, "small": 1.23457e-7,
    }  # fmt: skip


def test_the_keys_of_the_contract_are_there(tmp_path: Path) -> None:
    told = json.loads(write(tmp_path, record()).read_text(encoding="utf-8"))
    contract = {"schema", "cell", "status", "metrics", "chosen", "seconds", "steps", "versions", "threads", "traceback"}
    assert contract <= told.keys()
    assert (told["schema"], told["traceback"]) == (1, None)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda text: text[: len(text) // 2], "cannot be read"),
        (lambda text: "", "cannot be read"),
        (lambda text: "[1]", "cannot be read"),
        (lambda text: text.replace('"steps"', '"stops"'), "cannot be read"),
        (lambda text: text.replace('"schema": 1', '"schema": 9'), "Expected a record of schema 1 at .*, but it has 9"),
        (lambda text: text.replace('"ok"', '"fine"'), "a status of \\['ok', 'failed'\\]"),
        (lambda text: text.replace('"seed": 0', '"seed": 7'), f"Expected the record of cell {CELL.hash} at .*, but it is of"),
        (lambda text: text.replace("0.5", "0.7"), "as it was written, but it is damaged: its checksum does not fit"),
    ],
)
def test_a_damaged_record_is_reported_by_name(damage: Any, message: str, tmp_path: Path) -> None:
    path = write(tmp_path, record())
    path.write_text(damage(path.read_text(encoding="utf-8")), encoding="utf-8")
    found = read_all(tmp_path)
    assert found.records == {}
    assert list(found.damaged) == [path.name]
    assert found.state(CELL) == "damaged"
    with pytest.raises(FileError, match=message):
        read(path)


def test_a_record_from_before_there_were_checksums_is_read(tmp_path: Path) -> None:
    path = write(tmp_path, record())
    told = json.loads(path.read_text(encoding="utf-8"))
    del told["checksum"]
    path.write_text(json.dumps(told), encoding="utf-8")
    assert read(path) == record()


def test_states_of_a_cell(tmp_path: Path) -> None:
    assert read_all(tmp_path / "nowhere").state(CELL) == "missing"
    write(tmp_path, record(status="failed", traceback="..."))
    assert read_all(tmp_path).state(CELL) == "failed"
    write(tmp_path, record(settings={"config": {"k": 2}}))
    assert read_all(tmp_path).state(CELL) == "stale"


def test_defaults_are_filled_in_so_that_a_change_is_noticed() -> None:
    cell = Cell(
        "regression", "maxwent", "x", {"config": "reference"}, 0, source={"method": "deep_ensemble", "config": {"lr": 0.1}}
    )
    filled = settings_of(cell)
    assert filled["config"]["steps"] == 50_000
    assert filled["config"]["noise"] == "Uniform(half_width=1.0)"
    assert filled["from"]["training"]["lr"] == 0.1
    assert filled["from"]["training"]["steps"] == 10_000


def test_a_file_that_fails_to_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_whole(path, b"old")
    with pytest.raises(TypeError):
        write_whole(path, "not bytes")  # type: ignore[arg-type]
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]
