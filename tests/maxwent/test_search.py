"""The largest factor of φ that the risk allows, found in few evaluations."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from offmap.maxwent.search import Evaluate, find_largest_factor, find_largest_factor_near, next_point, shrink_to_feasible

LIMITS = st.lists(st.floats(-4.5, 1.5), min_size=1, max_size=4).map(lambda e: 10 ** torch.tensor(e, dtype=torch.float64))


def bisect(risk: Callable[[Tensor], Tensor], max_risk: Tensor, low: float, high: float, halvings: int) -> Tensor:
    """The oracle: the middle of what is left, again and again."""
    below, above = torch.full_like(max_risk, low).log(), torch.full_like(max_risk, high).log()
    for _ in range(halvings):
        middle = (below + above) / 2
        passed = risk(middle.exp()) <= max_risk
        below, above = torch.where(passed, middle, below), torch.where(passed, above, middle)
    return below.exp()


class Counted:
    """A risk with the numbers of members that it was asked about, evaluate by evaluate."""

    def __init__(self, risk: Callable[[Tensor], Tensor]) -> None:
        self.risk, self.asked = risk, list[int]()

    def __call__(self, c: Tensor) -> tuple[Tensor]:
        self.asked.append(int((~c.isnan()).sum()))
        return (self.risk(c),)


@given(LIMITS, st.floats(0.3, 12), st.floats(-3, 3), st.integers(4, 24))
def test_the_answer_is_that_of_bisection_to_the_bit(limit: Tensor, power: float, plain: float, halvings: int):
    def risk(c: Tensor) -> Tensor:
        return plain + c**power

    max_risk = risk(limit)
    found = find_largest_factor(Counted(risk), max_risk, torch.full_like(limit, plain), halvings=halvings)
    assert torch.equal(found.factor, bisect(risk, max_risk, 1e-5, 1e2, halvings))


@given(LIMITS, st.sampled_from([math.nan, -math.inf, 1e9, 0.0]), st.integers(4, 16))
def test_a_base_risk_that_is_no_number_does_no_harm(limit: Tensor, plain: float, halvings: int):
    evaluate = Counted(lambda c: (c / limit).log1p())
    max_risk = torch.full_like(limit, math.log(2))
    found = find_largest_factor(evaluate, max_risk, torch.full_like(limit, plain), halvings=halvings)
    assert torch.equal(found.factor, bisect(evaluate.risk, max_risk, 1e-5, 1e2, halvings))
    assert len(evaluate.asked) <= 2 * halvings


@given(LIMITS, st.floats(2, 9))
def test_a_risk_that_rises_as_a_power_takes_few_evaluations(limit: Tensor, power: float):
    evaluate = Counted(lambda c: c**power)
    find_largest_factor(evaluate, limit**power, torch.zeros_like(limit))
    assert len(evaluate.asked) <= 6  # ten by bisection


@pytest.mark.parametrize("jump", [1e-4, 0.37, 42.0])
def test_a_risk_that_jumps_takes_not_many_more_evaluations_than_halvings(jump: float):
    evaluate = Counted(lambda c: torch.where(c > jump, torch.full_like(c, 1e6), torch.full_like(c, 1e-9)))
    found = find_largest_factor(evaluate, torch.ones(1), torch.zeros(1))
    assert torch.equal(found.factor, bisect(evaluate.risk, torch.ones(1), 1e-5, 1e2, 10))
    assert len(evaluate.asked) <= 20


def test_a_flat_line_that_points_nowhere_does_no_harm():
    """Two evaluations tell nearly the same: τ would be reached at −∞."""
    assert next_point(0, 1024, {512: 1e3}, 0.0, 1e-320, halve=False) == 1
    assert next_point(0, 1024, {512: -1e3}, 0.0, 1e-320, halve=False) == 1023


def test_members_that_are_done_are_not_evaluated():
    """The first reaches τ next to where both are looked at first; the other takes longer."""
    middle, power = math.sqrt(1e-5 * 1e2), torch.tensor([5.0, 0.5])
    evaluate = Counted(lambda c: (c / middle) ** power)
    found = find_largest_factor(evaluate, torch.tensor([1.01, 3.0]), torch.zeros(2))
    assert found.factor.tolist() == pytest.approx([middle, 9 * middle], rel=0.02)
    assert evaluate.asked[:2] == [2, 2]
    assert sum(evaluate.asked) < 2 * len(evaluate.asked)


def test_members_that_are_not_searched_for_are_never_evaluated():
    evaluate = Counted(lambda c: c.square())
    found = find_largest_factor(
        evaluate, torch.tensor([4.0, 9.0]), torch.zeros(2), among=torch.tensor([False, True]), halvings=20
    )
    assert set(evaluate.asked) == {1}
    assert float(found.factor[1]) == pytest.approx(3.0, rel=1e-4)
    assert bool(found.values[0][0].isnan())


def test_the_largest_factor_is_low_where_none_passes_and_near_high_where_all_do():
    def evaluate(c: Tensor) -> tuple[Tensor]:
        return (torch.stack([c[0] * 0, c[1] * 0 + 1, c[2] * math.nan]),)

    found = find_largest_factor(evaluate, torch.full((3,), 0.5), torch.zeros(3), halvings=20)
    assert float(found.factor[0]) == pytest.approx(100, rel=1e-3)
    assert found.factor[1:].tolist() == pytest.approx([1e-5, 1e-5])
    assert found.values[0].isnan().tolist() == [False, True, True]


@given(LIMITS, st.integers(3, 12))
def test_values_are_those_at_the_factor(limit: Tensor, halvings: int):
    evaluate: Evaluate = lambda c: (c.square(), 7 * c)  # noqa: E731
    found = find_largest_factor(evaluate, limit.square(), torch.zeros_like(limit), halvings=halvings)
    shown = evaluate(found.factor)
    for seen, expected in zip(found.values, shown, strict=True):
        assert bool(((seen == expected) | (found.factor < 1.1e-5)).all())


@given(LIMITS, st.floats(-2, 2))
def test_a_rough_answer_shortens_the_search_where_it_is_right_and_does_no_harm_where_it_is_wrong(limit: Tensor, off: float):
    evaluate = Counted(lambda c: c.square())
    found = find_largest_factor_near(limit * 2**off, evaluate, limit.square(), torch.zeros_like(limit))
    assert bool((found.factor <= limit * (1 + 1e-9)).all())
    assert bool((found.factor * 1.05 >= limit).all())
    torch.testing.assert_close(found.values[0], found.factor.square())
    assert len(evaluate.asked) <= (5 if abs(off) < 0.4 else 16)


def test_known_values_at_the_start_save_an_evaluation():
    """τ is reached at twice the start: a line through what is known there goes to it at once."""
    evaluate = Counted(lambda c: c**4)
    max_risk, start = torch.tensor([16.1, 1.0]), (torch.ones(2),)
    found = find_largest_factor(evaluate, max_risk, torch.zeros(2), start=start, low=1.0, high=10.0, halvings=6)
    assert found.factor.tolist() == pytest.approx([2.0, 1.0], rel=0.04)
    assert found.values[0].tolist() == pytest.approx((found.factor**4).tolist())  # that of the second is the start's
    assert evaluate.asked == [2, 1]


def test_only_members_without_a_right_guess_are_searched_elsewhere():
    evaluate = Counted(lambda c: c.square())
    found = find_largest_factor_near(torch.tensor([2.1, 0.01]), evaluate, torch.tensor([4.0, 9.0]), torch.zeros(2))
    assert found.factor.tolist() == pytest.approx([2.0, 3.0], rel=0.03)
    assert evaluate.asked[-1] == 1
    torch.testing.assert_close(found.values[0], found.factor.square())


def test_members_above_max_risk_are_shrunk_and_the_others_left_alone():
    """Risks c²·(0.5, 4, 1) against τ = 1: the second is halved, the others pass."""
    widened: list[Tensor] = []
    risk = torch.tensor([0.5, 4.0, 1.0])
    validation: Any = SimpleNamespace(
        evaluate=lambda q: (risk, risk), evaluator=lambda q: lambda c: (c.square() * risk,), base_risk=lambda q: torch.zeros(3)
    )
    q: Any = SimpleNamespace(scale_by=widened.append)
    assert shrink_to_feasible(q, validation, torch.ones(3)) is None
    (factor,) = widened
    assert factor[[0, 2]].tolist() == [1.0, 1.0]
    # ten halvings of the six decades below one
    assert float(factor[1]) == pytest.approx(10 ** (-6 + 6 * math.floor(1024 * (1 - math.log10(2) / 6)) / 1024), rel=1e-4)
    assert shrink_to_feasible(q, validation, torch.full((3,), 4.0)) == (risk, risk)
    assert len(widened) == 1
