"""Tables block by block: what all formats give is the same, and what is wrong with a file is one sentence."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest

from offmap.data.tables import csv as csv_format
from offmap.data.tables import schema as schemas
from offmap.data.tables import table as tables
from offmap.data.tables.schema import Schema
from offmap.data.tables.table import open_table, write_table
from offmap.errors import ConfigError, DataError, FileError

arrow = pytest.importorskip("pyarrow", reason="needs pyarrow: pip install 'offmap[parquet]'")
parquet = pytest.importorskip("pyarrow.parquet")

ROWS = 103
RNG = np.random.RandomState(0)
COLUMNS = {
    "a": RNG.randn(ROWS),
    "b": RNG.randint(-5, 5, ROWS),
    "c": RNG.rand(ROWS) > 0.5,
    "name": np.array([f"row {i}" for i in range(ROWS)]),
}
EXPECTED = np.stack([COLUMNS[name].astype(float) for name in "cab"], 1)
"""In another order than in the files."""


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch):
    monkeypatch.setattr(tables, "BLOCK_ROWS", 10)


def write_csv(path: Path, separator: str = ",", end: str = "\n", packed: bool = False) -> Path:
    lines = [separator.join(COLUMNS), *(separator.join(map(str, row)) for row in zip(*COLUMNS.values(), strict=True))]
    text = "".join(line + end for line in lines).replace("True", "1").replace("False", "0")
    path.write_bytes(gzip.compress(text.encode()) if packed else text.encode())
    return path


def write_parquet(path: Path, group: int = 40) -> Path:
    parquet.write_table(arrow.table(COLUMNS), path, row_group_size=group)
    return path


def write_npz(path: Path, packed: bool = False) -> Path:
    (np.savez_compressed if packed else np.savez)(path, **COLUMNS)
    return path


FILES = {
    "t.csv": write_csv,
    "semicolons.csv": lambda path: write_csv(path, ";"),
    "tabs.csv": lambda path: write_csv(path, "\t"),
    "bars.csv": lambda path: write_csv(path, "|", "\r\n"),
    "t.csv.gz": lambda path: write_csv(path, packed=True),
    "t.parquet": write_parquet,
    "t.npz": write_npz,
    "packed.npz": lambda path: write_npz(path, packed=True),
}


@pytest.mark.parametrize("name", FILES)
def test_all_formats_give_the_same_rows_in_blocks(name, tmp_path):
    with open_table(FILES[name](tmp_path / name)) as table:
        assert table.names == list(COLUMNS)
        blocks = list(table.blocks(["c", "a", "b"], ["name"]))
        assert table.rows(ROWS) == ROWS
    assert max(len(each.x) for each in blocks) == 10
    np.testing.assert_array_equal(np.concatenate([each.x for each in blocks]), EXPECTED)
    assert [word for each in blocks for word in each.raw["name"]] == COLUMNS["name"].tolist()


def test_the_length_of_a_csv_is_guessed_from_the_bytes_read(tmp_path):
    path = tmp_path / "long.csv"
    path.write_text("x,y\n" + "1.25,2.25\n" * 100_000)
    with open_table(path) as table:
        assert table.rows(0) is None
        blocks = table.blocks(["x"])
        done = sum(len(next(blocks).x) for _ in range(5000))
        assert table.rows(done) == pytest.approx(100_000, rel=0.05)


@pytest.mark.parametrize("order", ["C", "F"])
def test_arrays_of_an_npz_are_columns_in_either_order(order, tmp_path):
    x = np.asarray(RNG.randn(ROWS, 4).astype(np.float32), order=order)
    np.savez_compressed(tmp_path / "t.npz", x=x, y=np.arange(ROWS))
    with open_table(tmp_path / "t.npz") as table:
        assert table.names == ["x[0]", "x[1]", "x[2]", "x[3]", "y"]
        blocks = list(table.blocks(["x[2]", "y", "x[0]"], ["x[1]"]))
    np.testing.assert_array_equal(np.concatenate([each.x for each in blocks]), np.stack([x[:, 2], np.arange(ROWS), x[:, 0]], 1))
    assert [value for each in blocks for value in each.raw["x[1]"]] == x[:, 1].tolist()


def test_one_array_with_more_axes_stays_as_it_is(tmp_path):
    images = RNG.rand(25, 3, 4, 4)
    np.savez(tmp_path / "t.npz", x=images, y=np.zeros(25))
    with open_table(tmp_path / "t.npz") as table:
        assert table.names == ["x", "y"]
        np.testing.assert_array_equal(np.concatenate([each.x for each in table.blocks(["x"])]), images.astype(np.float32))
        with pytest.raises(DataError, match=r"one array of numbers with more than two axes.*but got \['x', 'y'\]"):
            next(table.blocks(["x", "y"]))


def whole(path: Path, names: list[str]) -> None:
    with open_table(path) as table:
        for _ in table.blocks(names):
            pass


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "Expected a header row in .*t.csv, but the file is empty"),
        ("a b\n1 2\n", "Expected several columns in .*t.csv, but got one, 'a b'. Pass the separator .any, if the table has"),
        ("a,a\n1,2\n", r"Expected distinct columns in .*t.csv, but got \['a'\]. Is there a header"),
        (",a,b\n0,1,2\n", "a name for each column in .*t.csv, but column 1 has none. If it is the index of a data frame, write"),
        ("a,b,\n1,2,\n", "but column 3 has none"),
        ("\n\r\n", "but the file is empty"),
        ("a,b\n" + "1,2\n" * 14 + "1;2\n", "Expected 2 values in each row of .*t.csv, but row 15 has 1. Is the file cut, or"),
        ("a,b\n" + "1,2\n" * 14 + "1", "Expected 2 values in each row of .*t.csv, but row 15 has 1. Is the file cut"),
        ("a;b\n1,5;2,5\n", "Expected numbers in column 'a' of .*t.csv, but row 1 has '1,5'. Write words as numbers, decimals"),
        ("a,b\n" + "1,2\n" * 14 + "1,red\n", "Expected numbers in column 'b' of .*t.csv, but row 15 has 'red'"),
        ("a,b\n" + "1,2\n" * 14 + ",3\n", "a finite number in each row of .*t.csv, but row 15 has no value in column 'a'. Fill"),
        ("a,b\n1,N/A\n", "row 1 has no value in column 'b'"),
        ("a,b\n1,nan\n", "row 1 has no value in column 'b'"),
        ("a,b\n1,inf\n", "row 1 has an infinite or too large one in column 'b'"),
        ("a,b\n1,-1e39\n", "row 1 has an infinite or too large one in column 'b'"),
        ('a,b\n"1,2\n', "a table as CSV in UTF-8 at .*t.csv, but it cannot be read: unexpected end of data. Is the file cut"),
        (b"a,b\n\xff\xfe,2\n", "a table as CSV in UTF-8 at .*t.csv, but it cannot be read: 'utf-8' codec"),
        (b"a,b\n1,\x002\n", "column 'b' of .*t.csv, but row 1 has "),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:.*line break")
def test_what_is_wrong_with_a_csv_is_named(text, message, tmp_path):
    path = tmp_path / "t.csv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(DataError, match=message):
        whole(path, ["a", "b"])


def test_blank_lines_before_the_header_are_skipped_and_one_column_needs_a_separator(tmp_path):
    (tmp_path / "t.csv").write_text("\n\r\na\n1\n2\n")
    with open_table(tmp_path / "t.csv", ",") as table:
        assert table.names == ["a"]
        assert next(table.blocks(["a"])).x.tolist() == [[1], [2]]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ('"temp\n(C)",b\n1,2\n', ["temp\n(C)", "b"]),
        ('"a;,,,\r\n""x""";b\r\n1;2\r\n', ['a;,,,\r\n"x"', "b"]),
        ('5" pipe,b\n1,2\n', ['5" pipe', "b"]),
        ('"a,",b\n1,2\n', ["a,", "b"]),
    ],
    ids=["comma", "semicolons outside quotes", "a quote within a name", "a separator within quotes"],
)
def test_quoted_names_may_hold_line_breaks_and_separators(text, names, tmp_path):
    path = tmp_path / "t.csv"
    path.write_text(text, newline="")
    with open_table(path) as table:
        assert table.names == names
        assert next(table.blocks(names)).x.tolist() == [[1, 2]]


def test_wide_tables_are_read_in_time_that_grows_with_their_width(tmp_path, monkeypatch):
    """Comparisons of names are counted: a list of names that is searched for each of them makes 25 million here."""

    class Name(str):
        compared = 0
        __hash__ = str.__hash__

        def __eq__(self, other):
            Name.compared += 1
            return str.__eq__(self, other)

        def strip(self):
            return self

    width, path = 5_000, tmp_path / "t.csv"
    path.write_text(",".join(f"c{i}" for i in range(width)) + "\n" + ",".join(map(str, range(width))) + "\n")
    reader = csv_format.csv.reader
    monkeypatch.setattr(
        csv_format.csv, "reader", lambda *args, **kwargs: ([Name(w) for w in row] for row in reader(*args, **kwargs))
    )
    with open_table(path) as table:
        inputs, unused = Schema.choose(table, [], []).find_inputs(table)
        (block,) = table.blocks(inputs, table.names[-1:])
    assert (len(inputs), unused) == (width - 1, [])
    np.testing.assert_array_equal(block.x, [np.arange(width - 1)])
    assert Name.compared < 20 * width


def test_more_columns_than_any_model_takes_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "MAX_COLUMNS", 20)
    monkeypatch.setattr(csv_format.csv, "reader", lambda *args, **kwargs: pytest.fail("names are made before they are counted"))
    (tmp_path / "t.csv").write_text(",".join(f"c{i}" for i in range(21)) + "\n")
    arrow_table = arrow.table({f"c{i}": [1.0] for i in range(21)})
    parquet.write_table(arrow_table, tmp_path / "t.parquet")
    np.savez(tmp_path / "t.npz", a=np.zeros((2, 11)), b=np.zeros((2, 10)))
    for suffix in ("csv", "parquet", "npz"):
        with pytest.raises(DataError, match=rf"Expected at most 20 columns in .*t.{suffix}, but there are 21"):
            whole(tmp_path / f"t.{suffix}", ["c0"])


@pytest.mark.parametrize("suffix", ["csv.gz", "npz", "parquet"])
def test_tables_that_unpack_to_much_are_streamed_but_not_held(suffix, tmp_path, monkeypatch):
    path, zeros = tmp_path / f"t.{suffix}", np.zeros(20_000)
    if suffix == "csv.gz":
        path.write_bytes(gzip.compress(b"a,b\n" + b"0,0\n" * len(zeros)))
    elif suffix == "npz":
        np.savez_compressed(path, a=zeros, b=zeros)
    else:
        parquet.write_table(arrow.table({"a": zeros, "b": zeros}), path)
    assert path.stat().st_size < 5000
    whole(path, ["a", "b"])
    schema = Schema(("a",), ("b",))
    assert len(schema.read(path, None)[0]) == len(zeros)
    monkeypatch.setattr(schemas, "MAX_UNPACKED", 1 << 20)
    with pytest.raises(DataError, match=r"unpacks to more than .* bytes. Save it uncompressed"):
        schema.read(path, None)


def test_csv_without_a_last_line_break_logs_a_warning(tmp_path, caplog):
    path = tmp_path / "t.csv"
    path.write_text("a,b\n1,2\n3,4")
    whole(path, ["a", "b"])
    assert caplog.messages == [f"{path} does not end with a line break: if it was cut, its last row is wrong."]


@pytest.mark.parametrize("share", [0.02, 0.3, 0.6, 0.95, 0.999])
@pytest.mark.parametrize("name", ["t.csv.gz", "t.parquet", "t.npz", "packed.npz"])
def test_a_cut_file_is_refused(name, share, tmp_path):
    path = FILES[name](tmp_path / name)
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    with pytest.raises(DataError, match=f"{name}, but it cannot be read: .*Is the file cut or damaged"):
        whole(path, ["a", "b"])


@pytest.mark.parametrize("name", ["t.csv.gz", "t.npz", "packed.npz"])
def test_a_changed_byte_is_noticed_by_its_checksum(name, tmp_path):
    path = FILES[name](tmp_path / name)
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 0x55
    path.write_bytes(content)
    with pytest.raises(DataError):
        whole(path, ["a", "b", "c"])


def test_words_nulls_and_odd_types_of_parquet_are_named(tmp_path):
    path = tmp_path / "t.parquet"
    parquet.write_table(arrow.table({"a": [1.0] * 14 + [None], "b": [1] * 15, "w": ["red"] * 15, "d": [b"x"] * 15}), path)
    with pytest.raises(DataError, match="row 15 has no value in column 'a'"):
        whole(path, ["b", "a"])
    with pytest.raises(DataError, match="Expected numbers in column 'w' of .*t.parquet, but row 1 has 'red'"):
        whole(path, ["w"])
    with pytest.raises(DataError, match="Expected numbers in column 'd'"):
        whole(path, ["d"])


def test_arrays_that_are_no_columns_are_named(tmp_path):
    path = tmp_path / "t.npz"
    np.savez(path, a=np.zeros(3), b=np.zeros(2))
    with pytest.raises(DataError, match="arrays of one length in .*t.npz, but got {'a': 3, 'b': 2}"):
        whole(path, ["a"])
    np.savez(path, a=np.array([{}], dtype=object))
    with pytest.raises(DataError, match="'a' has shape .1,. and type object"):
        whole(path, ["a"])
    np.savez(path, a=np.array(["x"]))
    with pytest.raises(DataError, match="Expected numbers in column 'a' of .*t.npz, but row 1 has 'x'"):
        whole(path, ["a"])
    np.savez(path, a=np.zeros(()))
    with pytest.raises(DataError, match=r"'a' has shape \(\)"):
        whole(path, ["a"])


def test_files_that_are_not_there_or_of_another_kind_are_named(tmp_path):
    with pytest.raises(DataError, match="Expected a table at .*no.csv, but there is no such file"):
        whole(tmp_path / "no.csv", [])
    (tmp_path / "d.csv").mkdir()
    with pytest.raises(DataError, match="but it is a folder"):
        whole(tmp_path / "d.csv", [])
    with pytest.raises(ConfigError, match=r"end in one of \['.csv', '.csv.gz', '.npz', '.parquet'\], but got 't.xlsx'"):
        whole(tmp_path / "t.xlsx", [])


@pytest.mark.parametrize("suffix", ["csv", "npz", "parquet"])
def test_what_is_written_is_read_again(suffix, tmp_path):
    path = tmp_path / f"out.{suffix}"
    path.write_text("old")
    words = ["a", "somewhat longer", "c, with a comma"]
    numbers = np.array([0.1, -np.pi, 1e-30], dtype=np.float32)
    with write_table(path) as write:
        for i in range(3):
            write({"score": numbers[i : i + 1], "ood": np.array([i == 1]), "n": np.array([i]), "label": np.array([words[i]])})
        assert path.read_text() == "old"
    if suffix == "csv":
        assert path.read_text().splitlines()[:2] == ["score,ood,n,label", "0.100000001,false,0,a"]
        path.write_text(path.read_text().replace("true", "1").replace("false", "0"))
    with open_table(path) as table:
        blocks = list(table.blocks(["score", "ood", "n"], ["label"]))
    x = np.concatenate([each.x for each in blocks])
    np.testing.assert_array_equal(x[:, 0].astype(np.float32), numbers)
    assert x[:, 1:].tolist() == [[0, 0], [1, 1], [0, 2]]
    assert [word for each in blocks for word in each.raw["label"]] == words
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("suffix", ["csv", "npz", "parquet"])
def test_nothing_is_left_of_what_fails(suffix, tmp_path):
    path = tmp_path / f"out.{suffix}"
    path.write_text("old")
    with pytest.raises(AttributeError), write_table(path) as write:
        write({"score": np.zeros(10_000)}).of(nothing="goes wrong here")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
    with (
        pytest.raises(FileError, match="Cannot write .*/no/out.*: No such file or directory"),
        write_table(tmp_path / "no" / path.name),
    ):
        pytest.fail("opened a file in a folder that is not there")
    (tmp_path / f"d.{suffix}").mkdir()
    with pytest.raises(FileError, match="Cannot write .*: Is a directory"), write_table(tmp_path / f"d.{suffix}"):
        pytest.fail("opened a folder")


def test_standard_output_is_csv(capsys):
    with write_table("-") as write:
        write({"score": np.array([1.5])})
        write({"score": np.array([2.5])})
    assert capsys.readouterr().out == "score\n1.5\n2.5\n"


def test_unknown_suffixes_are_refused_before_a_file_is_made(tmp_path):
    message = r"end in one of \['.csv', '.npz', '.parquet'\], but got 'x.json'"
    with pytest.raises(ConfigError, match=message), write_table(tmp_path / "x.json"):
        pytest.fail("opened")
    assert not list(tmp_path.iterdir())
