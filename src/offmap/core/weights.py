"""Name-keyed weights: select from a host, stack, take one, count. Tied weights appear once, under their first name."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatch
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from offmap._types import Weights
from offmap.errors import ConfigError, HostError

Where: TypeAlias = str | Sequence[str] | Callable[[str, Tensor], bool] | None
"""Which parameters are random: name patterns (fnmatch), a predicate on (name, tensor), or None for all."""


def copy_host(net: nn.Module) -> nn.Module:
    """A private copy of the host in evaluation mode, without gradients: what is done to the host later cannot reach it."""
    # weight norm and friends leave non-leaf tensors behind, which deepcopy refuses; hand it detached ones
    leftovers = [t for m in net.modules() for t in vars(m).values() if isinstance(t, Tensor) and not t.is_leaf]
    memo: dict[int, object] = {id(t): t.detach().clone() for t in leftovers}
    try:
        twin = copy.deepcopy(net, memo)
    except Exception as error:
        raise HostError(
            f"Expected a host that `copy.deepcopy` can copy, but {type(net).__name__} raised: {error}. "
            "Detach what the module keeps from its last call, or give it a `__deepcopy__`."
        ) from error
    return twin.eval().requires_grad_(False)


def chooser(where: Where) -> Callable[[str, Tensor], bool]:
    """The predicate on (name, tensor) that `where` stands for."""
    if where is None:
        return lambda name, tensor: True
    if callable(where):
        return where
    patterns: list[Any] = list(where) if isinstance(where, list | tuple) else [where]
    if not all(isinstance(pattern, str) for pattern in patterns):
        raise ConfigError(f"Expected `where` to be a pattern, a list of them, a function or None, but got {where!r}.")
    return lambda name, tensor: any(fnmatch(name, pattern) for pattern in patterns)


def select(net: nn.Module, where: Where = None) -> Weights:
    """Detached floating-point parameters of `net` that `where` picks, by name.

    >>> list(select(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1, bias=False)), where="*.weight"))
    ['0.weight', '1.weight']
    """
    floating = {n: p.detach() for n, p in net.named_parameters() if p.is_floating_point()}
    if not floating:
        raise HostError(f"Expected a host with floating-point parameters, but {type(net).__name__} has none.")
    wanted = chooser(where)
    chosen = {n: p for n, p in floating.items() if wanted(n, p)}
    if not chosen:
        raise ConfigError(f"Expected `where` to pick at least one parameter, but {where!r} fits none of {list(floating)}.")
    return chosen


def remainder(net: nn.Module, chosen: Mapping[str, Tensor]) -> Weights:
    """Everything else that a call of `net` reads: the other parameters, and the buffers."""
    everything = dict(net.named_parameters()) | dict(net.named_buffers())
    return {n: t.detach() for n, t in everything.items() if n not in chosen}


def with_ties(net: nn.Module, weights: Mapping[str, Tensor]) -> Weights:
    """The same weights under every name of a tied tensor, every place in the host once.

    `functional_call` can do this itself, but leaves a module that is reachable by two paths with the weights of the last call
    (pytorch issue 164759); so it is called with all names and `tie_weights=False`.
    """
    places: dict[int, list[str]] = {}
    for path, module in net.named_modules():
        for leaf, tensor in (*vars(module)["_parameters"].items(), *vars(module)["_buffers"].items()):
            places.setdefault(id(tensor), []).append(f"{path}.{leaf}" if path else leaf)
    result = dict(weights)
    for names in places.values():
        given = [name for name in names if name in weights]
        result.update({name: weights[given[0]] for name in names if given and name not in weights})
    return result


def stack(weights: Sequence[Mapping[str, Tensor]]) -> Weights:
    """Weights of several hosts of one architecture with a leading axis: M × {name: (...)} -> {name: (M, ...)}."""
    return {name: torch.stack([w[name] for w in weights]) for name in weights[0]}


def at(weights: Mapping[str, Tensor], index: int) -> Weights:
    """One entry of a stack: {name: (S, ...)} -> {name: (...)}."""
    return {name: tensor[index] for name, tensor in weights.items()}


def count(weights: Mapping[str, Tensor]) -> int:
    """How many numbers there are in one host's weights.

    >>> count({"weight": torch.zeros(3, 2), "bias": torch.zeros(3)})
    9
    """
    return sum(tensor.numel() for tensor in weights.values())


def same_architecture(nets: Sequence[nn.Module]) -> None:
    """Raise a HostError that names the first difference unless all hosts have the same names and shapes."""
    first = {n: tuple(t.shape) for n, t in nets[0].state_dict().items()}
    for position, net in enumerate(nets[1:], start=1):
        shapes = {n: tuple(t.shape) for n, t in net.state_dict().items()}
        for name in first | shapes:
            here, there = first.get(name, "nothing"), shapes.get(name, "nothing")
            if here != there:
                raise HostError(
                    f"Expected members of one architecture, but `{name}` is {here} in member 0 and {there} in "
                    f"member {position}. Fit them apart, or pass members built by one function."
                )
