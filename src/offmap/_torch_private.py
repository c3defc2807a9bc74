"""The names of torch that have no public spelling: the one file to look at when torch moves on.

* `tree_map`, `tree_leaves`, `tree_flatten`, `tree_unflatten`: inputs are nested tuples and dicts; torch's walk is not public.
* `TorchDispatchMode`: the documented way to watch operators lives in an underscored module.
* `tensor_tables`, `child_table`: `functional_call` swaps tensors by the same tables, but is slower and leaves a module that is
  reachable by two paths with the weights of the last call (pytorch issue 164759).
* `hook_tables`: torch can add hooks and remove them, but not list them.
* `strict_vmap`: operators that `vmap` would run one by one, with a warning, count as operators that it cannot run.
* `change_count`: what autograd counts in-place writes with.
* `NO_TORCH_FUNCTION`: the documented way to make a Tensor subclass whose results are plain tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

__all__ = [
    "NO_TORCH_FUNCTION", "TorchDispatchMode", "change_count", "child_table", "hook_tables", "strict_vmap",
    "tensor_tables", "tree_flatten", "tree_leaves", "tree_map", "tree_unflatten",
]  # fmt: skip

_C: Any = vars(torch)["_C"]

NO_TORCH_FUNCTION: Any = _C._disabled_torch_function_impl


tensor_tables: Callable[[nn.Module], tuple[dict[str, Any], dict[str, Any]]] = attrgetter("_parameters", "_buffers")
"""The dicts that hold the parameters and the buffers of a module itself; writing to them swaps tensors."""

child_table: Callable[[nn.Module], dict[str, Any]] = attrgetter("_modules")
"""The dict that holds the sub-modules of a module: unlike in `named_children`, one that stands twice is listed twice."""

hook_tables: Callable[[nn.Module], tuple[dict[int, Any], dict[int, Any]]] = attrgetter("_forward_pre_hooks", "_forward_hooks")
"""What a call of a module runs before and after its `forward`, by the number of each hook."""


change_count: Callable[[Tensor], int] = attrgetter("_version")
"""A number that grows with every in-place write to a tensor; inference tensors do not count."""


@contextmanager
def strict_vmap() -> Generator[None]:
    """Make `vmap` raise where it would fall back to a loop; the switch belongs to the thread."""
    before = _C._functorch._is_vmap_fallback_enabled()
    _C._functorch._set_vmap_fallback_enabled(False)
    try:
        yield
    finally:
        _C._functorch._set_vmap_fallback_enabled(before)
