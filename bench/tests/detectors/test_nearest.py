"""Distances to training rows in inputs and before the last layer, against a slow loop."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from offmap.errors import ConfigError, ModelError
from offmap_bench.detectors.hidden import last_inputs, nearest_features, nearest_inputs, run_model
from trained import classifier, inputs


def kth_distance(x: Tensor, rows: Tensor, k: int) -> Tensor:
    return torch.tensor([sorted(float((row - one).norm()) for row in rows)[k - 1] for one in x])


@pytest.mark.parametrize("k", [1, 10])
def test_distances_are_those_of_a_loop(k: int) -> None:
    rows, x, net = inputs(40) * torch.tensor([1.0, 10.0, 0.0]), inputs(7, 1), classifier()
    spread = rows.std(0, correction=0)
    spread[2] = 1.0  # a column that does not vary is only centred
    expected = kth_distance(x / spread, rows / spread, k)
    torch.testing.assert_close(nearest_inputs(rows, k=k).score(x), expected, rtol=1e-4, atol=1e-4)
    hidden, known = (nn.functional.normalize(net[:-1](part).detach(), dim=1) for part in (x, rows))
    expected = kth_distance(hidden, known, k)
    torch.testing.assert_close(nearest_features(net, rows, k=k).score(x), expected, rtol=1e-3, atol=1e-3)


def test_inputs_may_be_a_dict_and_run_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    class Doubles(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            assert len(x) <= 4
            return self.last(2 * x)

    monkeypatch.setattr("offmap_bench.detectors.hidden.NUMBERS", 12)
    x = inputs(10)
    torch.testing.assert_close(last_inputs(Doubles(), {"x": x}), 2 * x)
    assert run_model(Doubles(), {"x": x}).shape == (10, 2)


def test_impossible_requests_are_said() -> None:
    with pytest.raises(ConfigError, match="Expected `k` from 1 to the number of rows, 5, but got 6."):
        nearest_inputs(inputs(5), k=6)
    with pytest.raises(ModelError, match="Expected a model with a linear layer, but ReLU has none."):
        nearest_features(nn.ReLU(), inputs(5))
