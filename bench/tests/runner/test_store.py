"""Records: whole or absent, exact to six digits, and never dropped in silence."""

from __future__ import annotations

import json
import math
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from offmap.atomic import write_whole
from offmap.errors import FileError
from offmap_bench.paths import RECORDS
from offmap_bench.runner.plan import Cell, cells, read_packaged, read_plan
from offmap_bench.runner.store import Record, parse_record, read_records, set_damaged_aside, settings_of, to_line, write_records

CELL = Cell("regression", "nearest", "Nearest row", {"k": 1}, 0)


def record(**changes: Any) -> Record:
    made = Record(CELL.as_dict(), "ok", settings_of(CELL), {"outside": {"auroc": 0.5}}, seconds={"fit": 1.0, "score": 2.0})
    return replace(made, **changes)


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "plan.jsonl"
    write_records(path, record())
    assert read_records(path).records == {CELL.hash: record()}
    assert read_records(path).state(CELL) == "ok"
    assert [p.name for p in tmp_path.iterdir() if p.suffix != ".lock"] == [path.name]


def test_write_records_replaces_in_place_and_appends_new_ones(tmp_path: Path) -> None:
    path = tmp_path / "plan.jsonl"
    others = [record(cell={**CELL.as_dict(), "seed": seed}) for seed in (1, 2)]
    write_records(path, record(), *others)
    write_records(path, replace(others[0], steps=7), record(cell={**CELL.as_dict(), "seed": 3}))
    assert [(r.cell["seed"], r.steps) for r in read_records(path).records.values()] == [(0, 0), (1, 7), (2, 0), (3, 0)]


def test_processes_that_write_at_once_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "plan.jsonl"
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        list(pool.map(write_records, [path] * 12, [record(cell={**CELL.as_dict(), "seed": seed}) for seed in range(12)]))
    found = read_records(path)
    assert (len(found.records), found.damaged) == (12, {})


def test_numbers_have_six_digits_and_those_that_do_not_exist_are_null() -> None:
    metrics = {"test": {"nll": -1.23456789, "rows": 1234567, "width": math.inf, "ece": math.nan, "small": 1.23456789e-7}}
    assert json.loads(to_line(record(metrics=metrics)))["metrics"]["test"] == {
        "nll": -1.23457, "rows": 1234567, "width": None, "ece": None, "small": 1.23457e-7,
    }  # fmt: skip


def test_the_keys_of_the_contract_are_there() -> None:
    content = json.loads(to_line(record()))
    contract = {"schema", "cell", "status", "metrics", "chosen", "seconds", "steps", "versions", "threads", "traceback"}
    assert contract <= content.keys()
    assert (content["schema"], content["traceback"], content["hash"]) == (2, None, CELL.hash)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda text: text[: len(text) // 2], "cannot be read"),
        (lambda text: text + text, "cannot be read"),
        (lambda text: text.replace('"steps"', '"stops"'), "cannot be read"),
        (lambda text: text.replace('"schema":2', '"schema":9'), "Expected a record of schema 2 at .*, but it has 9"),
        (lambda text: text.replace('"ok"', '"fine"'), "a status of \\['ok', 'failed'\\]"),
        (lambda text: text.replace('"seed":0', '"seed":7'), f"Expected the record of cell {CELL.hash} at .*, but it is of"),
        (lambda text: text.replace("0.5", "0.7"), "as it was written, but it is damaged: its checksum does not match"),
    ],
)
def test_a_damaged_record_is_reported_by_name(damage: Any, message: str, tmp_path: Path) -> None:
    path, line = tmp_path / "plan.jsonl", damage(to_line(record()).decode()).encode()
    path.write_bytes(line)
    found = read_records(path)
    assert (found.records, list(found.damaged), found.state(CELL)) == ({}, [CELL.hash], "damaged")
    with pytest.raises(FileError, match=message):
        parse_record(line, "here")


@pytest.mark.parametrize("line", [b"[1]", b"{}", b"\xff\x00", b"null"])
def test_a_line_without_a_hash_is_reported_by_its_number(line: bytes, tmp_path: Path) -> None:
    path = tmp_path / "plan.jsonl"
    path.write_bytes(to_line(record()) + b"\n" + line + b"\n")
    found = read_records(path)
    assert (found.state(CELL), list(found.damaged)) == ("ok", ["line 2"])
    assert "line 2, but it cannot be read" in found.damaged["line 2"]
    assert list(set_damaged_aside(path)) == ["line 2"]
    assert path.read_bytes() == to_line(record()) + b"\n"
    assert (tmp_path / "plan.jsonl.damaged").read_bytes() == line + b"\n"


def test_states_of_a_cell(tmp_path: Path) -> None:
    path = tmp_path / "plan.jsonl"
    assert read_records(path).state(CELL) == "missing"
    write_records(path, record(status="failed", traceback="..."))
    assert read_records(path).state(CELL) == "failed"
    write_records(path, record(settings={"config": {"k": 2}}))
    assert read_records(path).state(CELL) == "stale"


@pytest.mark.parametrize("name", [name for name in read_packaged() if (RECORDS / f"{name}.jsonl").exists()])
def test_the_records_of_the_repository_answer_for_their_plans(name: str) -> None:
    found, planned = read_records(RECORDS / f"{name}.jsonl"), cells(read_plan(name))
    assert found.damaged == {}
    assert found.records.keys() <= {cell.hash for cell in planned}
    assert [cell.label for cell in planned if found.state(cell) not in ("ok", "missing")] == []


def test_defaults_are_filled_in_so_that_a_change_is_noticed() -> None:
    cell = Cell(
        "regression", "maxwent", "x", {"config": "reference"}, 0, source={"method": "deep_ensemble", "config": {"lr": 0.1}}
    )
    filled = settings_of(cell)
    assert filled["config"]["steps"] == 50_000
    assert filled["config"]["noise"] == "Uniform(half_width=1.0)"
    assert filled["from"]["lr"] == 0.1
    assert filled["from"]["steps"] == 10_000


def test_a_file_that_fails_to_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_whole(path, b"old")
    with pytest.raises(TypeError):
        write_whole(path, "not bytes")  # type: ignore[arg-type]
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]
