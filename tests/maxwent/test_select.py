"""Choices made on validation data alone."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from offmap.maxwent.select import CLIPS, highest_entropy, lowest


def test_the_grid_of_clips_is_the_papers():
    assert (math.inf, 10, 5, 2, 1, 0.5, 0.2, 0.1, 0) == CLIPS


@given(st.lists(st.one_of(st.floats(-10, 10), st.just(math.nan), st.just(math.inf)), min_size=1, max_size=9))
def test_lowest_is_the_first_of_the_smallest_and_never_nan(risks: list[float]):
    candidates = [float(i) for i in range(len(risks))]
    best, told = lowest(candidates, lambda c: risks[int(c)])
    assert list(told) == candidates
    numbers = [r for r in risks if not math.isnan(r)]
    if numbers and min(numbers) < math.inf:
        assert risks[int(best)] == min(numbers)
        assert int(best) == risks.index(min(numbers))


def test_the_widest_of_those_that_passed_is_chosen():
    fits = [("a", [1.0, 1.0], True), ("b", [2.0, 3.0], True), ("c", [9.0, 9.0], False), ("d", [4.0, 0.0], True)]
    assert highest_entropy(fits, lambda f: torch.tensor(f[1]), lambda f: f[2])[0] == "b"


def test_the_widest_of_all_is_chosen_if_none_passed():
    fits = [("a", 1.0), ("b", 2.0)]
    assert highest_entropy(fits, lambda f: torch.tensor([f[1]]), lambda f: False)[0] == "b"
