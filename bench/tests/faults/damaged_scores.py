"""Scores of a folder, or notes about them, that were cut or changed are named and made again; the others are kept."""

from __future__ import annotations

import json
import random
import shutil
from functools import cache
from pathlib import Path

import numpy as np
import pytest

import offmap
from checks.trust import Check
from faults.damage import damage
from faults.places import shared_folder
from offmap.cli.folder import NOTES, ScoreResult, ScoreSpec, list_shards, score_folder
from offmap.cli.score import score_table
from offmap.data.tables.schema import Schema
from offmap.data.tables.table import open_table
from offmap.distributed.jobs import Pool
from offmap_bench.runner.run import captured_warnings
from trained import inputs, quick, regression, regressor

FILES = ("a.csv", "b.npz", "c.parquet")
COLUMNS = ("score", "p_value", "mean", "std")


def fill(folder: Path, files: tuple[str, ...] = FILES, rows: int = 30) -> Path:
    """A table of each kind, with the columns a, b and c."""
    folder.mkdir()
    for seed, file in enumerate(files):
        columns = dict(zip("abc", inputs(rows, seed).numpy().T, strict=True))
        if file.endswith(".npz"):
            np.savez(folder / file, **columns)
        elif file.endswith(".parquet"):
            arrow = pytest.importorskip("pyarrow", reason="needs pyarrow: pip install 'offmap[parquet]'")
            pytest.importorskip("pyarrow.parquet").write_table(arrow.table(columns), folder / file)
        else:
            np.savetxt(folder / file, np.stack(list(columns.values()), 1), delimiter=",", header="a,b,c", comments="")
    return folder


def read(path: Path) -> np.ndarray:
    """All numbers of a table of scores; an NPZ has the time in it, so that bytes need not be equal."""
    with open_table(path) as file:
        return np.concatenate([block.x for block in file.blocks(COLUMNS)])


@cache
def _guard() -> offmap.Guard:
    return quick(regressor(), regression(60), regression(30, seed=1))


@cache
def _finish() -> Path:
    shared = shared_folder()
    fill(shared / "data")
    assert [each.rows for each in run_score(shared / "data", shared / "out")] == [30, 30, 30]
    return shared


def run_score(data: Path, out: Path) -> list[ScoreResult]:
    spec = ScoreSpec(data, out, "a guard", Schema(("a", "b", "c")))
    return score_folder(_guard(), spec, list_shards(data)[0], score_table, pool=Pool(), resume=True, report=lambda n, text: None)


def trial(seed: int, folder: Path) -> str:
    rng, shared, out = random.Random(seed), _finish(), folder / "out"
    shutil.copytree(shared / "out", out)
    file, note = rng.choice(FILES), rng.random() < 0.5
    path = out / NOTES / f"{file}.json" if note else out / file
    before = {name: (out / name).stat().st_mtime_ns for name in FILES}
    what, content = damage(path.read_bytes(), seed, rng)
    path.write_bytes(content)
    with captured_warnings() as said:
        done = run_score(shared / "data", out)
    assert [(each.rows, each.off_map) for each in done] == [(each.rows, each.off_map) for each in run_score(shared / "data", out)]
    for name in FILES:
        np.testing.assert_array_equal(read(out / name), read(shared / "out" / name))
    kind = "note" if note else "scores"
    if not said:
        assert note
        assert json.loads(content) == json.loads((shared / "out" / NOTES / f"{file}.json").read_bytes())
        return f"{kind} {what}, nothing that counts"
    (sentence,) = said
    assert str(path) in sentence
    assert [each.reused for each in done] == [name != file for name in FILES]
    assert {name for name in FILES if (out / name).stat().st_mtime_ns != before[name]} == {file}
    return f"{kind} {what}, named and made again"


CHECK = Check("Scores and notes that were cut or changed are named, and only they are made again.", trial, limit=60.0, quick=8)
