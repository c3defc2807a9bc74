"""`offmap.fit` on models with a will of their own: refused or reported, by name; never silently wrong."""

from __future__ import annotations

import copy
import logging
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import offmap
from offmap.data import Rows
from offmap.errors import ConfigError, DataError, ModelError
from offmap.likelihoods import Gaussian
from offmap.maxwent import solve as maxwent
from offmap.posterior.predictive import Stochastic
from trained import inputs, quick, regression, regressor
from zoo import Through

TRAIN, VALID = regression(40, 0), regression(40, 1)


class Wrapped(nn.Module):
    """A good model, with something done on the way."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.net = regressor(seed)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class Dropping(Wrapped):
    def forward(self, x: Tensor) -> Tensor:
        return self.net(F.dropout(x))


class Counting(Wrapped):
    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.net(x)


class Drifting(Counting):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.calls


class Keeping(Wrapped):
    """Keeps its hidden layer, as models do that are made for explanations."""

    hidden: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.hidden = self.net[:2](x)
        return self.net[2](self.hidden)


class Monitoring(Wrapped):
    """Tracks the mean of its hidden layer, in place, for a dashboard."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.register_buffer("average", torch.zeros(12))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.net[:2](x)
        self.average.mul_(0.9).add_(0.1 * hidden.mean(0))
        return self.net[2](hidden)


class Spare(Wrapped):
    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.spare = nn.Linear(3, 1)


class Detached(Wrapped):
    def forward(self, x: Tensor) -> Tensor:
        return self.net[2](self.net[:2](x).detach())


def random_names(guard: offmap.Guard) -> list[str]:
    made = guard.predictive
    assert isinstance(made, Stochastic)
    return list(made.q.raw_scale)


def test_own_randomness_and_memory_are_refused_before_any_work():
    with pytest.raises(ModelError, match=r"Dropping draws its own randomness: `aten.bernoulli_` in the model itself\."):
        quick(Dropping(), TRAIN, VALID)
    with pytest.raises(ModelError, match=r"Drifting remembers them in `calls`\."):
        quick([Drifting(0), Drifting(1)], TRAIN, VALID)


@pytest.mark.parametrize("members", [1, 2])
@pytest.mark.parametrize("kind", [Counting, Keeping])
def test_harmless_memory_is_logged_noted_and_changes_nothing(kind: type[Wrapped], members: int, caplog: pytest.LogCaptureFixture):
    name = "calls" if kind is Counting else "hidden"
    note = f"Calls change `{name}`: harmless, as the outputs do not depend on it."
    nets = [kind(m) for m in range(members)]
    guard = quick(nets, TRAIN, VALID)
    plain = quick([Wrapped(m) for m in range(members)], TRAIN, VALID)
    assert [r.message for r in caplog.records if r.levelno == logging.WARNING] == [note]
    assert guard.notes == (note,)
    assert note in str(guard.summary())
    assert plain.notes == ()
    x = inputs(9, 5)
    torch.testing.assert_close(guard.score(x), plain.score(x), rtol=1e-4, atol=1e-6)
    assert torch.equal(guard.score(x), guard.score(x))
    assert all(getattr(net, name) is None or getattr(net, name) == 0 for net in nets)


def test_a_buffer_that_vmap_cannot_update_means_a_loop_and_is_said_when_a_loop_is_forbidden():
    guard = quick(Monitoring(), TRAIN, VALID)
    assert guard.predictive.model.chunk_size == 1  # pyright: ignore[reportAttributeAccessIssue]
    assert guard.notes == ("Calls change `average`: harmless, as the outputs do not depend on it.",)
    with pytest.raises(
        ModelError, match=r"`vmap` cannot run Monitoring \(output with shape.*\). Pass `chunk_size=1` to loop over draws"
    ):
        quick(Monitoring(), TRAIN, VALID, chunk_size=4)


def test_a_model_that_keeps_what_it_computed_can_be_moved_copied_and_saved(tmp_path: Any):
    net, x = Keeping(), inputs(9, 5)
    guard = quick(net, TRAIN, VALID)
    before = guard.score(x)
    guard.save(tmp_path / "guard")
    for other in (guard.to("cpu"), copy.deepcopy(guard), offmap.load(tmp_path / "guard", net)):
        assert torch.equal(other.score(x), before)


def test_a_parameter_that_no_input_reaches_stays_fixed_and_out_of_the_entropy(caplog: pytest.LogCaptureFixture):
    guard, plain = quick(Spare(), TRAIN, VALID), quick(Wrapped(), TRAIN, VALID)
    note = (
        "No input reaches `spare.weight`, `spare.bias`: left out of the random parameters. "
        "Drop them from the model, or check `output_fn`."
    )
    assert caplog.messages == [note]
    assert note in str(guard.summary())
    assert random_names(guard) == random_names(plain)
    assert guard.history.final_entropy == plain.history.final_entropy
    rows = {row["parameter"]: row["random"] for row in guard.summary().rows}
    assert rows["net.0.weight"]
    assert not rows["spare.weight"]
    message = "Expected `params` to pick a parameter that some input reaches, but 'spare.weight' picks `spare.weight` alone"
    with pytest.raises(ConfigError, match=message):
        quick(Spare(), TRAIN, VALID, params="spare.weight")


def test_unreached_parameters_differ_between_members_and_survive_a_file(tmp_path: Any):
    nets = [Spare(0), Spare(1)]
    guard = quick(nets, TRAIN, VALID)
    guard.save(tmp_path / "guard")
    again = offmap.load(tmp_path / "guard", nets)
    x = inputs(9, 5)
    assert torch.equal(again.score(x), guard.score(x))
    assert again.notes == guard.notes


def test_what_gradients_do_not_reach_is_random_and_noted():
    guard = quick(Detached(), TRAIN, VALID)
    assert guard.notes == (
        "Gradients do not reach `net.0.weight`, `net.0.bias`: random, but only solver='closed-form' can fit them.",
    )
    assert len(random_names(guard)) == 4


def test_rows_that_depend_on_their_company_are_noted():
    net = nn.Sequential(nn.BatchNorm1d(3, affine=False, track_running_stats=False), regressor())
    assert (
        quick(net, TRAIN, VALID)
        .notes[0]
        .startswith("Outputs depend on the other rows of the batch: 2 alone give other outputs than among 8.")
    )


def test_frozen_parameters_are_random_like_the_others():
    frozen = regressor().requires_grad_(False)
    partly = regressor()
    partly[0].weight.requires_grad_(False)
    x = inputs(9, 5)
    guards = [quick(net, TRAIN, VALID, solver="refine", steps=4) for net in (regressor(), frozen, partly)]
    assert all(random_names(g) == ["0.weight", "0.bias", "2.weight", "2.bias"] for g in guards)
    assert all(torch.equal(g.score(x), guards[0].score(x)) for g in guards)


@pytest.mark.parametrize(
    ("params", "names"),
    [
        ("all", ["0.weight", "0.bias", "2.weight", "2.bias"]),
        ("matrices", ["0.weight", "2.weight"]),
        ("last-layer", ["2.weight", "2.bias"]),
    ],
)
def test_words_choose_what_is_random(params: str, names: list[str]):
    assert random_names(quick([regressor(0), regressor(1)], TRAIN, VALID, params=params)) == names
    made = maxwent.fit(
        regressor(), Rows(*TRAIN, 20, "train"), Rows(*VALID, 20, "valid"), likelihood=Gaussian(noise=torch.ones(1)),
        config=maxwent.Config(solver="closed-form", risk_draws=4, params=params),
    )  # fmt: skip
    assert list(made.q.raw_scale) == names


# --------------------------------------------------------------------------------------------------------------- copies


@pytest.mark.parametrize("members", [1, 3])
def test_a_fit_copies_the_weights_of_one_model_once_and_stacks_those_of_several(members: int, monkeypatch: pytest.MonkeyPatch):
    whole: list[str] = []
    deepcopy = copy.deepcopy

    def count_copies(thing: Any, memo: Any = None) -> Any:
        if isinstance(thing, Wrapped) and not any(id(p) in (memo or {}) for p in thing.parameters()):
            whole.append(type(thing).__name__)
        return deepcopy(thing, memo)

    monkeypatch.setattr(copy, "deepcopy", count_copies)
    quick([Wrapped(m) for m in range(members)], TRAIN, VALID)
    assert whole == (["Wrapped"] if members == 1 else [])


def test_the_validation_rows_pass_the_base_model_once_before_the_fit(monkeypatch: pytest.MonkeyPatch):
    seen: list[int] = []

    class Watching(Wrapped):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(len(x))
            return self.net(x)

    class Begun(Exception): ...

    def begun(*args: Any, **kwargs: Any) -> None:
        raise Begun

    monkeypatch.setattr("offmap.maxwent.solve.fit", begun)
    with pytest.raises(Begun):
        quick(Watching(), TRAIN, regression(1000, 1), batch_size=1000, chunk_size=1)
    assert sum(n > 100 for n in seen) == 1


# ------------------------------------------------------------------------------------------------------- dtype and device


def test_members_of_two_dtypes_or_devices_are_refused():
    message = r"Expected members of one dtype, but `0.weight` is torch.float32 in member 0 and torch.float64 in member 1. Convert"
    with pytest.raises(ModelError, match=message):
        quick([regressor(0), regressor(1).double()], TRAIN, VALID)
    with pytest.raises(ModelError, match="Sequential is on the meta device, without numbers"):
        quick([regressor(0), regressor(1).to("meta")], TRAIN, VALID)


def test_a_model_on_two_devices_is_refused():
    net = regressor()
    net[2].to("meta")
    with pytest.raises(
        ModelError, match="one device, but it has `0.weight`, `0.bias` on cpu; `2.weight`, `2.bias` on meta. Move it"
    ):
        quick(net, TRAIN, VALID)


def test_a_half_precision_model_that_the_cpu_cannot_run_gets_a_remedy():
    net = Through(lambda s, x: s.net(torch.linalg.qr(x)[0]), net=regressor()).half()
    with pytest.raises(
        ModelError, match=r"Through failed on inputs of shape \(2, 3\): .*cannot run it in torch.float16: fit a copy"
    ):
        quick(net, TRAIN, VALID)


@pytest.mark.parametrize("solver", ["closed-form", "refine"])
def test_a_fit_in_inference_mode_is_the_fit_outside_of_it(solver: Any):
    x = inputs(9, 5)
    expected = quick(regressor(), TRAIN, VALID, solver=solver, steps=4).score(x)
    with torch.inference_mode():
        guard = quick(regressor(), regression(40, 0), regression(40, 1), solver=solver, steps=4)
        assert torch.equal(guard.score(x), expected)
    assert torch.equal(guard.score(x), expected)


def test_seed_and_draws_may_be_numpy_integers():
    guard = quick(regressor(), TRAIN, VALID, seed=np.int64(3), draws=np.int32(6))
    same = quick(regressor(), TRAIN, VALID, seed=3, draws=6)
    assert (type(guard.seed), type(guard.draws)) == (int, int)
    assert torch.equal(guard.score(inputs(9, 5)), same.score(inputs(9, 5)))
    with pytest.raises(ConfigError, match=r"Expected `seed` to be a whole number, but got np.float64\(3.0\)"):
        quick(regressor(), TRAIN, VALID, seed=np.float64(3))
    with pytest.raises(ConfigError, match=r"Expected `draws` to be a whole number ≥ 2, but got np.int64\(1\)"):
        quick(regressor(), TRAIN, VALID, draws=np.int64(1))


@pytest.mark.parametrize("score", ["default", "paper"])
def test_targets_whose_variance_overflows_have_finite_intervals_and_scores(score: str, tmp_path: Any):
    unit, large = regressor(), regressor()
    scale = 1e30
    with torch.no_grad():
        large[-1].weight.mul_(scale)
        large[-1].bias.mul_(scale)
    guards = [
        quick(net, *((x, y * factor) for x, y in (TRAIN, VALID)), score=score)
        for net, factor in ((unit, 1.0), (large, scale))
    ]  # fmt: skip
    x = torch.cat([inputs(8, 5), 30 * inputs(8, 6)])
    small, huge = (guard(x) for guard in guards)
    assert torch.equal(huge.ood, small.ood)
    assert bool(huge.score.isfinite().all())
    assert torch.equal(huge.score.argsort(), small.score.argsort())
    ends, y = guards[1].interval(VALID[0], 0.9), VALID[1] * scale
    assert ends.upper.dtype == torch.float32
    assert bool((ends.upper < 2 * y.abs().max()).all())
    assert ((ends.lower <= y) & (y <= ends.upper)).float().mean() >= 0.9
    guards[1].save(tmp_path / "guard.safetensors")
    assert torch.equal(offmap.load(tmp_path / "guard.safetensors", large).score(x), huge.score)
    with pytest.raises(
        DataError, match=r"targets with a deviation up to 1e\+33, but got .*e\+36, .*Scale the targets, or fit `model.d"
    ):
        quick(unit, *((x, y * 1e36) for x, y in (TRAIN, VALID)))
