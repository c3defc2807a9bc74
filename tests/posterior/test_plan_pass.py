"""How the data are gone through: parameters in groups whose moments fit in memory."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from offmap.model.forward import first_tensor
from offmap.model.params import stack_models
from offmap.posterior import basis

NET = nn.Sequential(
    nn.Conv2d(4, 4, 2, groups=2, bias=False), nn.Flatten(), nn.Linear(36, 10, bias=False), nn.Linear(10, 3, bias=False)
)
SIZES = {
    4096: {"0.weight": 2 * 8**2, "2.weight": 36**2, "3.weight": 10**2},
    20: {"0.weight": 2 * 8**2, "2.weight": 2 * 20**2, "3.weight": 10**2},
}
"""Numbers of the moments by the limit of the fan-in: those of each group of channels, and of two pieces of a wider fan-in."""


@pytest.mark.parametrize("members", [1, 2])
@pytest.mark.parametrize("limit", SIZES)
def test_groups_are_as_large_as_memory_allows_the_widest_first(limit: int, members: int, monkeypatch: pytest.MonkeyPatch):
    stacked = stack_models([NET] * members)
    weights = [stacked.weights(m) for m in range(members)]
    wide, conv, narrow = (members * SIZES[limit][name] for name in ("2.weight", "0.weight", "3.weight"))

    def groups(room: int) -> list[list[str]]:
        monkeypatch.setattr(basis, "MOMENT_NUMBERS", room)
        return basis.plan_pass(stacked, weights, torch.ones(5, 4, 4, 4), first_tensor, limit)[0]

    assert groups(wide + conv + narrow) == [["2.weight", "0.weight", "3.weight"]]
    assert groups(wide + conv + narrow - 1) == [["2.weight", "0.weight"], ["3.weight"]]
    assert groups(wide + conv) == [["2.weight", "0.weight"], ["3.weight"]]
    assert groups(wide + conv - 1) == [["2.weight"], ["0.weight", "3.weight"]]
    assert groups(conv + narrow) == [["2.weight"], ["0.weight", "3.weight"]]
    assert groups(conv + narrow - 1) == [["2.weight"], ["0.weight"], ["3.weight"]]
    assert groups(1) == [["2.weight"], ["0.weight"], ["3.weight"]]


def test_rows_are_few_where_activations_are_wide(monkeypatch: pytest.MonkeyPatch):
    stacked = stack_models(NET)

    def rows() -> int:
        return basis.plan_pass(stacked, [stacked.weights(0)], torch.ones(50, 4, 4, 4), first_tensor, 4096)[1]

    monkeypatch.setattr(basis, "ACTIVATIONS", 36 * 7)
    assert rows() == 7  # 36 numbers of a row in the widest result
    monkeypatch.setattr(basis, "MOST_ROWS", 3)
    assert rows() == 3


def test_the_stack_of_one_model_is_a_copy():
    net = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 1))
    stacked = stack_models(net)
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    with torch.no_grad():
        for p in net.parameters():
            p.add_(1.0)
    for name, p in before.items():
        assert torch.equal(stacked.module.get_parameter(name), p)
        assert torch.equal(stacked.mean[name][0], p)
