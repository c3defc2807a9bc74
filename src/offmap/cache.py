"""One cache for what is costly to make again: layer inputs, draws, outputs.

Keys are made of *content* (`content_key`: dtype, shape and bytes of inputs, so that an in-place change is another key) and of
*versions* (`version_key`: for tensors that the owner of the cache keeps alive, such as φ).
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from threading import Lock
from typing import Any, TypeVar

import torch
from torch import Tensor

from offmap._torch_private import change_count, tree_leaves

T = TypeVar("T")

CACHE_NUMBERS = 1 << 23
"""Numbers that a cache holds unless told otherwise (32 MB in float32)."""


def content_key(inputs: Any) -> bytes:
    """Digest what `inputs` hold: equal inputs have equal keys, wherever they lie in memory.

    >>> x = torch.zeros(2)
    >>> content_key(x) == content_key(x.clone()), content_key(x) == content_key(x.double())
    (True, False)
    """
    digest = hashlib.blake2b(digest_size=16)
    for leaf in tree_leaves(inputs):
        if not isinstance(leaf, Tensor):
            digest.update(repr(leaf).encode())
            continue
        content = leaf.detach().cpu().contiguous()
        digest.update(f"{content.dtype}{tuple(content.shape)}".encode())
        digest.update(content.view(-1).view(torch.uint8).numpy().data)
    return digest.digest()


def version_key(tensors: Iterable[Tensor]) -> tuple[int, ...]:
    """Return numbers that change whenever someone writes to one of these tensors, or puts another in its place."""
    return tuple(number for t in tensors for number in (t.data_ptr(), 0 if t.is_inference() else change_count(t)))


class LRUCache:
    """Keep the latest values by key, at most `numbers` tensor elements in all; threads may share it.

    >>> cache = LRUCache(numbers=4)
    >>> cache.get("a", lambda: torch.zeros(3)), cache.get("a", lambda: torch.ones(3))
    (tensor([0., 0., 0.]), tensor([0., 0., 0.]))
    """

    def __init__(self, numbers: int = CACHE_NUMBERS) -> None:
        self.numbers = numbers
        self.held = 0
        self._values: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()
        self._lock = Lock()  # for the bookkeeping alone: two threads may make the same value at once

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return the value under `key`, made now if it is not there; a value too large for the cache is not kept."""
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
                return self._values[key][0]
        value = make()
        size = sum(leaf.numel() for leaf in tree_leaves(value) if isinstance(leaf, Tensor))
        with self._lock:
            if key not in self._values and size <= self.numbers:
                self._values[key] = value, size
                self.held += size
                while self.held > self.numbers:
                    self.held -= self._values.popitem(last=False)[1][1]
        return value

    def __len__(self) -> int:
        return len(self._values)

    def __reduce__(self) -> tuple[type[LRUCache], tuple[int]]:
        return LRUCache, (self.numbers,)  # copies start empty
