"""Models whose last layer alone is random, beside models that run whole for every draw."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from offmap.errors import ModelError
from offmap.model.forward import BatchedModel, LastLayer, find_last_layer
from offmap.model.params import choose, stack_models
from offmap.posterior.distribution import WeightDistribution
from offmap_bench.nets.lenet import lenet
from trained import inputs

X = inputs(7, 3, features=784).reshape(7, 1, 28, 28)


class Tied(nn.Module):
    """The last matrix is the first one too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).tanh())


class Twice(nn.Module):
    """What the last layer gives is not the output."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x).softmax(1)


class Uncalled(nn.Module):
    """The weights of the last layer are used, and the layer is not called."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.last.weight, self.last.bias)


class Counted(nn.Module):
    """Counts the rows that pass."""

    rows = 0  # of the class: copies count together

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        Counted.rows += len(x)
        return self.last(x.tanh())


@pytest.mark.parametrize("members", [1, 3])
@pytest.mark.parametrize("batch", [2, 128])
def test_outputs_are_those_of_a_model_that_runs_as_a_whole(members: int, batch: int) -> None:
    stacked = choose(stack_models([lenet(seed=seed) for seed in range(members)]), X, "last-layer")
    q = WeightDistribution(stacked.mean, fixed=stacked.fixed, initial_scale=0.1)
    whole = BatchedModel(stacked.module, chunk_size=1, batch_size=batch, output_numbers=10)
    last_layer = find_last_layer(stacked.module, stacked.mean, stacked.weights(0), X)
    assert last_layer == LastLayer(("11",))
    found = [h.outputs(lambda span: q.draw(span), 9, X, members=members) for h in (whole, replace(whole, last_layer=last_layer))]
    assert found[0].shape == (9 * members, 7, 10)
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)
    assert not torch.allclose(found[1][0], found[1][1])


class Heads(nn.Module):
    """Two heads on one trunk, of which the second sees something else."""

    def __init__(self, join: str, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.trunk, self.join = nn.Linear(3, 8), join
        self.head, self.head_dist = nn.Linear(8, 2), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        Counted.rows += len(x)
        a, b = self.head(self.trunk(x).relu()), self.head_dist(x.tanh())
        return {"mean": (a + b) / 2, "sum": a + b, "cat": torch.cat([a, b], 1), "gate": a * b.sigmoid()}[self.join]


@pytest.mark.parametrize("members", [1, 2])
@pytest.mark.parametrize("join", ["mean", "sum", "cat"])
def test_several_heads_share_one_pass(join: str, members: int) -> None:
    stacked = choose(stack_models([Heads(join, seed) for seed in range(members)]), inputs(5), "last-layer")
    assert list(stacked.mean) == ["head.weight", "head.bias", "head_dist.weight", "head_dist.bias"]
    q = WeightDistribution(stacked.mean, fixed=stacked.fixed, initial_scale=0.1)
    last_layer = find_last_layer(stacked.module, stacked.mean, stacked.weights(0), inputs(5))
    assert last_layer == LastLayer(("head", "head_dist"), join)
    whole = BatchedModel(stacked.module, chunk_size=1, output_numbers=4)
    expected = whole.outputs(lambda span: q.draw(span), 9, inputs(5), members=members)
    before = Counted.rows
    found = replace(whole, last_layer=last_layer).outputs(lambda span: q.draw(span), 9, inputs(5), members=members)
    assert Counted.rows == before + 5 * members
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_heads_that_are_joined_otherwise_run_as_a_whole() -> None:
    stacked = choose(stack_models(Heads("gate")), inputs(5), "last-layer")
    assert len(stacked.mean) == 4
    assert find_last_layer(stacked.module, stacked.mean, stacked.weights(0), inputs(5)) is None


@pytest.mark.parametrize(
    ("net", "random"),
    [
        (Tied(), ["first.weight"]),
        (Twice(), ["last.weight", "last.bias"]),
        (Uncalled(), ["last.weight", "last.bias"]),
        (nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)), ["1.weight"]),
        (nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)), ["0.weight", "0.bias"]),
        (nn.Sequential(nn.Linear(3, 2), nn.ReLU()), ["0.weight", "0.bias"]),
        (nn.Sequential(nn.Linear(3, 12), nn.Unflatten(1, (4, 3)), nn.Linear(3, 2)), ["2.weight", "2.bias"]),
    ],
)  # fmt: skip
def test_find_last_layer_gives_none_for_other_models(net: nn.Module, random: list[str]) -> None:
    assert find_last_layer(net, random, {}, inputs(4)) is None


def test_rows_that_were_met_do_not_run_again() -> None:
    net = Counted()
    model = BatchedModel(
        net, chunk_size=1, output_numbers=2, last_layer=find_last_layer(net, ["last.weight", "last.bias"], {}, inputs(4))
    )
    q = WeightDistribution(choose(stack_models(net), inputs(4), "last-layer").mean, initial_scale=0.1)
    before, x = net.rows, inputs(5, 1)
    first = model.outputs(lambda span: q.draw(span), 6, x)
    assert net.rows == before + 5
    torch.testing.assert_close(model.outputs(lambda span: q.draw(span), 6, x.clone()), first)
    assert net.rows == before + 5
    x[0] += 1  # the same memory, other numbers
    assert not torch.allclose(model.outputs(lambda span: q.draw(span), 6, x)[:, 0], first[:, 0])


def test_inputs_of_another_form_are_refused() -> None:
    net = lenet()
    stacked = choose(stack_models(net), X, "last-layer")
    q = WeightDistribution(stacked.mean, initial_scale=0.1)
    model = BatchedModel(net, chunk_size=1, output_numbers=10, last_layer=find_last_layer(net, stacked.mean, {}, X))
    with pytest.raises(ModelError, match=r"Sequential failed on inputs of shape \(2, 3, 28, 28\)"):
        model.outputs(lambda span: q.draw(span), 2, torch.zeros(2, 3, 28, 28))


def test_what_leaves_positive_outputs_alone_is_still_noticed() -> None:
    net = nn.Sequential(nn.Linear(3, 2), nn.ReLU())
    with torch.no_grad():
        net[0].weight.fill_(1.0)
    assert find_last_layer(net, ["0.weight", "0.bias"], {}, torch.ones(4, 3)) is None
