"""SWAG: moments by hand, draws that have them, members that do not disturb each other."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offmap
import trained
from offmap.data import Place, Rows, as_batches, load_rows
from offmap.errors import ConfigError
from offmap.posterior.noise import Normal
from offmap.posterior.predictive import Predictive, Sampled
from offmap.random import generator
from offmap_bench.methods.swag import COLUMNS, Config, Draw, Moments, swag

PLACE = Place(torch.device("cpu"), torch.float32)
LAW = offmap.Gaussian()
QUICK = Config(steps=60, collect_every=5, rank=4, lr=1e-3)


def rows(data: tuple[Tensor, Tensor], name: str = "train", batch_size: int = 16) -> Rows:
    return load_rows(as_batches(data, PLACE, name=name, batch_size=batch_size))


def fit_swag(nets: Any, *, seed: int = 0, **options: Any) -> Sampled:
    train, valid = rows(trained.regression(60)), rows(trained.regression(30, 1), "valid")
    return swag.fit(nets, train, valid, likelihood=LAW, config=replace(QUICK, **options), seed=seed)


def model(seed: int = 0) -> nn.Sequential:
    return trained.regressor(seed, log_variance=True)


def visit_by_hand(net: nn.Module, config: Config) -> list[dict[str, Tensor]]:
    """Plain SGD in a loop, and where it was."""
    twin = trained.regressor(0, log_variance=True)
    twin.load_state_dict(net.state_dict())
    optimizer = torch.optim.SGD(twin.parameters(), lr=config.lr, momentum=config.momentum)
    data, states, step = rows(trained.regression(60)), [], 0
    for epoch in range(100):
        for x, y in data.iter_shuffled(0, epoch):
            optimizer.zero_grad()
            LAW.nll(twin(x).unsqueeze(0), y).mean().backward()
            optimizer.step()
            step += 1
            if step % config.collect_every == 0:
                states.append({n: p.detach().clone() for n, p in twin.named_parameters()})
            if step == config.steps:
                return states
    raise AssertionError


def test_moments_are_those_of_the_states_that_sgd_visits() -> None:
    net = model()
    draw = fit_swag(net).draw
    states = visit_by_hand(net, QUICK)
    assert isinstance(draw, Draw)
    assert len(states) == 12
    for name, mean in draw.mean.items():
        seen = torch.stack([s[name] for s in states]).double()
        torch.testing.assert_close(mean[0].double(), seen.mean(0), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(draw.std[name][0].double(), seen.std(0, correction=0), rtol=1e-3, atol=1e-6)
        for column, last in enumerate(range(8, 12)):  # the latest four, each against the mean up to then
            slow = seen[last] - seen[: last + 1].mean(0)
            torch.testing.assert_close(draw.columns[name][0, column].double(), slow, rtol=1e-3, atol=1e-6)


def test_small_deviations_of_large_weights_are_not_lost() -> None:
    moments, states = Moments(5), 1e4 + 1e-2 * torch.arange(6.0).reshape(6, 1, 1)
    for state in states:
        moments.note({"w": state})
    torch.testing.assert_close(moments.std()["w"], states.double().std(0, correction=0))


def test_a_draw_is_the_formula_with_noise_by_its_address() -> None:
    made = fit_swag([model(0), model(1)], scale=0.5)
    draw = made.draw
    assert isinstance(draw, Draw)
    drawn = draw(range(3, 5), 7)
    for member in range(2):
        for place, number in enumerate((3, 4)):
            z2 = Normal().sample((4,), generator(7, "infer", member, number, COLUMNS))
            for name, mean in draw.mean.items():
                z1 = Normal().sample(tuple(mean.shape[1:]), generator(7, "infer", member, number, name))
                low = sum(draw.columns[name][member, k] * z2[k] for k in range(4)) / math.sqrt(3)
                slow = mean[member] + 0.5 * (draw.std[name][member] * z1 + low) / math.sqrt(2)
                torch.testing.assert_close(drawn[name][2 * member + place], slow, rtol=1e-5, atol=1e-7)


def test_draws_have_the_covariance_of_swag() -> None:
    """½ diag σ² + D·Dᵀ/(2(K−1))."""
    draw = Draw({"w": torch.zeros(1, 2)}, {"w": torch.tensor([[1.0, 2.0]])}, {"w": torch.tensor([[[2.0, 1.0], [0.0, -1.0]]])}, {})
    w = draw(range(40_000), 0)["w"]
    d = torch.tensor([[2.0, 0.0], [1.0, -1.0]])
    expected = 0.5 * torch.diag(torch.tensor([1.0, 4.0])) + 0.5 * d @ d.mT
    torch.testing.assert_close(torch.cov(w.mT), expected, rtol=0.05, atol=0.05)


def test_members_in_a_stack_are_what_they_are_alone() -> None:
    nets = [model(0), model(1)]
    x = trained.inputs(9, 5)
    together = fit_swag(nets)
    (first, second) = together.outputs(x, 6, seed=3).unflatten(0, (2, 6))
    torch.testing.assert_close(fit_swag(nets[0]).outputs(x, 6, seed=3), first, rtol=1e-3, atol=1e-4)
    assert not torch.allclose(first, second)
    assert together.members == 2


def test_draws_are_one_net_for_all_rows_and_any_number_of_them() -> None:
    made, x = fit_swag(model()), trained.inputs(9, 5)
    assert isinstance(made, Predictive)
    outputs = made.outputs(x, 6, seed=3)
    assert outputs.shape == (6, 9, 2)
    torch.testing.assert_close(made.outputs(x[4:6], 6, seed=3), outputs[:, 4:6], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(made.outputs(x, 2, seed=3), outputs[:2], rtol=1e-5, atol=1e-6)
    assert made.outputs(x, 70, seed=3).shape[0] == 70
    assert outputs.std(0).min() > 0
    assert not torch.equal(outputs, made.outputs(x, 6, seed=4))


def test_the_users_nets_are_untouched_and_a_guard_gives_verdicts() -> None:
    net = model()
    before = {n: p.detach().clone() for n, p in net.named_parameters()}
    guard = offmap.guard(fit_swag(net), trained.regression(60, 1), draws=20)
    assert all(torch.equal(before[n], p) for n, p in net.named_parameters())
    assert guard.score(20 * trained.inputs(40, 5)).median() > guard.score(trained.inputs(40, 5)).median()


def test_after_a_divergence_it_wanders_at_a_tenth_of_the_rate(caplog: pytest.LogCaptureFixture) -> None:
    train, valid = rows(trained.regression(60)), rows(trained.regression(30, 1), "valid")
    law = offmap.Gaussian(noise=torch.tensor([0.01]))

    def at(lr: float) -> torch.Tensor:
        config = Config(lr=lr, steps=200, collect_every=1)
        return swag.fit(trained.regressor(), train, valid, likelihood=law, config=config).outputs(valid.inputs, 5)

    fast = at(1.0)
    lost = [message for message in caplog.messages if message.startswith("SWAG diverged at rate ")]
    assert lost
    assert torch.equal(fast, at(10.0 ** -len(lost)))
    assert len(caplog.messages) == len(lost)  # the second went well


def test_divergence_at_every_rate_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"SWAG diverged at rates from 1e\+20 down to 1e\+17: lower `lr`"):
        fit_swag(model(), lr=1e20)


BAD = {
    "steps": (
        9,
        "Expected `rank` of at least 2 and `steps` for at least two states, but got 4, and 9 steps with one state every 5",
    ),
    "rank": (1, "Expected `rank` of at least 2"),
    "collect_every": (0, "Expected `collect_every` to be a whole number above 0, but got 0"),
    "lr": (-1.0, "Expected `lr` to be a number above 0, but got -1.0"),
    "scale": (math.inf, "Expected `scale` to be a number above 0"),
    "momentum": (1.0, "Expected `momentum` to be a number from 0 to below 1, but got 1.0"),
}


@pytest.mark.parametrize("field", BAD)
def test_impossible_settings_are_refused(field: str) -> None:
    value, message = BAD[field]
    with pytest.raises(ConfigError, match=message):
        fit_swag(model(), **{field: value})
