"""Files of a user: formats that give the same table, and files that give none."""

from __future__ import annotations

import gzip
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from offmap.errors import ConfigError, DataError
from offmap_bench.tasks import tabular
from tables import cars, edit


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_csv_comes_with_commas_semicolons_or_tabs_packed_or_not(delimiter: str, tmp_path: Path) -> None:
    text = cars(tmp_path / "cars.csv").read_text()
    (tmp_path / "other.csv").write_bytes(b"\xef\xbb\xbf" + text.replace(",", delimiter).replace("\n", "\r\n").encode())
    (tmp_path / "packed.csv.gz").write_bytes(gzip.compress(text.encode()))
    tasks = [tabular.task(tmp_path / name, "price") for name in ("cars.csv", "other.csv", "packed.csv.gz")]
    assert torch.equal(tasks[0].train[0], tasks[1].train[0])
    assert torch.equal(tasks[0].train[0], tasks[2].train[0])


def test_columns_of_one_name_are_refused_in_parquet_too(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.table([[1.0, 2.0], [3.0, 4.0]], names=["x", "x"]), tmp_path / "t.parquet")
    with pytest.raises(DataError, match=r"distinct columns in .*, but got \['x'\]"):
        tabular.task(tmp_path / "t.parquet", "x")


def test_npz_arrays_are_columns(tmp_path: Path) -> None:
    rng = np.random.RandomState(0)
    x, y, site = rng.randn(50, 3), rng.randn(50), np.array(["a", "b"] * 25)
    np.savez(tmp_path / "t.npz", x=x, y=y, site=site, index=np.arange(50), wet=rng.rand(50) > 0.5)
    task = tabular.task(tmp_path / "t.npz", "y", held={"site": ["b"]}, drop=["index"])
    assert task.inputs == 3 + 2
    assert len(task.ood["site b"]) == 25
    without = tabular.task(tmp_path / "t.npz", "y", drop=["x", "site", "wet"])
    assert without.inputs == 1


def test_parquet_gives_what_csv_gives(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow", reason="needs pyarrow")
    from pyarrow import parquet

    path = edit(edit(cars(tmp_path / "cars.csv"), 3, 0, ""), 5, 2, "")
    columns = tabular.read(path)
    values = {n: c if isinstance(c, list) else [None if np.isnan(v) else v for v in c] for n, c in columns.items()}
    parquet.write_table(arrow.table(values), tmp_path / "cars.parquet")
    tasks = [tabular.task(tmp_path / name, "price", missing="impute") for name in ("cars.csv", "cars.parquet")]
    assert torch.equal(tasks[0].train[0], tasks[1].train[0])
    assert torch.equal(tasks[0].ood["extrapolation"], tasks[1].ood["extrapolation"])
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 and nothing else")
    with pytest.raises(DataError, match="bad.parquet, but it cannot be read"):
        tabular.task(tmp_path / "bad.parquet", "y")


def test_without_pyarrow_one_line_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    (tmp_path / "t.parquet").write_bytes(b"PAR1")
    with pytest.raises(ConfigError, match="^pyarrow is needed here and is not installed: pip install 'offmap\\[parquet\\]'$"):
        tabular.task(tmp_path / "t.parquet", "y")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "Expected a header row in .*t.csv, but the file is empty"),
        ("x,y\n", "Expected rows in .*t.csv, but there are none"),
        ("x,y\n1,2\n3\n", "Expected 2 values in each row of .*t.csv, but row 2 has 1"),
        ("x,x,y\n1,2,3\n", r"distinct columns in .*, but got \['x'\]"),
        ("x,,y\n1,2,3\n", "a name for each column in .*, but column 2 has none"),
        ('x,y\n"1,2\n', "cannot be read: unexpected end of data"),
        ("x,y\n" + "1,2\n" * 5, "Expected 20 in-distribution rows or more in .*t.csv, but got [23]"),
        ("x,y\n" + "1.5,2.5\n" * 30 + "1x,2\n", "numbers in column 'x' of .*t.csv, but row 31 has '1x' .1 such values."),
        ("x,y\n" + "inf,2\n" * 60, "numbers in column 'x' of .*t.csv, but some are infinite or beyond 1e\\+30"),
        ("x,y\n" + "1,inf\n2,3.5\n" * 60, "numbers in the target 'y', but some are infinite or beyond 1e\\+30"),
        ("x,y\n" + "1,a\n" * 60, "two classes or more.*but got 1 in 30 rows"),
        ("x,y\n" + "".join(f"name {i},{i}.5\n" for i in range(200)), "at most 100 different words in column 'x', but got 200"),
        ("y\n" + "1\n" * 60, "Expected several columns in .*t.csv, but got one, 'y'"),
    ],
    ids=str,
)  # fmt: skip
def test_a_table_that_cannot_be_used_is_named(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(DataError, match=message):
        tabular.task(tmp_path / "t.csv", "y")


def test_files_that_are_no_tables_are_named(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_bytes("x,y\nü,1\n".encode("latin-1"))
    with pytest.raises(DataError, match="CSV in UTF-8 at .*t.csv, but it cannot be read"):
        tabular.task(tmp_path / "t.csv", "y")
    (tmp_path / "t.csv.gz").write_bytes(gzip.compress(b"x,y\n1,2\n")[:-9])
    with pytest.raises(DataError, match="t.csv.gz, but it cannot be read"):
        tabular.task(tmp_path / "t.csv.gz", "y")
    np.savez(tmp_path / "code.npz", x=np.array([{}], dtype=object))
    with pytest.raises(
        DataError, match="Expected arrays of numbers or words, .*code.npz, but 'x' has shape .1,. and type object"
    ):
        tabular.task(tmp_path / "code.npz", "y")
    with zipfile.ZipFile(tmp_path / "odd.npz", "w") as archive:
        archive.writestr("x", "no array")
    with pytest.raises(
        DataError, match=r"arrays of numbers or words at .*odd.npz, but it cannot be read: the magic string is not correct"
    ):
        tabular.task(tmp_path / "odd.npz", "y")
    np.savez(tmp_path / "deep.npz", x=np.zeros((2, 2, 2)), y=np.zeros(2))
    with pytest.raises(DataError, match=r"Expected numbers or words in column 'x' of .*deep.npz, but got list"):
        tabular.task(tmp_path / "deep.npz", "y")
    np.savez(tmp_path / "time.npz", x=np.zeros(2, "datetime64[s]"), y=np.zeros(2))
    with pytest.raises(DataError, match="'x' has shape .2,. and type datetime64"):
        tabular.task(tmp_path / "time.npz", "y")
    np.savez(tmp_path / "odd.npz", x=np.zeros(3), y=np.zeros(2))
    with pytest.raises(DataError, match="arrays of one length in .*odd.npz, but got {'x': 3, 'y': 2}"):
        tabular.task(tmp_path / "odd.npz", "y")
