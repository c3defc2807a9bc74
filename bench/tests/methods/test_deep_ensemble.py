"""Deep ensembles: members trained together are the members trained alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offmap
from offmap.data import Place, Rows, as_batches, load_rows
from offmap.errors import ModelError
from offmap.integrations.nets import mlp
from offmap.maxwent.config import Runtime
from offmap.maxwent.train import adam, minimize
from offmap_bench.methods import deep_ensemble
from offmap_bench.methods.stack import Stack
from trained import classes, inputs, regression

PLACE = Place(torch.device("cpu"), torch.float32)
LAW = offmap.Gaussian(noise=torch.tensor([0.1]))


def rows(data: tuple[Tensor, Tensor], name: str = "train", batch_size: int = 16) -> Rows:
    return load_rows(as_batches(data, PLACE, name=name, batch_size=batch_size))


def train_nets(nets: Any, *, seed: int = 0, law: Any = LAW, data: Any = regression, **config: Any) -> Any:
    settings = deep_ensemble.Config(**{"steps": 30, "check_every": 10, "lr": 0.01} | config)
    return deep_ensemble.fit(nets, rows(data(60, 0)), rows(data(30, 1), "valid"), likelihood=law, config=settings, seed=seed)


def test_training_lowers_the_validation_nll_and_leaves_the_nets_alone() -> None:
    net = mlp(3, 1, hidden=[8]).train()
    before = {n: p.detach().clone() for n, p in net.named_parameters()}
    predictive = train_nets(net, steps=200)
    x, y = regression(30, 1)
    error = [(out - y).square().mean() for out in (net(x)[:, 0], predictive.outputs(x, 1)[0, :, 0])]
    assert error[1] < 0.3 * error[0]
    assert net.training
    assert all(torch.equal(before[n], p) and p.requires_grad for n, p in net.named_parameters())


def test_members_trained_together_are_the_members_trained_alone() -> None:
    nets = [mlp(3, 1, hidden=[8], seed=s) for s in range(3)]
    # an ε so large that Adam feels the size of the loss
    together = train_nets(nets, adam_epsilon=1.0)
    x = inputs(9, 5)
    for member, net in enumerate(nets):
        alone = train_nets(net, adam_epsilon=1.0)
        torch.testing.assert_close(together.outputs(x, 1)[member], alone.outputs(x, 1)[0], rtol=1e-4, atol=1e-5)


def test_a_stack_takes_the_steps_of_the_model_it_is_made_of() -> None:
    nets, batches, x = [mlp(3, 1, hidden=[16, 16], seed=s) for s in range(4)], rows(regression(60, 0)), inputs(9, 5)
    ends: list[Tensor] = []
    for in_columns in (True, False):
        stack = Stack.build(nets, x, Runtime(progress=False), settings=2)

        def objective(step: int, batch: Any, stack: Stack = stack, in_columns: bool = in_columns) -> Tensor:
            outputs = stack(batch[0]) if in_columns else stack.model(stack.weights, batch[0])
            return LAW.nll(outputs, batch[1]).mean(1).sum()

        assert minimize(objective, adam(stack.weights.values(), lr=1e-3, epsilon=1e-3), batches, steps=300) == "finished"
        ends.append(stack.model(stack.weights, x))
    assert not torch.allclose(ends[0][0], nets[0](x), atol=0.1)
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-3, atol=1e-4)


def test_outputs_are_those_of_the_trained_nets() -> None:
    predictive = train_nets([mlp(3, 1, hidden=[8], seed=s) for s in range(3)])
    x = inputs(9, 5)
    assert predictive.members == 3
    assert isinstance(predictive, offmap.Predictive)
    assert predictive.outputs(x, 50, clip=0.1, seed=7).shape == (3, 9, 1)  # nothing is random, so P is 1
    torch.testing.assert_close(predictive.outputs(x, 1), torch.stack([net(x) for net in predictive.nets()]))


@pytest.mark.parametrize("steps", [1, 7, 99])
def test_training_shorter_than_a_check_is_not_lost(steps: int) -> None:
    net = mlp(3, 1, hidden=[8])
    predictive = train_nets(net, steps=steps, check_every=100)
    x = inputs(9, 5)
    assert not torch.allclose(predictive.outputs(x, 1)[0], net(x))


def test_the_best_state_is_kept_and_not_the_last() -> None:
    # a rate so large that the end is worse than some state before
    net = mlp(3, 1, hidden=[8])
    held = rows(regression(30, 1), "valid")
    found: list[float] = []
    for steps in range(1, 16):
        last = train_nets(net, steps=steps, check_every=1000, lr=0.5)  # one check, at the end
        found.append(LAW.nll(last.outputs(held.inputs, 1), held.targets).mean(1).item())
    best = train_nets(net, steps=15, check_every=1, lr=0.5)
    assert LAW.nll(best.outputs(held.inputs, 1), held.targets).mean(1).item() == pytest.approx(min(found), rel=1e-4)
    assert min(found) < found[-1]


def test_seed_decides_the_order_of_batches_alone() -> None:
    net, x = mlp(3, 1, hidden=[8]), inputs(9, 5)
    assert torch.equal(train_nets(net).outputs(x, 1), train_nets(net).outputs(x, 1))
    assert not torch.equal(train_nets(net).outputs(x, 1), train_nets(net, seed=1).outputs(x, 1))


def test_divergence_keeps_finite_weights_and_is_said(caplog: pytest.LogCaptureFixture) -> None:
    predictive = train_nets(mlp(3, 1, hidden=[8]), lr=1e25)
    assert predictive.outputs(inputs(9, 5), 1).isfinite().all()
    assert caplog.messages == [
        "Training diverged (the loss is not finite); every member keeps its best state so far. Lower `lr`."
    ]


def test_classifiers_train_too() -> None:
    predictive = train_nets([mlp(3, 3, hidden=[8], seed=s) for s in range(2)], law=offmap.Categorical(), data=classes, steps=200)
    x, y = classes(60, 4)
    made = offmap.guard(predictive, classes(30, 1))
    assert (made.predict(x).label == y).float().mean() > 0.8
    assert made.clip is None  # all clips are equal, and the first of the grid is no clip


def test_mean_nll_is_per_member() -> None:
    predictive = train_nets([mlp(3, 1, hidden=[8], seed=s) for s in range(2)])
    x, y = regression(30, 1)
    slow = [-torch.distributions.Normal(net(x)[:, 0], 0.1**0.5).log_prob(y).mean() for net in predictive.nets()]
    held = rows((x, y), "valid")
    torch.testing.assert_close(
        LAW.nll(predictive.outputs(held.inputs, 1), held.targets).mean(1), torch.stack(slow), rtol=1e-4, atol=1e-5
    )


def test_members_of_different_architecture_are_refused() -> None:
    with pytest.raises(ModelError, match="Expected members of one architecture, but `0.weight` is"):
        train_nets([mlp(3, 1, hidden=[8]), mlp(3, 1, hidden=[9])])


def test_buffers_that_differ_stay_with_their_member() -> None:
    def build(shift: float) -> nn.Module:
        net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        net[1].running_mean.fill_(shift)
        return net.eval()

    torch.manual_seed(0)
    predictive = train_nets([build(0.0), build(1.0)], steps=2)
    assert [net[1].running_mean[0].item() for net in predictive.nets()] == [0.0, 1.0]
    x = inputs(9, 5)
    torch.testing.assert_close(predictive.outputs(x, 1), torch.stack([net(x) for net in predictive.nets()]))
