"""Stacks of nets: what is trained together is what would be trained alone."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

import trained
from offmap.data import Batch, Rows
from offmap.errors import ConfigError
from offmap.integrations.nets import mlp
from offmap.likelihoods import Gaussian
from offmap.maxwent.config import Runtime
from offmap.model.params import stack_models
from offmap_bench.methods.competitor import check_same_training, check_settings, per_setting
from offmap_bench.methods.stack import Problem, Stack, Training, ensemble_nll, maximum_likelihood, member_nll, train_stack

LAW = Gaussian()
TRAIN, VALID = Rows(*trained.regression(60), 16, "train"), Rows(*trained.regression(30, 1), 16, "valid")
PROBLEM = Problem(TRAIN, VALID, LAW)
QUICK = Training(steps=30, lr=0.01, check_every=10)


@dataclass(frozen=True)
class Tuned(Training):
    tradeoff: float = 1.0


def stack(settings: int = 1, members: int = 3) -> Stack:
    nets = [mlp(3, 2, hidden=[8], seed=seed) for seed in range(members)]
    return Stack.build(nets, VALID.inputs, Runtime(progress=False), settings=settings)


def test_a_stack_holds_private_copies_setting_by_setting() -> None:
    net = mlp(3, 2, hidden=[8])
    before = net[0].weight.detach().clone()
    made = Stack.build([net, mlp(3, 2, hidden=[8], seed=1)], VALID.inputs, Runtime(progress=False), settings=3)
    assert (made.settings, made.members) == (3, 2)
    with torch.no_grad():
        made.weights["0.weight"][2] += 1  # the first member of the second setting
    assert torch.equal(net[0].weight, before)
    assert torch.equal(made.trained_weights()[0]["0.weight"][0], before)
    assert torch.equal(made.trained_weights()[1]["0.weight"][0], before + 1)
    assert made.by_setting(made(VALID.inputs)).shape == (3, 2, 30, 2)


def test_buffers_that_differ_go_with_their_member_into_every_setting() -> None:
    def build(shift: float) -> nn.Module:
        net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        net[1].running_mean.fill_(shift)
        return net.eval()

    made = Stack.build([build(0.0), build(1.0)], VALID.inputs, Runtime(progress=False), settings=2)
    assert [[w[m].item() for m in range(2)] for w in (t["1.running_mean"][:, 0] for t in made.trained_weights())] == [
        [0, 1],
        [0, 1],
    ]
    outputs = made.by_setting(made(VALID.inputs))
    assert torch.equal(outputs[0], outputs[1])


def test_members_are_judged_alone_or_by_what_their_ensemble_predicts() -> None:
    made = stack(settings=2)
    with torch.no_grad():
        for w in made.weights.values():
            w[3:] += 0.1
    outputs = made.by_setting(made(VALID.inputs)).detach()
    each = [[float(LAW.nll(o[None], VALID.targets).mean()) for o in setting] for setting in outputs]
    torch.testing.assert_close(made.by_setting(member_nll(made, PROBLEM)), torch.tensor(each))
    whole = [float(LAW.predictive_nll(setting, VALID.targets).mean()) for setting in outputs]
    torch.testing.assert_close(made.by_setting(ensemble_nll(made, PROBLEM)), torch.tensor(whole)[:, None].expand(2, 3))


@pytest.mark.parametrize("judge", [member_nll, ensemble_nll])
def test_the_best_checked_state_is_restored(judge) -> None:
    """A rate so large that the end is worse than some state before; states are kept by the test at every check."""
    made, seen = stack(), list[tuple[Tensor, dict[str, Tensor]]]()

    def watched(*args) -> Tensor:
        loss = judge(*args)
        seen.append((loss, {n: w.detach().clone() for n, w in made.weights.items()}))
        return loss

    config = Training(steps=30, lr=0.3, check_every=1)
    train_stack(made, maximum_likelihood(made, LAW), PROBLEM, config, judge=watched)
    losses = torch.stack([loss for loss, _ in seen])
    best = losses.argmin(0)
    assert (best < len(seen) - 2).any()
    for member in range(3):
        for name, w in made.weights.items():
            assert torch.equal(w[member], seen[int(best[member])][1][name][member])


def test_with_a_ceiling_the_last_state_at_or_below_it_is_kept() -> None:
    made, seen = stack(), list[tuple[Tensor, dict[str, Tensor]]]()

    def watched(*args) -> Tensor:
        loss = member_nll(*args)
        seen.append((loss, {n: w.detach().clone() for n, w in made.weights.items()}))
        return loss

    start = {n: w.detach().clone() for n, w in made.weights.items()}
    ceiling = torch.tensor([torch.inf, 0.9, -torch.inf])
    config = Training(steps=40, lr=0.3, check_every=1)
    train_stack(made, maximum_likelihood(made, LAW), PROBLEM, config, judge=watched, ceiling=ceiling)
    below = [step for step, (loss, _) in enumerate(seen) if loss[1] <= 0.9]
    assert 0 < len(below) < len(seen)
    for name, w in made.weights.items():
        assert torch.equal(w[0], seen[-1][1][name][0])
        assert torch.equal(w[1], seen[below[-1]][1][name][1])
        assert torch.equal(w[2], start[name][2])


def failing(made: Stack, setting: int | None, step: int):
    """Plain losses, of which one, and its gradient, are no longer finite from that step on."""
    plain = maximum_likelihood(made, LAW)

    def losses(now: int, batch: Batch) -> Tensor:
        each = plain(now, batch)
        bad = torch.arange(made.settings) == (made.settings - 1 if setting is None else setting)
        return each * torch.where(bad & (now >= step), torch.inf, 1.0)

    return losses


def test_a_setting_that_diverges_is_left_out_and_the_others_go_on(caplog: pytest.LogCaptureFixture) -> None:
    made, other = stack(settings=2), stack(settings=2)
    with caplog.at_level(logging.WARNING, "offmap"):
        train_stack(made, failing(made, 0, 15), Problem(TRAIN, VALID, LAW, 1), QUICK)
    assert caplog.messages == [
        "Training diverged (the loss is not finite) in 1 of 2 settings; their members keep their best states so far."
    ]
    train_stack(other, maximum_likelihood(other, LAW), Problem(TRAIN, VALID, LAW, 1), QUICK)
    short, cut = stack(), Training(steps=15, lr=0.01, check_every=10)
    train_stack(short, maximum_likelihood(short, LAW), Problem(TRAIN, VALID, LAW, 1), cut)
    for name, w in made.weights.items():
        assert torch.equal(made.by_setting(w)[1], other.by_setting(other.weights[name])[1])
        torch.testing.assert_close(made.by_setting(w)[0], short.weights[name])  # as it stood when it diverged, which was its best


def test_training_ends_when_every_setting_has_diverged(caplog: pytest.LogCaptureFixture) -> None:
    made, asked = stack(), list[int]()
    losses = failing(made, None, 5)

    def count(step: int, batch: Batch) -> Tensor:
        asked.append(step)
        return losses(step, batch)

    with caplog.at_level(logging.WARNING, "offmap"):
        train_stack(made, count, PROBLEM, QUICK)
    assert asked == list(range(6))
    assert caplog.messages == [
        "Training diverged (the loss is not finite); every member keeps its best state so far. Lower `lr`."
    ]
    assert all(w.isfinite().all() for w in made.weights.values())


def test_settings_must_share_how_they_are_trained() -> None:
    assert check_same_training([Tuned(tradeoff=1.0), Tuned(tradeoff=2.0)]).steps == 10_000
    with pytest.raises(
        ConfigError, match=r"Expected the settings of a grid to share `steps`, but got \[5, 6\]. Fit them one by one."
    ):
        check_same_training([Tuned(steps=5), Tuned(steps=6)])


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf"), "big", True, None])
def test_impossible_numbers_are_refused(value) -> None:
    with pytest.raises(ConfigError, match=f"Expected `tradeoff` to be a number ≥ 0, but got {value!r}."):
        check_settings({"tradeoff": value})


def test_one_field_of_every_setting_becomes_a_tensor() -> None:
    values = per_setting([Tuned(tradeoff=1), Tuned(tradeoff=0.25)], "tradeoff", stack(settings=2))
    torch.testing.assert_close(values, torch.tensor([1.0, 0.25]))


def test_without_a_word_there_is_one_setting() -> None:
    members = stack_models([mlp(3, 2, hidden=[8], seed=seed) for seed in range(3)])
    once = Stack.build(members, VALID.inputs, Runtime(progress=False))
    assert (once.settings, once.members) == (1, 3)
    assert all(torch.equal(once.weights[n], w) and once.weights[n] is not w for n, w in members.mean.items())


def test_plain_nets_are_trained_as_in_the_paper() -> None:
    assert Training() == Training(steps=10_000, lr=1e-3, adam_epsilon=1e-7, check_every=100)
