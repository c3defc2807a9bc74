"""Who keeps which state."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from offmap.maxwent.train import BestValidation, RiskMonitor
from offmap.posterior.distribution import WeightDistribution
from offmap.posterior.predictive import History


def watch_risks(
    risks: list[list[float]], *, every: int = 1, max_risk: tuple[float, float] = (1.0, 1.0), patience: int | None = None
) -> tuple[WeightDistribution, RiskMonitor, History]:
    """Two members whose validation risks are given beforehand, check by check."""
    q = WeightDistribution({"w": torch.zeros(2, 3), "b": torch.zeros(2, 1)})
    given = iter(risks)
    history = History()
    return (
        q,
        RiskMonitor(
            q,
            lambda _: (torch.tensor(next(given)), torch.zeros(2)),
            torch.tensor(max_risk),
            every=every,
            history=history,
            patience=patience,
        ),
        history,
    )


@torch.no_grad()
def move(q: WeightDistribution, to: float) -> None:
    for raw in q.raw_scale.values():
        raw.fill_(to)


def test_every_member_ends_with_its_own_last_state_at_or_below_the_threshold():
    q, monitor, history = watch_risks([[0.5, 0.5], [1.0, 1.5], [1.1, 0.9], [2.0, 3.0]])
    for step in range(4):
        move(q, float(step))
        assert monitor(step, torch.tensor(0.0)) is False
    monitor.restore()
    for raw in q.raw_scale.values():
        assert raw[0].unique().tolist() == [1.0]  # a risk equal to τ passes
        assert raw[1].unique().tolist() == [2.0]
    assert history.kept == [2, 3]
    assert history.step == [1, 2, 3, 4]
    assert history.risk[2] == pytest.approx([1.1, 0.9])


def test_members_have_thresholds_of_their_own():
    q, monitor, history = watch_risks([[2.0, 2.0]], max_risk=(1.0, 3.0))
    move(q, 7.0)
    monitor(0, torch.tensor(0.0))
    monitor.restore()
    start = WeightDistribution({"w": torch.zeros(2, 3)}).raw_scale["w"]
    assert torch.equal(q.raw_scale["w"][0], start[0])
    assert q.raw_scale["w"][1].unique().tolist() == [7.0]
    assert history.kept == [0, 1]
    assert history.max_risk == [1.0, 3.0]


def test_a_member_is_done_after_its_own_failures_in_a_row_whatever_the_others_do():
    risks = [[0.0, 0.0], [2.0, 0.0], [0.5, 2.0], [2.0, 0.5], [2.0, 0.5], [0.5, 2.0], [0.5, 2.0], [0.5, 0.5]]
    q, monitor, history = watch_risks(risks, patience=2)
    stops: list[bool] = []
    for step in range(7):
        move(q, float(step))
        stops.append(monitor(step, torch.tensor(0.0)))
    assert stops == [False] * 6 + [True]
    monitor.restore()
    assert history.kept == [3, 5]  # not 6 and 7: alone, member 0 would have stopped after its second failure in a row
    assert q.raw_scale["w"][:, 0].tolist() == [2.0, 4.0]


def test_without_patience_it_never_stops():
    _, monitor, _ = watch_risks([[9.0, 9.0]] * 30)
    assert not any(monitor(step, torch.tensor(0.0)) for step in range(30))


def test_it_checks_every_so_many_steps():
    q, monitor, history = watch_risks([[0.0, 0.0]] * 3, every=4)
    for step in range(12):
        move(q, float(step))
        monitor(step, torch.tensor(0.5))
    assert history.step == [4, 8, 12]
    assert history.loss == [0.5] * 3
    entropy = 2 * math.log(math.log1p(math.exp(11)))
    assert history.entropy[-1] == pytest.approx([entropy, entropy], rel=1e-5)


@pytest.mark.parametrize("risk", [math.nan, math.inf])
def test_a_state_whose_risk_is_not_finite_is_never_kept(risk: float):
    q, monitor, _ = watch_risks([[0.0, risk]])
    before = q.raw_scale["w"].detach().clone()
    move(q, 3.0)
    monitor(0, torch.tensor(0.0))
    monitor.restore()
    assert q.raw_scale["w"][0].unique().tolist() == [3.0]
    assert torch.equal(q.raw_scale["w"][1], before[1])


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_state_with_numbers_that_are_not_finite_is_never_kept_whatever_its_risk(value: float):
    q, monitor, _ = watch_risks([[0.0, 0.0]])
    with torch.no_grad():
        q.raw_scale["w"][1, 0] = value
    monitor(0, torch.tensor(0.0))
    monitor.restore()
    assert all(bool(raw.isfinite().all()) for raw in q.raw_scale.values())


def test_kept_states_do_not_follow_later_steps():
    q, monitor, _ = watch_risks([[0.0, 0.0], [9.0, 9.0]])
    move(q, 1.0)
    monitor(0, torch.tensor(0.0))
    move(q, 2.0)
    monitor(1, torch.tensor(0.0))
    monitor.restore()
    assert q.raw_scale["w"].unique().tolist() == [1.0]


def test_reports_are_given_the_step_and_the_last_check():
    q = WeightDistribution({"w": torch.zeros(1, 3)})
    reports: list[tuple[int, str]] = []
    monitor = RiskMonitor(
        q,
        lambda _: (torch.zeros(1), torch.zeros(1)),
        torch.ones(1),
        every=2,
        history=History(),
        report=lambda step, text: reports.append((step, text[:10])),
    )
    for step in range(4):
        monitor(step, torch.tensor(0.0))
    assert reports == [(2, "risk 0.000"), (4, "risk 0.000")]


def test_best_validation_keeps_the_lowest_loss_of_every_member():
    weights = {"w": torch.zeros(2, 3)}
    losses = iter([[3.0, 1.0], [1.0, math.nan], [2.0, 2.0], [5.0, 5.0]])
    monitor = BestValidation(weights, lambda: torch.tensor(next(losses)), every=1)
    for step in range(3):
        weights["w"].fill_(float(step))
        assert monitor(step, torch.tensor(0.0)) is False
    weights["w"].fill_(9.0)
    monitor.restore()
    assert weights["w"].tolist() == [[1.0] * 3, [0.0] * 3]


def test_best_validation_counts_the_state_after_the_last_step():
    weights = {"w": torch.zeros(1, 1)}
    losses = iter([3.0, 1.0])
    monitor = BestValidation(weights, lambda: torch.tensor([next(losses)]), every=2)
    for step in range(3):
        weights["w"].fill_(float(step))
        monitor(step, torch.tensor(0.0))
    monitor.restore()
    assert weights["w"].tolist() == [[2.0]]


def test_best_validation_keeps_the_start_if_nothing_is_better():
    weights: dict[str, Tensor] = {"w": torch.ones(1, 2)}
    monitor = BestValidation(weights, lambda: torch.tensor([math.nan]), every=1)
    weights["w"].fill_(5.0)
    monitor(0, torch.tensor(0.0))
    monitor.restore()
    assert weights["w"].tolist() == [[1.0, 1.0]]


def test_a_trained_mean_is_kept_with_its_scale_and_a_frozen_one_is_left_alone():
    for trainable in (True, False):
        q = WeightDistribution({"w": torch.zeros(1, 3)}, trainable_mean=trainable)
        given = iter([[0.0], [9.0]])
        monitor = RiskMonitor(
            q, lambda _, given=given: (torch.tensor(next(given)), torch.zeros(1)), torch.ones(1), every=1, history=History()
        )
        for step in range(2):
            move(q, float(step))
            with torch.no_grad():
                q.mean["w"].fill_(float(step) + 5)
            monitor(step, torch.tensor(0.0))
        monitor.restore()
        assert q.raw_scale["w"].unique().tolist() == [0.0]
        assert q.mean["w"].unique().tolist() == [5.0 if trainable else 6.0]


def test_a_history_is_described_by_its_last_check():
    history = History(max_risk=[1.0, 3.0])
    assert history.describe() == ""
    history.add(10, 0.0, *(torch.tensor(v) for v in ([9.0, 9.0], [9.0, 9.0], [9.0, 9.0])))
    history.add(20, 0.0, *(torch.tensor(v) for v in ([0.5, 1.0], [-3.0, -4.5], [9.0, 9.0])))
    assert history.describe() == "risk 0.750 (τ 2.000), entropy -3.75"
