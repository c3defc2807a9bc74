"""A check of a model finds what would make results wrong, names it, and leaves everything as it was."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from offmap.errors import ModelError
from offmap.model.forward import copy_model, first_tensor
from offmap.model.inspect import ROWS, Findings, check_model
from offmap.model.params import as_models
from zoo import ZOO, Case, Through

X = torch.randn(20, 3, generator=torch.Generator().manual_seed(0))


def check(net: nn.Module, x: Any = X, output_fn: Callable[[Any], Tensor] = first_tensor) -> Findings:
    return check_model(copy_model(net), x, output_fn)


def through(forward: Callable[..., Any], **layers: Any) -> nn.Module:
    torch.manual_seed(0)
    return Through(forward, **{"a": nn.Linear(3, 4), "b": nn.Linear(4, 2)} | layers)


@pytest.mark.parametrize("case", ZOO.values(), ids=ZOO)
def test_nothing_is_wrong_with_the_zoo(case: Case):
    assert check(case.build(), case.inputs(12), case.output_fn) == Findings()


# ------------------------------------------------------------------------------------------------------- own randomness


class Noisy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 1e-6 * torch.randn_like(x)


class Forgotten(nn.Module):
    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.p)


RANDOM: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "dropout left on": (
        lambda: nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.ReLU(), Forgotten()), nn.Linear(4, 2)),
        r"Sequential draws its own randomness: `aten.bernoulli_` in `1.1` \(Forgotten\). Switch it off in evaluation mode, for "
        r"example with `F.dropout\(x, training=self.training\)`",
    ),
    "a little noise": (lambda: nn.Sequential(nn.Linear(3, 4), Noisy()), r"`aten.randn_like` in `1` \(Noisy\)\."),
    "in the root": (
        lambda: through(lambda s, x: s.b(s.a(x) * (torch.rand(4) > 0.5))), "Through draws .*: `aten.rand` in the model itself",
    ),
    "two sources": (
        lambda: nn.Sequential(nn.Linear(3, 4), Noisy(), Forgotten()),
        r"`aten.randn_like` in `1` \(Noisy\), `aten.bernoulli_` in `2` \(Forgotten\)\.",
    ),
    "attention": (
        lambda: through(lambda s, x: s.b(F.scaled_dot_product_attention(*[s.a(x)[:, None]] * 3, dropout_p=0.5)[:, 0])),
        "`aten.bernoulli_` in the model itself",
    ),
    "not torch's": (lambda: through(lambda s, x: s.b(s.a(x)) * random.random()), "not with an operator of torch"),
}  # fmt: skip


@pytest.mark.parametrize("case", RANDOM)
def test_a_model_with_its_own_randomness_is_refused_and_the_source_named(case: str):
    build, message = RANDOM[case]
    with pytest.raises(ModelError, match="Expected the same output for the same inputs, but .*" + message):
        check(build())


@pytest.mark.parametrize(
    "net",
    [
        nn.Sequential(nn.Linear(3, 4), Forgotten(0.0)),
        through(lambda s, x: s.b(s.a(x)) + 0 * torch.randn(2)),
        through(lambda s, x: s.b(s.a(x)) * torch.rand(2, generator=torch.Generator().manual_seed(0))),
    ],
    ids=["no rate", "no weight", "seeded in the call"],
)
def test_randomness_without_an_effect_is_none(net: nn.Module):
    assert check(net) == Findings()


@pytest.mark.parametrize("net", [nn.Linear(3, 2), RANDOM["two sources"][0]()], ids=["fine", "refused"])
def test_the_global_random_state_is_left_alone(net: nn.Module):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    with contextlib.suppress(ModelError):
        check(net)
    assert torch.equal(torch.get_rng_state(), before)


# --------------------------------------------------------------------------------------------------------------- memory


def counts(how: str, used: bool) -> nn.Module:
    """Counts its calls in a buffer or an attribute, and maybe adds the count to its output."""

    def forward(s: Any, x: Tensor) -> Tensor:
        if how == "in place":
            s.calls.add_(1)
        else:
            s.calls = s.calls + 1
        return s.b(s.a(x)) + (s.calls if used else 0)

    net = through(forward)
    if how == "a number":
        net.calls = 0
    elif how == "an attribute":
        net.calls = torch.zeros(())
    else:
        net.register_buffer("calls", torch.zeros(()))
    return net


@pytest.mark.parametrize("how", ["in place", "another tensor", "an attribute", "a number"])
def test_memory_that_shows_is_refused_and_memory_that_does_not_is_noted(how: str):
    message = (
        "Expected outputs that do not depend on earlier calls, but Sequential remembers them in `0.calls`. Update such state in"
    )
    with pytest.raises(ModelError, match=message):
        check(nn.Sequential(counts(how, used=True)))
    net = copy_model(counts(how, used=False))
    found = check_model(net, X)
    assert found == Findings(changing=("calls",))
    assert found.notes == ("Calls change `calls`: harmless, as the outputs do not depend on it.",)
    assert net.calls == 0


def test_a_memory_of_the_first_rows_is_refused():
    """As layers do that set their scale by the first batch: every later call repeats, and still depends on the first."""

    def forward(s: Any, x: Tensor) -> Tensor:
        if s.scale is None:
            s.scale = x.std(0)
        return s.b(s.a(x / s.scale))

    with pytest.raises(ModelError, match="Through remembers them in `scale`"):
        check(through(forward, scale=None))


def test_running_statistics_that_are_updated_in_evaluation_mode_are_refused():
    class Norm(nn.BatchNorm1d):
        def forward(self, input: Tensor) -> Tensor:
            self.running_mean.lerp_(input.mean(0), 0.1)
            return super().forward(input)

    with pytest.raises(ModelError, match=r"Sequential remembers them in `1.running_mean`\."):
        check(nn.Sequential(nn.Linear(3, 4), Norm(4)))


def test_a_cache_that_depends_on_nothing_is_fine():
    def forward(s: Any, x: Tensor) -> Tensor:
        if x.shape[1] not in s.cache:
            s.cache[x.shape[1]] = torch.arange(x.shape[1]).cos()
        return s.b(s.a(x + s.cache[x.shape[1]]))

    net = copy_model(through(forward, cache={}))
    assert check_model(net, X) == Findings()
    assert net.cache == {}


def test_a_cache_of_weights_is_refused():
    """Its second draw of weights would give the outputs of the first."""

    def forward(s: Any, x: Tensor) -> Tensor:
        if s.unit is None:
            s.unit = F.normalize(s.a.weight)
        return s.b(F.linear(x, s.unit))

    with pytest.raises(
        ModelError, match="computes anew from its weights, but Through keeps what it made of them in `unit`. Do so in"
    ):
        check(through(forward, unit=None))


def test_what_a_model_keeps_of_its_last_call_is_noted():
    def forward(s: Any, x: Tensor) -> Tensor:
        s.last = s.a(x)
        return s.b(s.last)

    net = copy_model(through(forward, last=None))
    assert check_model(net, X).changing == ("last",)
    assert net.last is None


def test_a_parameter_that_calls_rewrite_is_noted_and_left_as_it_was():
    net = copy_model(Through(lambda s, x: s.b(s.table(x).sum(1)), table=nn.Embedding(7, 4, max_norm=0.1), b=nn.Linear(4, 2)))
    before = net.table.weight.clone()
    found = check_model(net, torch.arange(20).reshape(10, 2) % 7)
    assert found == Findings(changing=("table.weight",))
    assert torch.equal(net.table.weight, before)


# -------------------------------------------------------------------------------------------------------------- devices


def test_parameters_and_buffers_on_two_devices_are_refused_by_name():
    net = through(lambda s, x: s.b(s.a(x)), shift=torch.zeros(2, device="meta"))
    message = (
        r"Expected a model on one device, but it has `a.weight`, `a.bias`, `b.weight`, `b.bias` on cpu; `shift` on meta. "
        r"Move it, for example with `model.to\('cpu'\)`"
    )
    with pytest.raises(ModelError, match=message):
        as_models(net)


def test_a_model_without_numbers_is_refused():
    with pytest.raises(ModelError, match="Linear is on the meta device, without numbers. Load its weights"):
        as_models(nn.Linear(3, 2, device="meta"))


def test_an_output_on_another_device_is_refused():
    message = "Expected an output on the device of the parameters, cpu, but Through returns it on meta. Keep the model"
    with pytest.raises(ModelError, match=message):
        check(through(lambda s, x: s.b(s.a(x)).to("meta")))


# ---------------------------------------------------------------------------------------------------------------- reach


def detach_forward(s: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        h = s.a(x)
    return s.b(h)


def expert(s: Any, x: Tensor) -> Tensor:
    """Rows past the first check go through `c` as well."""
    return s.b(s.a(x)) + (s.c(x) if bool((x == X[ROWS + 1]).all(1).any()) else 0)


REACH: dict[str, tuple[Callable[..., Any], Findings]] = {
    "a layer that is not used": (lambda s, x: s.b(s.a(x)), Findings(unreached=("c.weight", "c.bias"))),
    "a head that is not selected": (lambda s, x: (s.b(s.a(x)), s.c(x)), Findings(unreached=("c.weight", "c.bias"))),
    "a branch times zero": (lambda s, x: s.b(s.a(x)) + 0 * s.c(x), Findings()),
    "behind no_grad": (lambda s, x: detach_forward(s, x) + s.c(x), Findings(hidden=("a.weight", "a.bias"))),
    "behind detach": (lambda s, x: s.b(s.a(x)) + s.c(x).detach(), Findings(hidden=("c.weight", "c.bias"))),
    "almost nothing, detached": (lambda s, x: s.b(s.a(x)) + 1e-6 * s.c(x).detach(), Findings(hidden=("c.weight", "c.bias"))),
    "both": (lambda s, x: detach_forward(s, x), Findings(unreached=("c.weight", "c.bias"), hidden=("a.weight", "a.bias"))),
    "an expert for later rows": (expert, Findings()),
}


@pytest.mark.parametrize("case", REACH)
def test_parameters_without_a_reader_or_a_gradient_are_told_apart(case: str):
    forward, expected = REACH[case]
    net = copy_model(through(forward, c=nn.Linear(3, 2)))
    found = check_model(net, X)
    assert (found.unreached, found.hidden) == (expected.unreached, expected.hidden)
    assert not any(p.requires_grad for p in net.parameters())


def test_a_model_that_runs_without_gradients_only_is_all_hidden():
    def forward(s: Any, x: Tensor) -> Tensor:
        with torch.inference_mode():
            return s.b(s.a(x))

    assert check(through(forward)).hidden == ("a.weight", "a.bias", "b.weight", "b.bias")


def test_select_decides_what_is_reached():
    net = through(lambda s, x: {"left": s.a(x), "right": s.b(x)}, b=nn.Linear(3, 2))
    assert check(net, output_fn=lambda out: out["left"]).unreached == ("b.weight", "b.bias")
    assert check(net, output_fn=lambda out: out["right"]).unreached == ("a.weight", "a.bias")


def test_notes_name_what_is_unreached_and_what_is_hidden():
    notes = Findings(unreached=tuple("abcdef"), hidden=("g",)).notes
    assert notes == (
        "No input reaches `a`, `b`, `c`, `d` and 2 more: left out of the random parameters. Drop them from the model, or check "
        "`output_fn`.",
        "Gradients do not reach `g`: random, but only solver='closed-form' can fit them.",
    )


# -------------------------------------------------------------------------------------------------------------- other rows


@pytest.mark.parametrize(
    "net",
    [
        nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, track_running_stats=False), nn.Linear(4, 2)),
        through(lambda s, x: s.b(torch.softmax((h := s.a(x)) @ h.mT, 1) @ h)),
        through(lambda s, x: s.b(s.a(x)) / x.shape[0]),
    ],
    ids=["batch statistics", "attention across rows", "number of rows"],
)
def test_rows_that_depend_on_the_other_rows_of_the_batch_are_noted(net: nn.Module):
    found = check(net)
    assert found.rows == (2, 8)
    assert found.notes[-1].startswith(
        "Outputs depend on the other rows of the batch: 2 alone give other outputs than among 8. Scores depend on the"
    )


# ----------------------------------------------------------------------------------------------------------------- cost


def test_a_model_that_fails_says_so_and_half_precision_gets_its_remedy():
    def fails(s: Any, x: Tensor) -> Tensor:
        raise RuntimeError("not implemented for 'Half'")

    with pytest.raises(
        ModelError, match=r"Through failed on inputs of shape \(2, 3\): not implemented for 'Half'.*trained on\.$"
    ):
        check(through(fails))
    message = r"not implemented for 'Half'.*Or the CPU cannot run it in torch.float16: fit a copy in float32, `net.float\(\)`"
    with pytest.raises(ModelError, match=message):
        check(through(fails).half(), X.half())


def test_a_check_calls_the_model_a_handful_of_times_on_few_rows():
    seen: list[int] = []

    def forward(s: Any, x: Tensor) -> Tensor:
        seen.append(x.shape[0])
        return s.b(s.a(x))

    check(through(forward), torch.randn(500, 3))
    assert len(seen) <= 8
    assert max(seen) <= ROWS


class Meter(TorchDispatchMode):
    """The most numbers that large results of operators held at a time, beside the parameters of `net`."""

    def __init__(self, net: nn.Module, least: int) -> None:
        super().__init__()
        self.own = {StorageWeakRef(p.untyped_storage()) for p in net.parameters()}
        self.seen: dict[StorageWeakRef, int] = {}
        self.least, self.most = least, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.numel() >= self.least:
            self.seen[StorageWeakRef(result.untyped_storage())] = result.numel()
            self.most = max(self.most, self.alive())
        return result

    def alive(self) -> int:
        return sum(size for ref, size in self.seen.items() if ref not in self.own and not ref.expired())


def test_never_more_than_one_other_copy_of_the_weights_is_held():
    side = 64
    net = copy_model(nn.Sequential(*itertools.chain(*[(nn.Linear(side, side, bias=False), nn.ReLU()) for _ in range(8)])))
    copy = sum(p.numel() for p in net.parameters())
    with Meter(net, least=side**2) as meter:
        check_model(net, torch.randn(8, side))
    # and one layer in the making
    assert copy <= meter.most <= copy + side**2
    assert meter.alive() == 0
