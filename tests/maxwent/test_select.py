"""Choices made on validation data alone."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from offmap.maxwent.search import CLIPS, find_lowest
from offmap.maxwent.solve import select_highest_entropy
from offmap.posterior.predictive import History


def test_the_grid_of_clips_is_the_papers():
    assert (math.inf, 10, 5, 2, 1, 0.5, 0.2, 0.1, 0) == CLIPS


@given(st.lists(st.one_of(st.floats(-10, 10), st.just(math.nan), st.just(math.inf)), min_size=1, max_size=9))
def test_find_lowest_is_the_first_of_the_smallest_and_never_nan(risks: list[float]):
    best = find_lowest({float(i): risk for i, risk in enumerate(risks)})
    numbers = [r for r in risks if not math.isnan(r)]
    if numbers and min(numbers) < math.inf:
        assert risks[int(best)] == min(numbers)
        assert int(best) == risks.index(min(numbers))


def candidate(entropy: list[float], stop_reason: str) -> tuple[Any, History]:
    return SimpleNamespace(parameterization=None, mean_log_square=lambda: torch.tensor(entropy)), History(stop_reason=stop_reason)


def test_select_highest_entropy_of_those_that_converged():
    fits = [candidate(e, s) for e, s in (([1.0, 1.0], "finished"), ([2.0, 3.0], "stopped"), ([9.0, 9.0], "diverged"))]
    assert select_highest_entropy([*fits, candidate([4.0, 0.0], "finished")]) is fits[1]


def test_select_highest_entropy_of_all_if_none_converged():
    fits = [candidate([e], "diverged") for e in (1.0, 2.0)]
    assert select_highest_entropy(fits) is fits[1]
