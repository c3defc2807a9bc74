"""Distances to in-distribution rows, beside loops that say the same."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from offmap.scores import distance
from offmap.scores.distance import RUNS, SHARE, KNNDistance, compute_log_ratio, find_lowest, find_nearest
from trained import inputs


def slow_nearest(rows: Tensor, x: Tensor, k: int, itself: list[int] | None = None) -> tuple[list[list[float]], list[list[int]]]:
    """Every pair by itself, then sorted."""
    distances, numbers = [], []
    for b, one in enumerate(x.double()):
        pairs = [(math.dist(one.tolist(), row.tolist()), i) for i, row in enumerate(rows.double())]
        pairs = sorted(pair for pair in pairs if itself is None or pair[1] != itself[b])[:k]
        distances.append([d for d, _ in pairs])
        numbers.append([i for _, i in pairs])
    return distances, numbers


def slow_relative(rows: Tensor, x: Tensor, k: int) -> list[float]:
    own, _ = slow_nearest(rows, rows, k, list(range(len(rows))))
    spacings = [sum(each) / len(each) for each in own]
    eps = SHARE * sum(spacings) / len(spacings)
    result = []
    for distances, numbers in zip(*slow_nearest(rows, x, k), strict=True):
        there = sum(spacings[i] for i in numbers) / len(numbers)
        result.append(math.log((sum(distances) / len(distances) + SHARE * eps) / (there + eps)))
    return result


def fast_relative(rows: Tensor, x: Tensor, k: int = 10) -> Tensor:
    spacings = find_nearest(rows, rows, itself=torch.arange(len(rows)), k=k)[0].mean(1)
    return compute_log_ratio(*find_nearest(rows, x, k=k), spacings)


def numbers(found: Any, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.tensor(found, dtype=dtype)


@pytest.mark.parametrize("offset", [0.0, 1e4])
@pytest.mark.parametrize("k", [1, 3, 10])
def test_nearest_rows_are_those_that_loops_find(k: int, offset: float) -> None:
    rows, x = inputs(30, 0) + offset, inputs(20, 1) + offset
    distances, which = find_nearest(rows, x, k=k)
    expected, there = slow_nearest(rows, x, k)
    torch.testing.assert_close(distances, numbers(expected), rtol=1e-7, atol=1e-9)
    assert which.tolist() == there


@pytest.mark.parametrize("rows", [1, RUNS - 1, RUNS, 3 * RUNS])  # few rows are looked through at once, many in runs
@pytest.mark.parametrize("columns", [8, 24, 8 * RUNS, 24 * RUNS])
def test_the_lowest_of_every_part_is_where_it_is(rows: int, columns: int) -> None:
    values = torch.rand(rows, columns, generator=torch.Generator().manual_seed(rows * columns))
    expected = [[min(range(part, columns, 8), key=lambda i: float(row[i])) for part in range(8)] for row in values]
    assert find_lowest(values, 8).tolist() == expected


@pytest.mark.parametrize("count", [100, 1025, 1300])  # with and without rows that fill up the last run
def test_padding_is_never_the_nearest_row(count: int) -> None:
    rows, x = inputs(count, 0), 1e3 * inputs(40, 1)
    space = KNNDistance.fit(rows, standardized=False)
    assert space is not None
    assert torch.allclose(space.log_ratio(x), torch.cat([space.log_ratio(one) for one in x.split(1)]), atol=1e-6)
    assert space.log_ratio(x).isfinite().all()


def test_log_ratios_are_those_that_loops_find() -> None:
    rows, x = inputs(40, 0), 3 * inputs(20, 1)
    torch.testing.assert_close(fast_relative(rows, x), numbers(slow_relative(rows, x, 10)), rtol=1e-6, atol=1e-6)


def test_leaving_one_out_leaves_that_one_out() -> None:
    rows = inputs(25, 0)
    distances, which = find_nearest(rows, rows, itself=torch.arange(25), k=4)
    assert not (which == torch.arange(25)[:, None]).any()
    for i in range(25):
        others = torch.cat([rows[:i], rows[i + 1 :]])
        torch.testing.assert_close(distances[i : i + 1], find_nearest(others, rows[i : i + 1], k=4)[0], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("count", [2, 3, 7, 10, 11])
def test_few_rows_give_a_newcomer_as_many_neighbours_as_themselves(count: int) -> None:
    rows = inputs(count, 0)
    own, _ = find_nearest(rows, rows, itself=torch.arange(count))
    assert own.shape == (count, min(10, count - 1))
    assert find_nearest(rows, inputs(5, 1))[0].shape == (5, min(10, count - 1))


def test_a_reference_row_is_at_no_distance_from_itself() -> None:
    rows = 100 * inputs(30, 0)
    distances, which = find_nearest(rows, rows)
    assert which[:, 0].tolist() == list(range(30))
    assert (distances[:, 0] < 1e-4).all()
    assert fast_relative(rows, rows).isfinite().all()


@pytest.mark.parametrize("held", [1, 30, 70])
def test_blocks_change_nothing_and_bound_what_is_held(held: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, x = inputs(30, 0), inputs(20, 1)
    expected = find_nearest(rows, x)
    seen: list[int] = []
    product = torch.addmm
    monkeypatch.setattr(distance, "BLOCK_NUMBERS", held)
    monkeypatch.setattr(torch, "addmm", lambda c, a, b, **k: seen.append(len(a) * b.shape[1]) or product(c, a, b, **k))
    found = find_nearest(rows, x, itself=None)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    assert max(seen) <= max(held, 30)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_is_infinitely_far(bad: float) -> None:
    x = inputs(4, 1)
    x[2, 1] = bad
    found = fast_relative(inputs(30, 0), x)
    assert found[2] == torch.inf
    assert found[[0, 1, 3]].isfinite().all()


@given(factor=st.floats(1e-3, 1e3), shift=st.floats(-10, 10))
def test_ratios_do_not_depend_on_unit_and_origin(factor: float, shift: float) -> None:
    rows, x = inputs(30, 0).double(), inputs(20, 1).double()
    torch.testing.assert_close(
        fast_relative(factor * rows + shift, factor * x + shift), fast_relative(rows, x), rtol=1e-6, atol=1e-6
    )


def test_copies_are_at_no_distance_however_rounding_falls_and_other_rows_are_far() -> None:
    kept = inputs(3, 0, features=4).double()
    space = KNNDistance.fit(kept.repeat(50, 1).float(), standardized=False)
    assert space is not None
    rounded = kept * (1 + 1e-7 * torch.tensor([[1.0], [-1.0], [1.0]]))
    assert torch.equal(space(rounded.float()), torch.zeros(3, dtype=torch.float64))
    assert float(space(kept.mean(0, keepdim=True).float())) > 5


def test_copies_of_rows_leave_ratios_finite() -> None:
    rows = inputs(3, 0).repeat(12, 1)
    found = fast_relative(rows, torch.cat([rows[:3], 50 + inputs(3, 1)]))
    assert found.isfinite().all()
    assert found[:3].max() < found[3:].min()
