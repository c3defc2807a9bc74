"""What modules remember: compared, and put back after every call."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import vmap

from offmap.model.forward import call
from offmap.model.inspect import find_changes, restore_state, same


class Memo(nn.Module):
    """Remembers in every way there is."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("empty", None)
        self.number, self.list, self.nothing = 0, [1.0], None

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        self.empty = torch.ones(2)
        self.number += 1
        self.list.append(2.0)
        self.nothing = self.inner.kept = self.inner(x)
        return self.nothing


NAMES = ["calls", "empty", "number", "list", "nothing", "inner.kept"]


def test_changes_are_named_in_buffers_attributes_and_containers():
    net = Memo()
    twin = copy.deepcopy(net)
    assert find_changes(net, twin) == []
    with torch.no_grad():
        twin(torch.ones(1, 2))
    assert sorted(find_changes(net, twin)) == sorted(NAMES)
    assert sorted(find_changes(twin, net)) == sorted(NAMES)


def test_the_smallest_change_is_one():
    net = Memo()
    twin = copy.deepcopy(net)
    net.get_buffer("calls").fill_(1.0)
    twin.get_buffer("calls").fill_(1.0 + torch.finfo(torch.float32).eps)
    assert find_changes(net, twin) == ["calls"]


@pytest.mark.parametrize("travel", [lambda net: net, copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))])
def test_a_model_forgets_its_calls_also_as_a_copy_and_under_vmap(travel: Any):
    net = Memo().requires_grad_(False)
    before = copy.deepcopy(net)
    restore_state(net, NAMES)
    net = travel(net)
    weights = {n: torch.stack([p, p + 1]) for n, p in net.named_parameters()}
    expected = net(x := torch.ones(1, 2))
    assert find_changes(before, net) == []
    assert torch.equal(vmap(lambda w: call(net, w, x))(weights)[0], expected)
    assert find_changes(before, net) == []
    assert not hasattr(net.inner, "kept")
    assert torch.equal(copy.deepcopy(net)(x), expected)


def test_a_call_that_fails_is_forgotten_too():
    net = Memo()
    restore_state(net, NAMES)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        net(torch.ones(1, 3))
    assert (net.calls, net.number, net.list) == (0, 0, [1.0])


def test_nothing_to_forget_leaves_no_hook():
    net = Memo()
    restore_state(net, [])
    assert not net._forward_hooks


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_outputs_are_the_same_up_to_rounding_or_to_the_bit(dtype: torch.dtype):
    a = torch.tensor([100.0, 1.0, torch.nan, torch.inf], dtype=dtype)
    b = a * (1 + torch.finfo(dtype).eps)
    assert same(a, a.clone(), exact=True)
    assert same(a, b)
    assert not same(a, b, exact=True)
    assert not same(a, a + 20)
    assert not same(a, a.nan_to_num())
    assert not same(a, a[:3])
    assert not same(a, a.to(torch.float64 if dtype != torch.float64 else torch.float32))
    assert same(torch.arange(3), torch.arange(3))
    assert not same(torch.arange(3), torch.arange(3) + 1)
