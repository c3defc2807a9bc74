"""A user's own table: what becomes of its columns, which rows are OOD, and what is refused."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offmap.errors import ConfigError, DataError, OffmapError
from offmap_bench.tasks import catalog, tabular
from offmap_bench.tasks.uci import uci
from tables import ROWS, cars, edit


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
    assert task.inputs == 2 + 3  # the region is no input: it tells what is OOD
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


def test_another_file_is_ood(tmp_path: Path) -> None:
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
    all_params = torch.cat([task.train[0], task.valid[0], task.test[0]])
    torch.testing.assert_close(all_params.sort(0).values, task.ood["new.csv"].sort(0).values)


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


def test_words_that_look_like_numbers_can_be_named(tmp_path: Path) -> None:
    path = cars(tmp_path / "cars.csv")
    task = tabular.task(
        path, "price", words=["age"], drop=["region", "fuel"], held={"power": [path.read_text().split("\n")[1].split(",")[0]]}
    )
    assert set(task.train[0].unique().tolist()) == {0, 1}


def test_a_column_without_any_number_in_training_is_named(tmp_path: Path) -> None:
    path = cars(tmp_path / "cars.csv", age="")
    with pytest.raises(DataError, match="numbers in column 'age', but all are missing in training. Name it in `drop`"):
        tabular.task(path, "price", missing="impute")


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
        ({"ood": {"test": "x.csv"}}, ConfigError, "but 'test' is that of in-distribution ones"),
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
