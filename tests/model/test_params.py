"""Words for `params`, and the last layer as the forward pass has it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from offmap.errors import ConfigError
from offmap.model.forward import call, copy_model, first_tensor
from offmap.model.params import choose, detach_params, last_layer, select_params, stack_models
from zoo import ZOO, Case, Through

X = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))


def tied_head() -> nn.Module:
    """A language model's: the table of the inputs is the matrix of the outputs."""

    def forward(s: Any, x: Tensor) -> Tensor:
        return F.linear(s.body(F.embedding(x, s.table)).tanh().mean(1), s.head.weight, s.head.bias)

    net = Through(forward, body=nn.Linear(4, 4), head=nn.Linear(4, 7))
    net.table = net.head.weight
    return net


def tied_and_read_again() -> nn.Module:
    """The matrix of the hidden layer is read last of all, for an output that is not selected."""

    def forward(s: Any, x: Tensor) -> Any:
        h = s.a(x).tanh()
        return s.b(h), F.linear(h, s.a.weight.mT)

    return Through(forward, a=nn.Linear(3, 4), b=nn.Linear(4, 2))


def registered_backwards() -> nn.Module:
    return Through(lambda s, x: s.first(s.second(x).relu()), first=nn.Linear(4, 2), second=nn.Linear(3, 4))


def bare_head() -> nn.Module:
    weight, bias = nn.Parameter(torch.randn(4, 2)), nn.Parameter(torch.randn(2))
    return Through(lambda s, x: torch.softmax(s.bias + s.a(x).tanh() @ s.weight, -1), weight=weight, bias=bias, a=nn.Linear(3, 4))


def two_heads() -> nn.Module:
    return Through(lambda s, x: (s.b(h := s.a(x).tanh()), s.c(h)), a=nn.Linear(3, 4), b=nn.Linear(4, 2), c=nn.Linear(4, 5))


LAST: dict[str, tuple[Callable[[], nn.Module], Any, Callable[[Any], Tensor], list[str]]] = {
    "registered backwards": (registered_backwards, X, first_tensor, ["first.weight", "first.bias"]),
    "bare, then a softmax": (bare_head, X, first_tensor, ["weight", "bias"]),
    "tied": (tied_head, torch.arange(12).reshape(6, 2) % 7, first_tensor, ["table", "head.bias"]),
    "tied, read again": (tied_and_read_again, X, first_tensor, ["b.weight", "b.bias"]),
    "first of two heads": (two_heads, X, first_tensor, ["b.weight", "b.bias"]),
    "second of two heads": (two_heads, X, lambda out: out[1], ["c.weight", "c.bias"]),
    "two heads in a row": (
        lambda: Through(
            lambda s, x: torch.cat([s.b(s.a(x)), s.c(s.a(x)).exp()], 1), a=nn.Linear(3, 4), b=nn.Linear(4, 1), c=nn.Linear(4, 1)
        ),
        X, first_tensor, ["b.weight", "b.bias", "c.weight", "c.bias"],
    ),
    "a wide and a deep part": (
        lambda: Through(lambda s, x: s.b(x) + s.c(s.a(x).relu()), a=nn.Linear(3, 4), b=nn.Linear(3, 2), c=nn.Linear(4, 2)),
        X, first_tensor, ["b.weight", "b.bias", "c.weight", "c.bias"],
    ),
    "written into one tensor": (
        lambda: Through(
            lambda s, x: x.new_zeros(len(x), 2).index_copy(1, torch.tensor([1]), s.b(s.a(x))),
            a=nn.Linear(3, 4), b=nn.Linear(4, 1),
        ),
        X, first_tensor, ["b.weight", "b.bias"],
    ),
    "a scale after it": (lambda: nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4)), X, first_tensor, ["0.weight", "0.bias"]),
    "a root": (lambda: nn.Linear(3, 2, bias=False), X, first_tensor, ["weight"]),
    "positions": (
        lambda: Through(lambda s, x: s.b(s.a(x).mT.contiguous().mT), a=nn.Linear(3, 4), b=nn.Linear(4, 2)),
        torch.randn(5, 6, 3), first_tensor, ["b.weight", "b.bias"],
    ),
    "a convolution": (
        lambda: nn.Sequential(nn.Conv1d(2, 3, 2), nn.ReLU(), nn.Conv1d(3, 1, 2)), torch.randn(4, 2, 6), first_tensor,
        ["2.weight", "2.bias"],
    ),
    "groups, transposed": (
        lambda: nn.Sequential(nn.Conv1d(2, 4, 2, groups=2), nn.ConvTranspose1d(4, 2, 2)), torch.randn(4, 2, 6), first_tensor,
        ["1.weight", "1.bias"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", LAST)
def test_the_last_layer_is_the_last_product_on_the_way_to_the_output(case: str):
    build, x, output_fn, expected = LAST[case]
    torch.manual_seed(0)
    net = copy_model(build())
    before = {n: w.clone() for n, w in detach_params(net).items()}
    assert last_layer(net, x, output_fn) == expected
    assert list(choose(stack_models(net), x, "last-layer", output_fn).mean) == expected
    assert all(torch.equal(w, before[n]) for n, w in detach_params(net).items())


@pytest.mark.parametrize("case", ZOO.values(), ids=ZOO)
def test_a_change_of_the_last_layer_of_any_model_in_the_zoo_moves_its_output(case: Case):
    net = copy_model(case.build())
    names = last_layer(net, case.inputs(), case.output_fn)
    weights = detach_params(net)
    plain = call(net, weights, case.inputs(), case.output_fn)
    for name in names:
        assert not torch.equal(call(net, weights | {name: weights[name] + 0.5}, case.inputs(), case.output_fn), plain)
    assert sum(weights[name].ndim >= 2 for name in names) in (1, 2)


def test_a_model_without_a_product_has_no_last_layer():
    net = copy_model(nn.LayerNorm(3))
    with pytest.raises(
        ConfigError, match="Expected a matrix product on the way to the output for params='last-layer', but LayerNorm"
    ):
        last_layer(net, X)


@pytest.mark.parametrize(
    ("params", "names"),
    [
        ("all", ["0.weight", "0.bias", "2.weight", "4.weight", "4.bias"]),
        (None, ["0.weight", "0.bias", "2.weight", "4.weight", "4.bias"]),
        ("matrices", ["0.weight", "2.weight", "4.weight"]),
        ("last-layer", ["4.weight", "4.bias"]),
        (["last-layer", "0.b*"], ["0.bias", "4.weight", "4.bias"]),
        (["matrices", "0.bias"], ["0.weight", "0.bias", "2.weight", "4.weight"]),
        ("4.*", ["4.weight", "4.bias"]),
        (lambda name, tensor: tensor.shape == (8,), ["0.bias"]),
    ],
    ids=lambda v: "predicate" if callable(v) else str(v),
)
@pytest.mark.parametrize("members", [1, 2])
def test_words_patterns_and_predicates_choose(params: Any, names: list[str], members: int):
    nets = [ZOO["mlp"].build(m) for m in range(members)]
    stacked = choose(stack_models(nets), ZOO["mlp"].inputs(), params)
    assert list(stacked.mean) == names
    for m, net in enumerate(nets):  # what is not random is still there
        own = dict(net.named_parameters())
        assert all(torch.equal(stacked.weights(m).get(n, stacked.module.get_parameter(n)), p) for n, p in own.items())


def test_words_win_over_parameters_of_the_same_name():
    net = Through(lambda s, x: s.b(x) * s.all, b=nn.Linear(3, 2), all=nn.Parameter(torch.ones(2)))
    assert list(choose(stack_models(net), X, "all").mean) == ["all", "b.weight", "b.bias"]
    assert list(choose(stack_models(net), X, "al[l]").mean) == ["all"]


def test_patterns_that_fit_nothing_are_refused_as_ever():
    with pytest.raises(
        ConfigError, match=r"Expected `params` to pick at least one parameter, but 'lastlayer' fits none of \['weight'"
    ):
        choose(stack_models(nn.Linear(3, 2)), X, "lastlayer")
    with pytest.raises(
        ConfigError, match=r"a function or None, but got 3. The words \['all', 'matrices', 'last-layer'\] are patterns"
    ):
        choose(stack_models(nn.Linear(3, 2)), X, 3)  # pyright: ignore[reportArgumentType]


def test_the_last_layer_takes_a_forward_pass():
    with pytest.raises(ConfigError, match="Only `offmap.fit` finds 'last-layer', by a forward pass. Pass a"):
        select_params(nn.Linear(3, 2), "last-layer")


def test_what_no_input_reaches_stays_fixed():
    net = two_heads()
    stacked = choose(stack_models(net), X, unreached=["c.weight", "c.bias"])
    assert list(stacked.mean) == ["a.weight", "a.bias", "b.weight", "b.bias"]
    message = (
        r"Expected `params` to pick a parameter that some input reaches, but 'c.\*' picks `c.weight`, `c.bias` alone. Check `out"
    )
    with pytest.raises(ConfigError, match=message):
        choose(stack_models(net), X, "c.*", unreached=["c.weight", "c.bias"])


def test_one_row_tells_the_last_layer():
    assert list(choose(stack_models(ZOO["mlp"].build()), ZOO["mlp"].inputs(1), "last-layer").mean) == ["4.weight", "4.bias"]
