"""The kinds of Predictive keep the promises of the protocol."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

import offmap
from offmap.errors import ConfigError, ModelError
from offmap.maxwent.config import Runtime, override
from offmap.model.forward import BatchedModel
from offmap.model.params import stack_models
from offmap.posterior.distribution import scaling
from offmap.posterior.predictive import CachedPredictive, OutputsOnly, Sampled, Stochastic, as_predictive
from trained import classifier, inputs, regressor

X = inputs(9, 5)


def stochastic(members: int = 1, chunk_size: int = 16) -> Stochastic:
    q = scaling([regressor(s) for s in range(members)], initial_scale=0.1)
    return Stochastic(BatchedModel(stack_models([regressor(s) for s in range(members)]).module, chunk_size=chunk_size), q)


def sample_outputs(members: int = 2) -> Sampled:
    stacked = stack_models([regressor(s) for s in range(members)])
    return Sampled(BatchedModel(stacked.module), stacked.mean | stacked.fixed)


@pytest.mark.parametrize("made", [stochastic(), stochastic(3), sample_outputs(1), sample_outputs(3)])
def test_both_are_predictives_and_member_major(made: Any) -> None:
    assert isinstance(made, offmap.Predictive)
    outputs = made.outputs(X, 4, clip=0.0, seed=0)
    draws = outputs.shape[0] // made.members
    plain = torch.stack([regressor(s)(X).detach() for s in range(made.members)]).repeat_interleave(draws, 0)
    torch.testing.assert_close(outputs, plain, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("members", [1, 3])
@pytest.mark.parametrize("chunk_size", [1, 2, 3, 100])
def test_chunks_do_not_change_the_outputs(members: int, chunk_size: int) -> None:
    expected = stochastic(members).outputs(X, 7, clip=None, seed=0)
    outputs = stochastic(members, chunk_size).outputs(X, 7, clip=None, seed=0)
    assert outputs.shape == (7 * members, 9, 1)
    torch.testing.assert_close(outputs, expected, rtol=1e-5, atol=1e-6)


def test_seed_and_clip_matter() -> None:
    made = stochastic()
    base = made.outputs(X, 5, clip=None, seed=0)
    assert torch.equal(base, made.outputs(X, 5, clip=None, seed=0))
    assert torch.equal(base, made.outputs(X, 5, clip=math.inf, seed=0))
    assert not torch.equal(base, made.outputs(X, 5, clip=None, seed=1))
    assert not torch.equal(base, made.outputs(X, 5, clip=0.05, seed=0))


def test_clip_zero_repeats_the_model_for_every_draw() -> None:
    outputs = stochastic(2).outputs(X, 5, clip=0.0, seed=0).unflatten(0, (2, 5))
    assert torch.equal(outputs[:, :1].expand_as(outputs), outputs)


@pytest.mark.parametrize("clip", [-1.0, math.nan])
def test_impossible_clips_are_refused(clip: float) -> None:
    with pytest.raises(ConfigError, match="Expected `clip` to be a number ≥ 0 or None, but got"):
        stochastic().outputs(X, 5, clip=clip, seed=0)


def test_outputs_need_no_gradient() -> None:
    assert not stochastic().outputs(X.clone().requires_grad_(), 3, clip=None, seed=0).requires_grad


def test_members_come_back_as_plain_modules() -> None:
    nets = sample_outputs(3).nets()
    assert all(isinstance(net, nn.Sequential) for net in nets)
    for member, net in enumerate(nets):
        assert torch.equal(net(X), regressor(member)(X))


def test_runtime_measures_the_model() -> None:
    stacked = stack_models(classifier())
    model = Runtime().model(stacked.module, stacked.mean, X)
    assert (model.output_numbers, model.output_axes) == (3, 1)
    assert model.chunk_size > 1
    assert Runtime(chunk_size=7).model(stacked.module, stacked.mean, X).chunk_size == 7


def test_runtime_refuses_what_it_cannot_run() -> None:
    stacked = stack_models(classifier())
    with pytest.raises(ModelError, match=r"Sequential failed on inputs of shape \(2, 4\)"):
        Runtime().model(stacked.module, stacked.mean, inputs(9, features=4))
    with pytest.raises(ModelError, match=r"one output row per input row, but Sequential made \(1, 3\) of 2 rows"):
        Runtime(output_fn=lambda out: out[:1]).model(stacked.module, stacked.mean, X)


def test_override_changes_fields_and_names_the_nearest() -> None:
    config = override(offmap.Config(), {"steps": 3})
    assert config.steps == 3
    assert offmap.Config().steps != 3
    with pytest.raises(ConfigError, match=r"did you mean 'steps'\?\), but got 'step'"):
        override(offmap.Config(), {"step": 3})
    with pytest.raises(ConfigError, match=r"did you mean 'draws'\?\), but got 'drwas'"):
        override(offmap.Config(), {"drwas": 3}, also=["draws"])


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_cached_predictive_sees_inputs_that_were_changed_in_place(wrapped: bool) -> None:
    source = stochastic(2)
    cached, x = CachedPredictive(source), X.clone()
    inputs_ = (x,) if wrapped else x
    first = cached.outputs(inputs_, 3, clip=None, seed=0)
    assert cached.outputs(inputs_, 3, clip=math.inf, seed=0) is first
    x.add_(10)  # the same memory
    assert torch.equal(cached.outputs(inputs_, 3, clip=None, seed=0), source.outputs(x, 3, clip=None, seed=0))
    assert not torch.equal(cached.outputs(inputs_, 3, clip=None, seed=0), first)


def test_every_kind_declares_model_history_and_mean_weights() -> None:
    source = stochastic(2)
    for kind in (source, sample_outputs(2), CachedPredictive(source)):
        assert isinstance(kind, offmap.Predictive)
        assert kind.model is not None
        weights = kind.mean_weights()
        assert weights is not None
        torch.testing.assert_close(weights["0.weight"], regressor(0)[0].weight.detach())


class Constant:
    """The least that a guard takes."""

    members = 1

    def outputs(self, x: torch.Tensor, draws: int, *, clip: float | None, seed: int) -> torch.Tensor:
        spread = torch.linspace(-1, 1, draws)[:, None, None] * (0.0 if clip == 0 else 0.1)
        return x[:, :1].sin() * torch.ones(draws, 1, 1) + spread


def test_a_class_with_members_and_outputs_alone_is_guarded() -> None:
    completed = as_predictive(Constant())
    assert isinstance(completed, OutputsOnly)
    assert isinstance(completed, offmap.Predictive)
    assert (completed.model, completed.history, completed.mean_weights()) == (None, None, None)
    assert as_predictive(completed) is completed
    x = inputs(60, 5)
    guard = offmap.guard(Constant(), (x, x[:, 0].sin()), train=(x, x[:, 0].sin()))
    assert guard(x).score.shape == (60,)
    with pytest.raises(ConfigError, match="Expected `predictive` to have `members` and `outputs`, but got Linear"):
        as_predictive(nn.Linear(1, 1))  # pyright: ignore[reportArgumentType]


def images(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    return inputs(40, seed, features=64).reshape(40, 1, 8, 8), torch.arange(40) % 3


def convolutional() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 3)).eval()


@pytest.mark.parametrize("kind", ["table", "images"])
def test_eight_threads_that_share_a_guard_give_equal_results(kind: str) -> None:
    x = inputs(60, 5)
    net, data = (regressor(0), (x, x[:, 0])) if kind == "table" else (convolutional(), images(5))
    guard = offmap.fit(net, data, data, solver="closed-form", draws=8, progress=False)
    rows = [data[0][i : i + 5] + i for i in range(8)]
    expected = [guard(x) for x in rows]

    def work(i: int) -> bool:
        results = [guard(rows[i]) for _ in range(4)]
        return all(torch.equal(r.score, expected[i].score) and torch.equal(r.p_value, expected[i].p_value) for r in results)

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))
