"""The names of torch that have no public spelling: the one file to look at when torch moves on."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode  # the documented way to watch operators
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten  # inputs are nested tuples and dicts

__all__ = [
    "NO_TORCH_FUNCTION", "TORCH_ATTRIBUTES", "TorchDispatchMode", "change_count", "child_table", "hook_tables", "strict_vmap",
    "tensor_tables", "tree_flatten", "tree_leaves", "tree_map", "tree_unflatten",
]  # fmt: skip

_C: Any = vars(torch)["_C"]

# the documented way to make a Tensor subclass whose results are plain tensors
NO_TORCH_FUNCTION: Any = _C._disabled_torch_function_impl

# The dicts of a module's own parameters and buffers, and of its children; writing to them swaps tensors. `functional_call` does
# the same, but is slower and leaves a module that is reachable by two paths with the weights of the last call (pytorch #164759).
tensor_tables: Callable[[nn.Module], tuple[dict[str, Any], dict[str, Any]]] = attrgetter("_parameters", "_buffers")
child_table: Callable[[nn.Module], dict[str, Any]] = attrgetter("_modules")

# what runs before and after `forward`: torch can add hooks and remove them, but not list them
hook_tables: Callable[[nn.Module], tuple[dict[int, Any], dict[int, Any]]] = attrgetter("_forward_pre_hooks", "_forward_hooks")

# attributes of every module, and of a recurrent one: no state of the user's
TORCH_ATTRIBUTES: frozenset[str] = frozenset({*vars(nn.Module()), "_flat_weights", "_flat_weight_refs"})

# grows with every in-place write to a tensor; inference tensors do not count
change_count: Callable[[Tensor], int] = attrgetter("_version")


@contextmanager
def strict_vmap() -> Generator[None]:
    """Make `vmap` raise where it would fall back to a loop with a warning; the switch belongs to the thread."""
    before = _C._functorch._is_vmap_fallback_enabled()
    _C._functorch._set_vmap_fallback_enabled(False)
    try:
        yield
    finally:
        _C._functorch._set_vmap_fallback_enabled(before)
