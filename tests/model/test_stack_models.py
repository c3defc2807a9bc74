"""Name-keyed weights, and the private copy of a model."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from offmap.errors import ConfigError, ModelError
from offmap.model.forward import copy_model, forward
from offmap.model.params import all_params, select_params, stack_models
from zoo import ZOO


def test_select_gives_detached_parameters_under_the_models_names():
    net = ZOO["mlp"].build()
    chosen = select_params(net)
    assert list(chosen) == [n for n, _ in net.named_parameters()]
    assert not any(w.requires_grad for w in chosen.values())


def test_tied_weights_appear_once_under_their_first_name():
    assert [n for n in select_params(ZOO["tied"].build()) if n.endswith("weight")] == ["0.weight", "4.weight"]


@pytest.mark.parametrize(
    ("params", "names"),
    [
        (None, ["0.weight", "0.bias", "2.weight", "4.weight", "4.bias"]),
        ("*.weight", ["0.weight", "2.weight", "4.weight"]),
        (["0.*", "*.bias"], ["0.weight", "0.bias", "4.bias"]),
        (lambda name, tensor: tensor.ndim == 1, ["0.bias", "4.bias"]),
    ],
    ids=["all", "pattern", "patterns", "predicate"],
)
def test_params_picks_by_pattern_or_predicate(params: object, names: list[str]):
    assert list(select_params(ZOO["mlp"].build(), params)) == names  # pyright: ignore[reportArgumentType]


def test_where_that_picks_nothing_is_refused():
    with pytest.raises(
        ConfigError, match=r"Expected `params` to pick at least one parameter, but 'fc\*' fits none of \['0.weight'"
    ):
        select_params(ZOO["mlp"].build(), "fc*")


def test_a_model_without_floating_parameters_is_refused():
    whole = nn.Module()
    whole.register_parameter("n", nn.Parameter(torch.tensor([1, 2]), requires_grad=False))
    for net in (nn.ReLU(), whole):
        with pytest.raises(
            ModelError, match=f"Expected a model with floating-point parameters, but {type(net).__name__} has none"
        ):
            select_params(net)


def test_whole_number_parameters_are_never_random():
    net = nn.Linear(2, 1)
    net.register_parameter("steps", nn.Parameter(torch.tensor([3]), requires_grad=False))
    assert list(select_params(net)) == ["weight", "bias"]


def test_what_is_not_random_is_fixed_in_the_stack_and_members_are_read_from_it():
    nets = [ZOO["buffers"].build(m) for m in range(3)]
    held = stack_models(nets, "a.*")
    assert sorted(held.mean) == ["a.bias", "a.weight"]
    assert sorted(held.fixed) == ["b.bias", "b.weight", "centre", "offset", "spread"]
    for m, net in enumerate(nets):
        assert all(torch.equal(held.weights(m)[n], t) for n, t in all_params(net).items())


def test_a_private_copy_is_in_evaluation_mode_and_out_of_reach():
    net = ZOO["partly_frozen"].build()
    twin = copy_model(net)
    before = {n: t.clone() for n, t in twin.state_dict().items()}
    with torch.no_grad():
        for t in (*net.parameters(), *net.buffers()):
            t.add_(1)
    assert not any(m.training for m in twin.modules())
    assert not any(p.requires_grad for p in twin.parameters())
    assert all(torch.equal(t, before[n]) for n, t in twin.state_dict().items())
    assert [m.training for m in net] == [False, True]


@pytest.mark.parametrize("name", ["tied", "lstm", "batchnorm", "partly_frozen"])
def test_a_sharing_copy_reads_the_models_parameters_and_has_all_else_to_itself(name: str):
    net = ZOO[name].build()
    frozen = {n: p.requires_grad for n, p in net.named_parameters()}
    twin = copy_model(net, share=True)
    assert all(p.data_ptr() == q.data_ptr() and p is not q for p, q in zip(net.parameters(), twin.parameters(), strict=True))
    assert all(b.data_ptr() != c.data_ptr() for b, c in zip(net.buffers(), twin.buffers(), strict=True))
    assert not any(p.requires_grad for p in twin.parameters())
    assert frozen == {n: p.requires_grad for n, p in net.named_parameters()}
    assert torch.equal(twin(x := ZOO[name].inputs()), copy_model(net)(x))


def test_members_are_held_in_one_stack_apart_from_the_users_models():
    nets = [ZOO["partly_frozen"].build(m) for m in range(2)]
    held = stack_models(nets, "*weight")
    stacked = held.mean | held.fixed
    assert all(p.data_ptr() == stacked[n].data_ptr() for n, p in held.module.named_parameters())
    assert not {p.data_ptr() for net in nets for p in net.parameters()} & {t.data_ptr() for t in stacked.values()}
    assert torch.equal(held.module(x := ZOO["partly_frozen"].inputs()), copy_model(nets[0])(x))


def test_a_copy_of_a_model_made_in_inference_mode_takes_gradients():
    with torch.inference_mode():
        net = nn.Linear(3, 2)
    weight = copy_model(net).weight
    assert not weight.is_inference()
    (torch.ones(1, 3) @ weight.requires_grad_().mT).sum().backward()


def test_copies_keep_ties():
    twin = copy_model(ZOO["tied"].build())
    assert twin[0].weight is twin[2].weight


@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated")
def test_a_model_that_was_called_with_old_style_weight_norm_can_be_copied():
    net = nn.utils.weight_norm(nn.Linear(3, 2))
    net(torch.zeros(1, 3))  # leaves a non-leaf tensor behind, which deepcopy refuses
    x = torch.randn(4, 3)
    assert torch.equal(copy_model(net)(x), net(x))


def test_a_model_that_cannot_be_copied_is_refused_with_the_reason():
    net = nn.Linear(1, 1)
    net.lock = threading.Lock()
    with pytest.raises(ModelError, match="Expected a model that `copy.deepcopy` can copy, but Linear raised: cannot pickle"):
        copy_model(net)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (nn.Sequential(nn.Linear(2, 4)), r"`0.weight` is \(3, 2\) in member 0 and \(4, 2\) in member 1"),
        (nn.Sequential(nn.Linear(2, 3, bias=False)), r"`0.bias` is \(3,\) in member 0 and nothing in member 1"),
        (nn.Sequential(nn.Linear(2, 3), nn.PReLU()), r"`1.weight` is nothing in member 0 and \(1,\) in member 1"),
    ],
    ids=["shape", "less", "more"],
)
def test_members_of_two_architectures_are_refused_with_the_first_difference(other: nn.Module, message: str):
    with pytest.raises(ModelError, match="Expected members of one architecture, but " + message):
        stack_models([nn.Sequential(nn.Linear(2, 3)), other])


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            nn.Linear(3, 2).double(),
            r"one dtype, but `weight` is torch.float32 in member 0 and torch.float64 in member 2. Convert",
        ),
        (nn.Linear(3, 2, device="meta"), r"one device, but `weight` is cpu in member 0 and meta in member 2. Move them"),
    ],
    ids=["dtype", "device"],
)
def test_members_of_two_dtypes_or_devices_are_refused(other: nn.Module, message: str):
    with pytest.raises(ModelError, match="Expected members of " + message):
        stack_models([nn.Linear(3, 2), nn.Linear(3, 2), other])


def test_buffers_outside_the_state_dict_are_compared_too():
    nets = [nn.Linear(3, 2), nn.Linear(3, 2)]
    for size, net in enumerate(nets):
        net.register_buffer("table", torch.zeros(size), persistent=False)
    with pytest.raises(ModelError, match=r"one architecture, but `table` is \(0,\) in member 0 and \(1,\) in member 1"):
        stack_models(nets)


@pytest.mark.parametrize("name", ["buffers", "batchnorm", "tied"])
def test_what_differs_between_members_is_kept_for_each(name: str):
    nets = [ZOO[name].build(m) for m in range(2)]
    held = stack_models(nets, "*weight")
    for m, net in enumerate(nets):
        own = dict(net.named_parameters()) | dict(net.named_buffers())
        assert held.weights(m).keys() == own.keys()
        assert all(torch.equal(t, own[n]) for n, t in held.weights(m).items())


@pytest.mark.parametrize("name", ["tied", "repeated"])
def test_a_call_with_other_weights_leaves_a_model_with_ties_as_it_was(name: str):
    # pytorch issue 164759: functional_call itself leaves a repeated module with the weights of the call
    net, x = copy_model(ZOO[name].build()), ZOO[name].inputs()
    before, kept = net(x), dict(net.named_parameters())
    weights = {n: torch.stack([w + 1, w + 2]) for n, w in select_params(net).items()}
    for loop in (True, False):
        forward(net, weights, x, loop=loop)
        assert all(p is kept[n] for n, p in net.named_parameters())
        assert torch.equal(net(x), before)
