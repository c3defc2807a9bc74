"""Tables that claim too much, or grow when they are unpacked."""

from __future__ import annotations

import gzip
import io
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offmap.cli.options import read_weights
from offmap.data.tables import csv as text
from offmap.data.tables import npz as npz_format
from offmap.data.tables.table import open_table
from offmap.errors import ConfigError, DataError, FileError
from offmap_bench.tasks import tabular
from offmap_bench.tasks.tabular import read
from offmap_bench.tasks.uci import read as read_uci

MEGABYTE = 1 << 20


def npy(shape: tuple[int, ...], descr: str = "<f8", data: bytes = b"", told: bytes | None = None) -> bytes:
    told = told or repr({"descr": descr, "fortran_order": False, "shape": shape}).encode().ljust(117) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(told)) + told + data


def npz(path: Path, **members: bytes) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(f"{name}.npy", data)
    return path


def stream(path: Path) -> list[Any]:
    with open_table(path) as table:
        return list(table.blocks(table.names[:-1], table.names[-1:]))


def test_an_archive_of_zeros_is_refused_before_it_is_unpacked(tmp_path: Path) -> None:
    path = npz(tmp_path / "t.npz", x=npy((70 * MEGABYTE,), "|u1", bytes(70 * MEGABYTE)))
    assert path.stat().st_size < MEGABYTE
    with pytest.raises(DataError, match=f"Expected at most {64 * MEGABYTE} bytes in .*t.npz when unpacked, but there are more"):
        read(path)


def test_a_large_archive_may_grow_by_its_ratio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tabular, "MAX_UNPACKED", {"text": 100, "arrays": 100})
    noise = np.random.RandomState(0).rand(500)
    np.savez_compressed(tmp_path / "t.npz", x=noise, y=noise)
    assert np.array_equal(read(tmp_path / "t.npz")["x"], noise)


@pytest.mark.parametrize("reader", [read, lambda path: read_uci("small", path.parent)])
def test_text_that_grows_is_cut_off(tmp_path: Path, reader: Callable[[Path], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tabular, "MAX_UNPACKED", {"text": 10_000, "arrays": 100})
    path = tmp_path / "small.csv.gz"
    path.write_bytes(gzip.compress(b"a,b\n" + b"1,2\n" * 100_000))
    with pytest.raises(DataError, match="bytes in .*small.csv.gz when unpacked, but there are more. Pack it less tightly"):
        reader(path)


def test_lines_without_end_are_refused_where_tables_are_streamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "MAX_LINE_LETTERS", 20_000)
    for place, start in enumerate((b"", b"a,b\n1,2\n")):
        path = tmp_path / f"{place}.csv.gz"
        path.write_bytes(gzip.compress(start + b"1," * 100_000))
        with pytest.raises(DataError, match="but it cannot be read: a line has more than 20000 characters"):
            stream(path)


def test_blocks_of_long_rows_have_fewer_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "t.csv"
    path.write_text("a,b\n" + "".join(f"{i},{'w' * 900}\n" for i in range(200)), encoding="utf-8")
    assert [len(block.x) for block in stream(path)] == [200]
    monkeypatch.setattr(text, "MAX_BLOCK_LETTERS", 20_000)
    blocks = stream(path)
    assert len(blocks) > 3
    assert np.concatenate([block.x for block in blocks])[:, 0].tolist() == list(range(200))


CLAIMS: dict[str, tuple[bytes, str]] = {
    "more than there is": (npy((10**12,)), "does not have the values it declares"),
    "columns without end": (npy((0, 10**12)), f"at most {1 << 20} columns"),
    "a negative length": (npy((-1,)), "has shape"),
    "a header that does not close": (npy((), told=b"{'descr': (" + b"\n"), "cannot be read"),
    "a header of brackets": (npy((), told=b"(" * 5000 + b"\n"), "cannot be read"),
}


@pytest.mark.parametrize("case", CLAIMS)
def test_arrays_that_claim_what_they_are_not_are_refused(case: str, tmp_path: Path) -> None:
    data, said = CLAIMS[case]
    path = npz(tmp_path / "t.npz", x=data)
    with pytest.raises(DataError):
        read(path)
    with pytest.raises(DataError, match=said):
        stream(path)


def test_an_archive_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="Expected arrays of numbers or words in .*t.npz, but there are none"):
        stream(npz(tmp_path / "t.npz"))


def test_too_many_columns_or_words_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(npz_format, "MAX_COLUMNS", 10)
    monkeypatch.setattr(tabular, "MAX_WORDS", 10)
    np.savez(tmp_path / "t.npz", x=np.zeros((2, 11)))
    with pytest.raises(DataError, match="Expected rows of at most 10 columns and .* bytes in .*t.npz, not 'x'"):
        read(tmp_path / "t.npz")
    np.savez_compressed(tmp_path / "t.npz", x=np.zeros(100_000, dtype=bool))
    with pytest.raises(DataError, match="Expected at most 10 words or truth values in .*t.npz, but 'x' has more"):
        read(tmp_path / "t.npz")


def test_a_table_of_one_repeated_number_is_refused_by_its_rows(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    path = tmp_path / "t.parquet"
    parquet.write_table(pyarrow.table({"x": np.zeros(9 * MEGABYTE)}), path)
    assert path.stat().st_size < MEGABYTE
    with pytest.raises(DataError, match="bytes in .*t.parquet when unpacked, but there are more"):
        read(path)


def test_words_that_are_no_text_are_refused(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    path = tmp_path / "t.parquet"
    words = pyarrow.array([b"ab", b"\x94c"], pyarrow.binary()).view(pyarrow.string())
    parquet.write_table(pyarrow.table({"x": [1.0, 2.0], "y": words}), path)
    for reader in (read, stream):
        with pytest.raises(DataError, match="Expected a table as Parquet at .*t.parquet, but it cannot be read: 'utf-8' codec"):
            reader(path)


@pytest.mark.parametrize("name", ["net.pt", "net.safetensors"])
@pytest.mark.parametrize("content", [b"", b"\x80\x02}q\x00(", b"\x80\x04\x95\xff", b"0" * 9, b"PK\x03\x04"])
def test_bytes_that_are_no_weights_are_refused(name: str, content: bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(
        FileError, match="Expected weights at .*, a state dict as .safetensors or .pt, but the file cannot be read"
    ):
        read_weights(tmp_path / name)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"target": 3}, "Expected `target` to name columns, but got 3"),
        ({"drop": "a"}, "Expected `drop` to name columns, but got 'a'"),
        ({"words": 3}, "Expected `words` to name columns"),
        ({"shares": 0.5}, "Expected `shares` to be two numbers between 0 and 1"),
        ({"shares": ("a", "b")}, "Expected `shares` to be two numbers between 0 and 1"),
        ({"ood": 3}, "Expected `ood` to be a path"),
        ({"held": ["a"]}, "and `held` values by column"),
        ({"kind": ["regression"]}, "Expected `kind` to be one of"),
        ({"missing": 0}, "Expected `missing` to be one of"),
    ],
)
def test_options_of_a_table_are_checked(options: dict[str, Any], said: str, tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("a,b\n" + "1,2\n" * 40, encoding="utf-8")
    with pytest.raises(ConfigError, match=said):
        tabular.task(path, **{"target": "b", **options})


def test_a_file_is_closed_when_it_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "t.npz").write_bytes(io.BytesIO(b"PK\x03\x04").getvalue())
    with pytest.raises(DataError):  # a file left open is a ResourceWarning, and so an error
        read(tmp_path / "t.npz")
