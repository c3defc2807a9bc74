"""Coverage on new rows, over many models, of intervals and sets that unseen rows calibrated, and of those by training rows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import offmap
from offmap.errors import NotFittedError
from trained import model, quick

SEEDS, LEVEL = 20, 0.9


def noisy_line(n: int, source: torch.Generator) -> tuple[Tensor, Tensor]:
    x = torch.randn(n, 3, generator=source)
    return x, x[:, 0] + 0.5 * torch.randn(n, generator=source)


def noisy_classes(n: int, source: torch.Generator) -> tuple[Tensor, Tensor]:
    x = torch.randn(n, 3, generator=source)
    return x, (2 * x + torch.randn(n, 3, generator=source)).argmax(1)


def measure_coverage(guard: offmap.Guard, x: Tensor, y: Tensor) -> float:
    if y.is_floating_point():
        interval = guard.interval(x, LEVEL)
        return float(((interval.lower <= y) & (y <= interval.upper)).float().mean())
    return float(guard.prediction_set(x, LEVEL)[torch.arange(len(y)), y].float().mean())


@pytest.mark.parametrize("data", [noisy_line, noisy_classes])
def test_intervals_and_sets_hold_their_level_on_unseen_rows_and_are_refused_else(data) -> None:
    fresh, seen, alarms = list[float](), list[float](), list[float]()
    for seed in range(SEEDS):
        source = torch.Generator().manual_seed(seed)
        train, valid, test = data(100, source), data(60, source), data(300, source)
        y = train[1]
        targets = y[:, None] if y.is_floating_point() else 8.0 * F.one_hot(y, 3)
        overfitted = model(train[0], targets, hidden=60, seed=seed)  # 61 numbers per output for 100 rows
        guard = quick(overfitted, train, valid)
        fresh.append(measure_coverage(guard, *test))
        alarms.append(float(guard(test[0]).ood.float().mean()))
        wrong = guard.calibrate(train)
        seen.append(measure_coverage(replace(wrong, calibration=replace(wrong.calibration, seen=False)), *test))
        for refused in [wrong, quick(overfitted, train)] if seed == 0 else [wrong]:
            with pytest.raises(NotFittedError, match="these were part of its training data"):
                measure_coverage(refused, *test)
    mean = torch.tensor([fresh, seen, alarms]).mean(1)
    # 60 rows give a standard deviation of 4 % each, of 0.8 % on average
    assert LEVEL - 0.025 < mean[0] < LEVEL + 0.035
    assert mean[1] < LEVEL - 0.1
    assert 0.025 < mean[2] < 0.075


@pytest.mark.parametrize("score", ["default", "epistemic"])
@pytest.mark.parametrize("classifies", [True, False])
def test_copies_of_few_rows_are_flagged_as_promised_alone_and_in_batches(classifies: bool, score: str) -> None:
    """Scores of copies differ by rounding alone, which may neither be magnified nor decide."""
    source = torch.Generator().manual_seed(0)

    def words(n: int) -> tuple[Tensor, Tensor]:
        columns = [torch.randint(kinds, (n,), generator=source) for kinds in (4, 3, 2)]
        x = torch.cat([F.one_hot(column, kinds).float() for column, kinds in zip(columns, (4, 3, 2), strict=True)], 1)
        level = (columns[0] - columns[1] + columns[2]).float() + 0.3 * torch.randn(n, generator=source)
        return x, (level > 0.8).long() if classifies else level.unsqueeze(1)

    (x, y), valid, (new, _) = words(800), words(200), words(200)
    net = model(x, 4.0 * F.one_hot(y, 2) if classifies else y, hidden=24)
    guard = quick(net, (x, y), valid, score=score)
    together = guard(new).ood
    alone = torch.cat([guard(row).ood for row in new.split(1)])
    assert torch.equal(alone, together)
    assert float(together.float().mean()) < 0.09
    if score == "default":
        assert guard(torch.zeros(1, 9)).ood.all()  # no word that was seen
