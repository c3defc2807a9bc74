"""Name-keyed weights: select from a model, stack, take one, count. Tied weights appear once, under their first name."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatch
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from offmap._torch_private import child_table, tensor_tables
from offmap._types import Weights
from offmap.errors import ConfigError, ModelError

ParamSelection: TypeAlias = str | Sequence[str] | Callable[[str, Tensor], bool] | None
"""Which parameters are random: a word, name patterns (fnmatch), a predicate on (name, tensor), or None for all."""

LAST_LAYER = "last-layer"
"""The word that only a forward pass can tell: the parameters of the last matrix product on the way to the output."""

WORDS: dict[str, Callable[[str, Tensor], bool]] = {
    "all": lambda name, tensor: True,
    "matrices": lambda name, tensor: tensor.ndim >= 2,
}
"""Words for `params` and what they stand for. A word wins over a pattern of the same spelling."""


def copy_model(net: nn.Module, *, share: bool = False) -> nn.Module:
    """Copy the model in evaluation mode, without gradients: what is done to the model later cannot reach the copy.

    With `share` the copy reads the model's own parameters, and only buffers and attributes are its own: no memory to speak of.
    """
    return _copy(net, share=share).eval().requires_grad_(False)


def share_model(net: nn.Module) -> nn.Module:
    """Copy a model as it is, mode and hooks included, with parameters that share the model's memory."""
    return _copy(net, share=True)


def _copy(net: nn.Module, *, share: bool) -> nn.Module:
    # weight norm and friends leave non-leaf tensors behind, which deepcopy refuses; hand it detached ones
    leftovers = [t for m in net.modules() for t in vars(m).values() if isinstance(t, Tensor) and not t.is_leaf]
    memo: dict[int, Any] = {id(t): t.detach().clone() for t in leftovers}
    for p in net.parameters():
        if share or p.is_inference():  # which deepcopy would keep from gradients for good
            memo[id(p)] = nn.Parameter(p.detach() if share else p.detach().clone(), requires_grad=False)
    try:
        return copy.deepcopy(net, memo)
    except Exception as error:
        raise ModelError(
            f"Expected a model that `copy.deepcopy` can copy, but {type(net).__name__} raised: {error}. "
            "Detach what the module keeps from its last call, or give it a `__deepcopy__`."
        ) from error


def chooser(params: ParamSelection) -> Callable[[str, Tensor], bool]:
    """The predicate on (name, tensor) that `params` stands for.

    >>> chooser("matrices")("fc.bias", torch.zeros(3))
    False
    """
    if params is None:
        return WORDS["all"]
    if callable(params):
        return params
    given = entries(params)
    if LAST_LAYER in given:
        raise ConfigError(
            f"Expected names, but {LAST_LAYER!r} takes a forward pass to tell. Use `offmap.fit`, or pass a pattern."
        )
    tests = [WORDS.get(entry) or partial(_fits, entry) for entry in given]
    return lambda name, tensor: any(test(name, tensor) for test in tests)


def entries(params: str | Sequence[str]) -> list[str]:
    """The words and patterns of `params`, refused unless all are strings."""
    given: list[Any] = list(params) if isinstance(params, list | tuple) else [params]
    if not all(isinstance(entry, str) for entry in given):
        raise ConfigError(
            f"Expected `params` to be a pattern, a list of them, a function or None, but got {params!r}. "
            f"The words {[*WORDS, LAST_LAYER]} are patterns too."
        )
    return given


def _fits(pattern: str, name: str, tensor: Tensor) -> bool:
    return fnmatch(name, pattern)


def select_params(net: nn.Module, params: ParamSelection = None) -> Weights:
    """Detached floating-point parameters of `net` that `params` picks, by name.

    >>> list(select_params(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1, bias=False)), params="*.weight"))
    ['0.weight', '1.weight']
    """
    known = floating(net)
    if not known:
        raise ModelError(f"Expected a model with floating-point parameters, but {type(net).__name__} has none.")
    wanted = chooser(params)
    chosen = {n: p for n, p in known.items() if wanted(n, p)}
    if not chosen:
        raise ConfigError(f"Expected `params` to pick at least one parameter, but {params!r} fits none of {list(known)}.")
    return chosen


def floating(net: nn.Module) -> Weights:
    """The floating-point parameters of `net`, detached: all that can be random."""
    return {n: p.detach() for n, p in net.named_parameters() if p.is_floating_point()}


def remainder(net: nn.Module, chosen: Mapping[str, Tensor]) -> Weights:
    """Everything else that a call of `net` reads: the other parameters, and the buffers."""
    return {n: t.detach() for n, t in all_params(net).items() if n not in chosen}


def all_params(net: nn.Module) -> Weights:
    """All tensors that a call of `net` reads: parameters, then buffers, tied ones once."""
    return dict(net.named_parameters()) | dict(net.named_buffers())


def stack(weights: Sequence[Mapping[str, Tensor]]) -> Weights:
    """Weights of several models of one architecture with a leading axis: M × {name: (...)} -> {name: (M, ...)}."""
    return {name: torch.stack([w[name] for w in weights]) for name in weights[0]}


def at(weights: Mapping[str, Tensor], index: int) -> Weights:
    """One entry of a stack: {name: (S, ...)} -> {name: (...)}."""
    return {name: tensor[index] for name, tensor in weights.items()}


def count(weights: Mapping[str, Tensor]) -> int:
    """How many numbers there are in one model's weights.

    >>> count({"weight": torch.zeros(3, 2), "bias": torch.zeros(3)})
    9
    """
    return sum(tensor.numel() for tensor in weights.values())


def same_architecture(nets: Sequence[nn.Module]) -> None:
    """Raise a ModelError that names the first difference unless all models have the same names, shapes, dtypes and devices."""
    for what, says, remedy in _ASPECTS:
        first = {n: says(t) for n, t in all_params(nets[0]).items()}
        for position, net in enumerate(nets[1:], start=1):
            given = {n: says(t) for n, t in all_params(net).items()}
            for name in first | given:
                here, there = first.get(name, "nothing"), given.get(name, "nothing")
                if here != there:
                    raise ModelError(
                        f"Expected members of one {what}, but `{name}` is {here} in member 0 and {there} in "
                        f"member {position}. {remedy}"
                    )


_ASPECTS: tuple[tuple[str, Callable[[Tensor], str], str], ...] = (
    (
        "architecture",
        lambda t: str(tuple(t.shape)),
        "Fit them apart and join their guards with `offmap.combine`, or pass members built by one function.",
    ),
    ("dtype", lambda t: str(t.dtype), "Convert them, for example with `net.float()`."),
    ("device", lambda t: str(t.device), "Move them, for example with `net.to('cpu')`."),
)


def one_device(net: nn.Module) -> torch.device:
    """The device on which all parameters and buffers live; raise a ModelError that names those elsewhere."""
    places = {n: t.device for n, t in all_params(net).items()}
    first, *others = dict.fromkeys(places.values())
    if others:
        said = "; ".join(f"{listed(n for n, at in places.items() if at == device)} on {device}" for device in (first, *others))
        raise ModelError(f"Expected a model on one device, but it has {said}. Move it, for example with `net.to('{first}')`.")
    if first.type == "meta":
        raise ModelError(
            f"Expected a model that holds numbers, but {type(net).__name__} is on the meta device. Load its weights."
        )
    return first


def listed(names: Iterable[str], most: int = 4) -> str:
    """Names for a sentence, the first few of many.

    >>> listed(["a", "b", "c"], most=2)
    '`a`, `b` and 1 more'
    """
    each = [f"`{name}`" for name in names]
    return ", ".join(each[:most]) + (f" and {len(each) - most} more" if len(each) > most else "")


class NamedTensors(nn.Module):
    """Tensors by dotted name, as parameters (`trainable`) or buffers, not copied; a read-only mapping.

    >>> named = NamedTensors({"fc.weight": torch.zeros(2, 3), "scale": torch.ones(1)}, trainable=True)
    >>> sorted(named.state_dict()), named["fc.weight"].shape
    (['fc.weight', 'scale'], torch.Size([2, 3]))
    """

    def __init__(self, tensors: Mapping[str, Tensor], *, trainable: bool = False) -> None:
        super().__init__()
        self.names = tuple(tensors)
        for name, tensor in tensors.items():
            *path, leaf = name.split(".")
            module: nn.Module = self
            for step in path:
                # filed by hand: a model may have a layer called `values`, which `add_module` would refuse here
                module = child_table(module).setdefault(step, nn.Module())
            if trainable:
                tensor_tables(module)[0][leaf] = nn.Parameter(tensor.detach())
            else:
                tensor_tables(module)[1][leaf] = tensor

    def __getitem__(self, name: str) -> Tensor:
        *path, leaf = name.split(".")
        module: nn.Module = self
        for step in path:
            module = child_table(module)[step]
        parameters, buffers = tensor_tables(module)
        return parameters[leaf] if leaf in parameters else buffers[leaf]

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def items(self) -> Iterator[tuple[str, Tensor]]:
        """Pairs of name and tensor, in the model's order."""
        return ((name, self[name]) for name in self.names)

    def values(self) -> Iterator[Tensor]:
        """The tensors, in the model's order."""
        return (self[name] for name in self.names)


def digest(tensor: Tensor) -> list[Any]:
    """Shape, dtype and SHA-256 of the numbers.

    >>> digest(torch.zeros(2))[:2]
    [[2], 'torch.float32']
    """
    raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    return [list(tensor.shape), str(tensor.dtype), hashlib.sha256(raw).hexdigest()]


def sealed(header: str, tensors: Mapping[str, Tensor]) -> str:
    """A text behind the checksum of it and of tensors by name.

    >>> unsealed(sealed("{}", {"w": torch.zeros(2)}), {"w": torch.zeros(2)})
    '{}'
    """
    return f"{checksum(header, tensors)} {header}"


def unsealed(text: str, tensors: Mapping[str, Tensor]) -> str:
    """What was sealed together with these tensors. Of JSON that never was, as in older files, nothing can be said.

    Raises:
        ValueError: The text or the tensors are others.
    """
    expected, _, header = text.partition(" ")
    if text.startswith("{"):
        return text
    if expected != checksum(header, tensors):
        raise ValueError("its checksum does not fit")
    return header


def checksum(header: str, tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of a text and of tensors by name."""
    total = hashlib.sha256(header.encode())
    for name in sorted(tensors):
        total.update(json.dumps([name, *digest(tensors[name])]).encode())
    return total.hexdigest()
