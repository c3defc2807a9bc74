"""A user's own table: what becomes of its columns, which rows are strange, and what is refused."""

from __future__ import annotations

import contextlib
import gzip
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offmap.data import catalog, tabular
from offmap.data.uci import uci
from offmap.errors import ConfigError, DataError, OffmapError

ROWS = 60


def cars(path: Path, rows: int = ROWS, **changed: str) -> Path:
    """A table of cars: two numbers, a word, a region, a price; `changed` are whole columns by name."""
    rng = np.random.RandomState(0)
    table = {
        "power": [f"{value:.2f}" for value in rng.normal(100, 20, rows)],
        "age": [str(value) for value in rng.randint(0, 15, rows)],
        "fuel": [("petrol", "diesel", "none of these")[i % 3] for i in range(rows)],
        "region": [("north", "south", "west", "east")[i % 4] for i in range(rows)],
        "price": [f"{value:.1f}" for value in rng.normal(20000, 3000, rows)],
    }
    table |= {name: [value] * rows for name, value in changed.items()}
    lines = [",".join(table), *(",".join(row) for row in zip(*table.values(), strict=True))]
    path.write_text("\n".join(lines) + "\n")
    return path


def edit(path: Path, row: int, column: int, value: str) -> Path:
    lines = [line.split(",") for line in path.read_text().splitlines()]
    lines[row][column] = value
    path.write_text("\n".join(",".join(line) for line in lines) + "\n")
    return path


@pytest.mark.parametrize("mode", ["extrapolation", "interpolation"])
def test_a_uci_table_read_as_ones_own_is_the_uci_task(mode: str, data_folder: Path) -> None:
    path = data_folder / "uci" / "concrete.csv.gz"
    own = tabular.task(path, "compressive_strength", ood=mode, shares=(0.1, 0.05), seed=3)
    theirs = uci("concrete", mode, 3, data_folder / "uci")
    for part in ("train", "valid", "test"):
        for mine, other in zip(getattr(own, part), getattr(theirs, part), strict=True):
            torch.testing.assert_close(mine, other)
    torch.testing.assert_close(own.ood[mode], theirs.ood[mode])
    assert (own.likelihood, own.outputs) == (theirs.likelihood, theirs.outputs)


def test_numbers_are_standardised_and_words_become_zeros_and_ones(tmp_path: Path) -> None:
    task = tabular.task(cars(tmp_path / "cars.csv"), "price", held={"region": ["north"]})
    x, y = task.train
    assert task.name == "file/cars.csv"
    assert task.inputs == 2 + 3  # the region is no input: it tells what is strange
    torch.testing.assert_close(x[:, :2].mean(0), torch.zeros(2), atol=1e-5, rtol=0)
    torch.testing.assert_close(x[:, :2].std(0, correction=0), torch.ones(2))
    assert sorted(x[:, 2:].unique().tolist()) == [0, 1]
    assert (x[:, 2:].sum(1) == 1).all()
    torch.testing.assert_close(y.std(correction=0), torch.tensor(1.0))
    assert list(task.ood) == ["region north"]
    assert len(task.ood["region north"]) == ROWS // 4
    assert [len(part[1]) for part in (task.train, task.valid, task.test)] == [28, 8, 9]


def test_held_numbers_are_compared_as_numbers_and_columns_are_sets_of_their_own(tmp_path: Path) -> None:
    path = cars(tmp_path / "cars.csv")
    task = tabular.task(path, "price", held={"age": ["3.0", 4], "region": ["west", "east"]})
    ages = [int(line.split(",")[1]) for line in path.read_text().splitlines()[1:]]
    assert len(task.ood["age 3.0, 4"]) == sum(age in (3, 4) for age in ages)
    assert len(task.ood["region west, east"]) == ROWS // 2


def test_another_file_is_strange(tmp_path: Path) -> None:
    path, other = cars(tmp_path / "cars.csv"), cars(tmp_path / "test.csv", rows=7, fuel="steam")
    task = tabular.task(path, "price", ood=other)
    assert list(task.ood) == ["test.csv"]
    assert task.ood["test.csv"].shape == (7, 2 + 3 + 4)
    assert (task.ood["test.csv"][:, 2:5] == 0).all()  # no word of the training part
    assert sum(len(part[1]) for part in (task.train, task.valid, task.test)) == ROWS
    both = tabular.task(path, "price", ood={"old": other, "same": path})
    assert [len(x) for x in both.ood.values()] == [7, ROWS]


def test_another_file_needs_no_target_and_keeps_the_scale_of_the_training_part(tmp_path: Path) -> None:
    path = cars(tmp_path / "cars.csv")
    lines = [line.rsplit(",", 1)[0] for line in path.read_text().splitlines()]
    (tmp_path / "new.csv").write_text("\n".join(lines))
    task = tabular.task(path, "price", ood=tmp_path / "new.csv")
    everything = torch.cat([task.train[0], task.valid[0], task.test[0]])
    torch.testing.assert_close(everything.sort(0).values, task.ood["new.csv"].sort(0).values)


@pytest.mark.parametrize(
    ("values", "kind", "expected"),
    [
        (["yes", "no"], None, ("categorical", 2)),
        (["true", "false"], None, ("categorical", 2)),
        (["3", "5", "7"], None, ("categorical", 3)),
        (["3", "5", "7"], "regression", ("gaussian", 2)),
        (["3.5", "5", "7"], None, ("gaussian", 2)),
        ([str(i) for i in range(25)], None, ("gaussian", 2)),
        ([str(i) for i in range(25)], "classification", ("categorical", 25)),
    ],
)
def test_the_target_says_what_kind_of_task_it_is(values: list[str], kind: str | None, expected: tuple, tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("x,y\n" + "".join(f"{i * 0.37},{values[i % len(values)]}\n" for i in range(100)))
    task = tabular.task(path, "y", kind=kind, ood={"same": path})
    assert (task.likelihood, task.outputs) == expected
    assert task.train[1].dtype == (torch.int64 if expected[0] == "categorical" else torch.float32)
    if expected[0] == "categorical":
        assert set(task.train[1].tolist()) <= set(range(expected[1]))


def test_classes_are_in_sorted_order(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("x,y\n" + "".join(f"{i % 3},{('c', 'a', 'b')[i % 3]}\n" for i in range(60)))
    task = tabular.task(path, "y", ood={"same": path})
    shown = {round(float(x), 3): int(y) for x, y in zip(task.train[0][:, 0], task.train[1], strict=True)}
    assert [shown[x] for x in sorted(shown)] == [2, 0, 1]


def test_the_seed_alone_decides_the_split(tmp_path: Path) -> None:
    path = cars(tmp_path / "cars.csv")
    first, again, other = (tabular.task(path, "price", seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first.train[0], again.train[0])
    assert not torch.equal(first.train[0], other.train[0])
    assert len(first.ood["extrapolation"]) == ROWS // 2


def test_missing_values_are_counted_and_refused(tmp_path: Path) -> None:
    path = edit(edit(edit(cars(tmp_path / "cars.csv"), 3, 0, ""), 5, 0, "NA"), 9, 2, "?")
    with pytest.raises(DataError, match=r"some are missing in 'power' \(2\), 'fuel' \(1\). Mend them, or pass missing=\"imp"):
        tabular.task(path, "price")


def test_missing_numbers_become_the_median_of_the_training_part_and_missing_words_a_word(tmp_path: Path) -> None:
    whole = cars(tmp_path / "whole.csv")
    path = edit(edit(Path(shutil.copy(whole, tmp_path / "cars.csv")), 1, 0, ""), 1, 2, "")
    other = tmp_path / "one.csv"
    other.write_text("\n".join(path.read_text().splitlines()[:2]))
    task = tabular.task(path, "price", missing="impute", drop=["age", "region"], ood=other)
    assert task.inputs in (1 + 3, 1 + 4)  # the missing word has a level if its row is a training row
    numbers = [float(line.split(",")[0]) for line in path.read_text().splitlines()[2:]]
    x = task.train[0][:, 0]
    assert abs(float(task.ood["one.csv"][0, 0]) - float(x.median())) < 0.1
    assert len(numbers) == ROWS - 1


def test_rows_without_a_target_are_left_out_only_when_asked(tmp_path: Path) -> None:
    path = edit(cars(tmp_path / "cars.csv"), 4, 4, "nan")
    with pytest.raises(DataError, match="a target in each row of .*cars.csv, but 1 have none. Mend them, or pass"):
        tabular.task(path, "price")
    task = tabular.task(path, "price", missing="impute")
    rows = sum(len(part[1]) for part in (task.train, task.valid, task.test)) + len(task.ood["extrapolation"])
    assert rows == ROWS - 1


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_csv_comes_with_commas_semicolons_or_tabs_packed_or_not(delimiter: str, tmp_path: Path) -> None:
    text = cars(tmp_path / "cars.csv").read_text()
    (tmp_path / "other.csv").write_bytes(b"\xef\xbb\xbf" + text.replace(",", delimiter).replace("\n", "\r\n").encode())
    (tmp_path / "packed.csv.gz").write_bytes(gzip.compress(text.encode()))
    tasks = [tabular.task(tmp_path / name, "price") for name in ("cars.csv", "other.csv", "packed.csv.gz")]
    assert torch.equal(tasks[0].train[0], tasks[1].train[0])
    assert torch.equal(tasks[0].train[0], tasks[2].train[0])


def test_words_that_look_like_numbers_can_be_named(tmp_path: Path) -> None:
    path = cars(tmp_path / "cars.csv")
    task = tabular.task(
        path, "price", words=["age"], drop=["region", "fuel"], held={"power": [path.read_text().split("\n")[1].split(",")[0]]}
    )
    assert set(task.train[0].unique().tolist()) == {0, 1}


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
        ("x,x,y\n1,2,3\n", r"names that differ, but got \['x'\]"),
        ("x,,y\n1,2,3\n", "names that differ, but got an empty one"),
        ('x,y\n"1,2\n', "cannot be read: unexpected end of data"),
        ("x,y\n" + "1,2\n" * 5, "Expected 20 familiar rows or more in .*t.csv, but got [23]"),
        ("x,y\n" + "1.5,2.5\n" * 30 + "1x,2\n", "numbers in column 'x' of .*t.csv, but row 31 has '1x' .1 such values."),
        ("x,y\n" + "inf,2\n" * 60, "numbers in column 'x' of .*t.csv, but some are infinite or beyond 1e\\+30"),
        ("x,y\n" + "1,inf\n2,3.5\n" * 60, "numbers in the target 'y', but some are infinite or beyond 1e\\+30"),
        ("x,y\n" + "1,a\n" * 60, "two classes or more.*but got 1 in 30 rows"),
        ("x,y\n" + "".join(f"name {i},{i}.5\n" for i in range(200)), "at most 100 different words in column 'x', but got 200"),
        ("y\n" + "1\n" * 60, "Expected inputs in .*t.csv, but no column is left"),
    ],
    ids=str,
)  # fmt: skip
def test_a_table_that_cannot_be_used_is_named(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(DataError, match=message):
        tabular.task(tmp_path / "t.csv", "y")


def test_a_column_without_any_number_in_training_is_named(tmp_path: Path) -> None:
    path = cars(tmp_path / "cars.csv", age="")
    with pytest.raises(DataError, match="numbers in column 'age', but all are missing in training. Leave it out with `drop`"):
        tabular.task(path, "price", missing="impute")


def test_files_that_are_no_tables_are_named(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_bytes("x,y\nü,1\n".encode("latin-1"))
    with pytest.raises(DataError, match="CSV in UTF-8 at .*t.csv, but it cannot be read"):
        tabular.task(tmp_path / "t.csv", "y")
    (tmp_path / "t.csv.gz").write_bytes(gzip.compress(b"x,y\n1,2\n")[:-9])
    with pytest.raises(DataError, match="t.csv.gz, but it cannot be read"):
        tabular.task(tmp_path / "t.csv.gz", "y")
    np.savez(tmp_path / "code.npz", x=np.array([{}], dtype=object))
    with pytest.raises(DataError, match="code.npz, but it cannot be read: Object arrays cannot be loaded"):
        tabular.task(tmp_path / "code.npz", "y")
    np.savez(tmp_path / "deep.npz", x=np.zeros((2, 2, 2)), y=np.zeros(2))
    with pytest.raises(DataError, match=r"\(n,\) or \(n, D\) in .*deep.npz, but 'x' has shape \(2, 2, 2\)"):
        tabular.task(tmp_path / "deep.npz", "y")
    np.savez(tmp_path / "time.npz", x=np.zeros(2, "datetime64[s]"), y=np.zeros(2))
    with pytest.raises(DataError, match="'x' is of type datetime64"):
        tabular.task(tmp_path / "time.npz", "y")
    np.savez(tmp_path / "odd.npz", x=np.zeros(3), y=np.zeros(2))
    with pytest.raises(DataError, match="columns of one length in .*odd.npz, but got {'x': 3, 'y': 2}"):
        tabular.task(tmp_path / "odd.npz", "y")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"target": "prize"}, ConfigError, "`target` to name a column of .*did you mean 'price'.*but got 'prize'"),
        ({"drop": ["aeg"]}, ConfigError, "`drop` to name a column of .*did you mean 'age'"),
        ({"held": {"regoin": ["north"]}}, ConfigError, "`held` to name a column of .*did you mean 'region'"),
        (
            {"held": {"region": ["nort"]}},
            ConfigError,
            r"values of column 'region', such as \['east', 'north', .*but got \['nort'\]",
        ),
        ({"held": {"age": ["old"]}}, ConfigError, r"numbers in `held` for column 'age', but got \['old'\]"),
        ({"held": {"region": []}}, ConfigError, r"but got \[\]"),
        ({"held": {"region": ["north"]}, "ood": "extrapolation"}, ConfigError, "but both do. Leave one of them out"),
        (
            {"ood": "extrapolatoin"},
            DataError,
            "at extrapolatoin, but there is no such file. Or did you mean extrapolation or inter",
        ),
        ({"ood": {"test": "x.csv"}}, ConfigError, "but 'test' is that of familiar ones"),
        ({"kind": "regresion"}, ConfigError, "did you mean 'regression'"),
        ({"missing": "drop"}, ConfigError, "`missing` to be one of"),
        ({"shares": (0.5, 1.0)}, ConfigError, "two numbers between 0 and 1"),
        ({"target": "fuel", "kind": "regression"}, DataError, "for a regression, but got words"),
        ({"kind": "classification"}, DataError, "words or whole numbers in the target 'price' for a classification"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict, error: type[OffmapError], message: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=message):
        tabular.task(cars(tmp_path / "cars.csv"), **{"target": "price", **options})


def test_another_file_must_have_the_same_columns(tmp_path: Path) -> None:
    path, other = cars(tmp_path / "cars.csv"), tmp_path / "other.csv"
    other.write_text("power,age,fuel\n1,2,petrol\n")
    with pytest.raises(DataError, match=r"the columns of .*cars.csv in .*other.csv, but \['region'\] are missing"):
        tabular.task(path, "price", ood=other)
    cars(other, rows=3, power="strong")
    with pytest.raises(DataError, match="numbers in column 'power' of .*other.csv, as in .*cars.csv, but got words"):
        tabular.task(path, "price", ood=other)
    with pytest.raises(ConfigError, match=r"one of \['.csv', '.csv.gz', '.npz', '.parquet'\], but got 'cars.xlsx'"):
        tabular.task(shutil.copy(path, tmp_path / "cars.xlsx"), "price")


def test_plans_name_a_file_with_its_options(tmp_path: Path) -> None:
    path = cars(tmp_path / "cars.csv")
    name = f"file:{path}#target=price&held=region:north,west&drop=fuel&missing=impute&shares=0.1,0.05"
    assert catalog.expand([name, "moons"]) == [name, "moons"]
    task = catalog.task(name, 2)
    same = tabular.task(path, "price", held={"region": ["north", "west"]}, drop=["fuel"], shares=(0.1, 0.05), seed=2)
    assert torch.equal(task.train[0], same.train[0])
    assert list(task.ood) == ["region north, west"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("file:cars.csv", "named like 'file:cars.csv#target=price', but got 'file:cars.csv'"),
        ("file:cars.csv#targt=price", "did you mean 'target'.*but got 'targt'"),
        ("file:nowhere.csv#target=price", "Expected a table at nowhere.csv, but there is no such file"),
        ("file:cars.csv#target=price&held=region", "options like .*: there is no colon in 'region'"),
        ("file:cars.csv#target=price&shares=a,b", "options like .*could not convert"),
    ],
)
def test_names_of_files_are_checked_before_anything_runs(name: str, message: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    cars(tmp_path / "cars.csv")
    with pytest.raises(ConfigError, match=message):
        catalog.expand([name])


CELLS = st.sampled_from(["1", "2.5", "-3", "1e29", "1e-300", "inf", "a", "b", "", "nan", "1_0", '"', ";", "\t", "é", "\0"])


@given(st.lists(st.tuples(CELLS, CELLS, CELLS), max_size=60), st.sampled_from(["refuse", "impute"]), st.integers(0, 3))
def test_any_table_gives_finite_rows_or_one_of_our_errors(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, ...]], missing: str, plain: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.csv"
    usual = [(f"{i * 0.7 % 3:.2f}", "ab"[i % 2], f"{i}.5") for i in range(40)]  # so that some tables are almost right
    lines = [",".join(row) for row in [*usual[: 20 * plain], *rows]]
    path.write_text("\n".join(["x,z,y", *lines]), encoding="utf-8")
    with contextlib.suppress(OffmapError):
        task = tabular.task(path, "y", missing=missing)
        assert all(bool(t.isfinite().all()) for t in (*task.train, *task.valid, *task.test, *task.ood.values()))
