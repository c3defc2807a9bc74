"""The one training loop."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from offmap.data import Batch, Place, Rows, as_batches
from offmap.distributed.group import SINGLE_PROCESS, Group
from offmap.errors import DataError
from offmap.maxwent.train import Cycle, adam, minimize
from threads import Thread, in_ranks


def rows(n: int = 5, batch_size: int = 2) -> Rows:
    return Rows(torch.arange(float(n))[:, None], torch.arange(float(n)), batch_size, "train")


class Recorder:
    """An objective w² that remembers what it was given, and turns bad at a step."""

    def __init__(self, bad: int | None = None, value: float = math.nan) -> None:
        self.w = nn.Parameter(torch.ones(1))
        self.steps: list[int] = []
        self.seen: list[list[float]] = []
        self.bad, self.value = bad, value

    def __call__(self, step: int, batch: Batch) -> Tensor:
        self.steps.append(step)
        self.seen.append(batch[1].tolist())
        return self.w.square().sum() * (self.value if step == self.bad else 1)


def test_it_takes_all_steps_and_returns_finished():
    objective = Recorder()
    stop_reason = minimize(objective, torch.optim.SGD([objective.w], 0.1), rows(), steps=7)
    assert stop_reason == "finished"
    assert objective.steps == list(range(7))
    assert float(objective.w.detach()) == pytest.approx(0.8**7)


def test_every_epoch_holds_every_row_once_in_an_order_of_its_own():
    objective = Recorder()
    minimize(objective, torch.optim.SGD([objective.w], 0.1), rows(), steps=30)
    epochs = [[y for batch in objective.seen[i : i + 3] for y in batch] for i in range(0, 30, 3)]
    assert all(sorted(e) == [0, 1, 2, 3, 4] for e in epochs)
    assert len({tuple(e) for e in epochs}) > 5


def test_the_order_depends_on_the_seed_alone():
    def order(seed: int) -> list[list[float]]:
        objective = Recorder()
        torch.manual_seed(seed + 17)
        minimize(objective, torch.optim.SGD([objective.w], 0.1), rows(), steps=12, seed=seed)
        return objective.seen

    assert order(0) == order(0)
    assert order(0) != order(1)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_ends_it_before_the_step(value: float):
    objective = Recorder(bad=3, value=value)
    assert minimize(objective, torch.optim.SGD([objective.w], 0.1), rows(), steps=9) == "diverged"
    assert float(objective.w.detach()) == pytest.approx(0.8**3)


def test_a_monitor_can_stop_it_and_all_monitors_are_called():
    calls: list[tuple[str, int, float]] = []

    def monitor(name: str, stop: int):
        def watch(step: int, loss: Tensor) -> bool:
            assert not loss.requires_grad
            calls.append((name, step, float(loss)))
            return step == stop

        return watch

    objective = Recorder()
    stop_reason = minimize(
        objective, torch.optim.SGD([objective.w], 0.0), rows(), steps=9, monitors=[monitor("a", 2), monitor("b", 5)]
    )
    assert stop_reason == "stopped"
    assert calls == [(name, step, 1.0) for step in range(3) for name in "ab"]


def test_the_schedule_multiplies_the_rate_of_every_group():
    a, b = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([{"params": [a], "lr": 1.0}, {"params": [b], "lr": 10.0}])
    minimize(lambda s, _: a.sum() + b.sum(), optimizer, rows(), steps=3, schedule=lambda step: [1.0, 0.5, 0.25][step])
    assert (float(a.detach()), float(b.detach())) == (-1.75, -17.5)


def test_it_works_where_gradients_are_switched_off():
    objective = Recorder()
    with torch.no_grad():
        minimize(objective, adam([objective.w], lr=0.1), rows(), steps=2)
        assert not torch.is_grad_enabled()
    assert float(objective.w.detach()) < 1


def test_no_data_is_refused_not_waited_for():
    empty = as_batches(torch.utils.data.DataLoader([]), Place(torch.device("cpu"), torch.float32), name="train")
    with pytest.raises(DataError, match="Expected at least one batch in `train`, but it is empty"):
        next(iter(Cycle(empty, 0)))


def take_steps(x: Tensor, y: Tensor, group: Group = SINGLE_PROCESS) -> tuple[Tensor, list[float]]:
    """The weight after four steps of least squares on all rows, and the losses that a monitor heard."""
    weight, losses = torch.tensor([0.3, -0.7], dtype=torch.float64, requires_grad=True), list[float]()

    def hear(step: int, loss: Tensor) -> bool:
        losses.append(float(loss))
        return False

    stop_reason = minimize(
        lambda step, batch: (batch[0] @ weight - batch[1]).square().mean(),
        torch.optim.SGD([weight], 0.1),
        Rows(x, y, len(x), "train"),
        steps=4,
        monitors=[hear],
        group=group,
    )
    assert stop_reason == "finished"
    return weight.detach(), losses


def test_ranks_step_together_as_one_with_all_rows():
    """Σ n·g / Σ n over ranks of three and of five rows is the gradient over the eight, and the loss theirs."""
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(8, *shape, generator=generator, dtype=torch.float64) for shape in ((2,), ()))
    pieces = [slice(0, 3), slice(3, 8)]
    weight, losses = take_steps(x, y)
    for other, heard in in_ranks(2, lambda group: take_steps(x[pieces[group.rank]], y[pieces[group.rank]], group)):
        torch.testing.assert_close(other, weight)
        assert heard == pytest.approx(losses)


def test_all_ranks_stop_before_a_step_that_is_not_finite_on_one():
    def end_at_rank(group: Thread) -> tuple[str, float]:
        w = torch.ones(1, requires_grad=True)
        objective = lambda step, batch: (w * (math.inf if (step, group.rank) == (2, 1) else 1.0)).sum()  # noqa: E731
        stop_reason = minimize(objective, torch.optim.SGD([w], 0.25), rows(), steps=9, group=group)
        return stop_reason, float(w.detach())

    assert in_ranks(2, end_at_rank) == [("diverged", 0.5)] * 2


def test_adam_is_that_of_the_paper():
    (group,) = adam([torch.ones(1, requires_grad=True)], lr=0.25).param_groups
    assert (group["lr"], group["eps"], group["betas"], group["weight_decay"]) == (0.25, 1e-8, (0.9, 0.999), 0)


def test_a_cycle_over_a_users_loader_goes_on_where_another_stood():
    x = torch.arange(5.0)
    data = as_batches(
        DataLoader(TensorDataset(x[:, None], x), batch_size=2, shuffle=True),
        Place(torch.device("cpu"), torch.float32),
        name="train",
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        first = Cycle(data, 0)
        source = iter(first)
        for _ in range(5):
            next(source)
        assert (first.epoch, first.taken) == (1, 2)  # of three
        state = first.epoch, first.taken, list(first.order)
        rest = [next(source)[1].tolist() for _ in range(7)]
        torch.manual_seed(99)
        again = iter(Cycle(data, 0, *state))
        assert [next(again)[1].tolist() for _ in range(7)] == rest
