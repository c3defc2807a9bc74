"""Rows of named values that print as an aligned table."""

from __future__ import annotations

import pytest

from offmap.table import Table


def test_columns_are_those_of_all_rows_in_order_of_appearance() -> None:
    assert Table([{"b": 1}, {"a": 2, "b": 3}]).columns == ["b", "a"]


def test_missing_cells_are_blank_and_columns_stay_aligned() -> None:
    text = str(Table([{"set": "test", "nll": 0.5}, {"set": "a longer name", "auroc": 0.25}]))
    lines = text.splitlines()
    assert lines[0].split() == ["set", "nll", "auroc"]
    assert lines[1] == "test           0.5000"
    assert lines[2].index("0.2500") == lines[0].index("auroc")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.123456, "0.1235"),
        (1.0, "1.0000"),
        (-0.5, "-0.5000"),
        (0.0, "0.0000"),
        (12345.678, "1.235e+04"),
        (12.345678, "12.35"),
        (1e-5, "1e-05"),
        (float("inf"), "inf"),
        (float("nan"), "nan"),
        (True, "True"),
        (12345, "12345"),
        ((3, 2), "(3, 2)"),
        (None, ""),
    ],
)
def test_how_a_value_is_written(value: object, text: str) -> None:
    assert str(Table([{"v": value, "end": "."}])).splitlines()[1].removesuffix(".").strip() == text


def test_notes_stand_below_and_repr_is_str() -> None:
    table = Table([{"a": 1}], notes=["first", "second"])
    assert str(table) == "a\n1\nfirst\nsecond"
    assert repr(table) == str(table)


def test_a_table_without_rows_prints_its_notes() -> None:
    assert str(Table([], ["nothing yet"])).strip() == "nothing yet"
