"""What a module remembers beside its parameters: buffers and attributes, compared and put back."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from offmap._torch_private import tree_leaves

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""What another order of summation can do to an output, as a share of the largest one."""

OWN_TO_TORCH = frozenset({*vars(nn.Module()), "_flat_weights", "_flat_weight_refs"})
"""Attributes of modules that are no state of the user's."""

ABSENT: Any = ...
"""An attribute that was not there."""


def same(a: Tensor, b: Tensor, *, exact: bool = False) -> bool:
    """Equal up to what another order of summation can do, or to the bit; NaN equals NaN."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not a.is_floating_point() or exact:
        return torch.equal(a, b) or bool(((a == b) | ((a != a) & (b != b))).all())
    tolerance = TOLERANCE[a.dtype]
    size = b.abs().nan_to_num(0.0, 0.0, 0.0).max() if b.numel() else 0.0
    return torch.allclose(a, b, rtol=tolerance, atol=tolerance * float(size), equal_nan=True)


def _state(net: nn.Module) -> dict[str, list[Any]]:
    """Tensors and plain numbers in every buffer and attribute of every module, by dotted name."""
    found: dict[str, list[Any]] = {}
    for path, module in net.named_modules():
        kept = {name: value for name, value in vars(module).items() if name not in OWN_TO_TORCH}
        for name, value in (vars(module)["_buffers"] | kept).items():
            leaves = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor | bool | int | float | str | None)]
            found[f"{path}.{name}".lstrip(".")] = leaves
    return found


def changed(before: nn.Module, after: nn.Module) -> list[str]:
    """Names of buffers and attributes that differ between two copies of one model."""
    old, new = _state(before), _state(after)

    def equal(a: Any, b: Any) -> bool:
        return same(a, b, exact=True) if isinstance(a, Tensor) and isinstance(b, Tensor) else type(a) is type(b) and a == b

    def alike(name: str) -> bool:
        a, b = old.get(name, []), new.get(name, [])
        return len(a) == len(b) and all(map(equal, a, b))

    return [name for name in old | new if not alike(name)]


@dataclass(frozen=True)
class Forget:
    """A forward hook that puts buffers and attributes back as they were: (path of the module, name, value)."""

    kept: tuple[tuple[str, str, Any], ...]

    def __call__(self, net: nn.Module, *_: Any) -> None:
        """Put copies back, so that the next call cannot reach the originals."""
        for path, name, value in self.kept:
            store = _store(net.get_submodule(path), name)
            if value is ABSENT:
                store.pop(name, None)
            else:
                store[name] = value.clone() if isinstance(value, Tensor) else copy.copy(value)


def restore_state(net: nn.Module, names: Iterable[str]) -> None:
    """Make a private model forget what its calls leave under these names.

    Under `vmap` they would be tensors that are dead afterwards, which nothing can copy; and they would keep memory.
    """
    places = [(path, name) for path, _, name in (name.rpartition(".") for name in names)]
    kept = ((path, name, _store(net.get_submodule(path), name).get(name, ABSENT)) for path, name in places)
    hook = Forget(tuple((path, name, copy.deepcopy(value)) for path, name, value in kept))
    if hook.kept:
        net.register_forward_hook(hook, always_call=True)


def attributes(net: nn.Module) -> list[str]:
    """Tensors that are neither parameters nor buffers; hooks make some of them anew in every call, as pruning does."""
    found = ((path, *pair) for path, module in net.named_modules() for pair in vars(module).items())
    return [f"{path}.{name}".lstrip(".") for path, name, value in found if isinstance(value, Tensor)]


def forgotten(net: nn.Module) -> list[str]:
    """The names that a private model was made to forget."""
    hooks = [hook for hook in vars(net)["_forward_hooks"].values() if isinstance(hook, Forget)]
    return [f"{path}.{name}".lstrip(".") for hook in hooks for path, name, _ in hook.kept]


def _store(module: nn.Module, name: str) -> dict[str, Any]:
    buffers = vars(module)["_buffers"]
    return buffers if name in buffers else vars(module)
