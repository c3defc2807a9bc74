"""One cache: keys by content and version, the oldest values dropped, threads and copies."""

from __future__ import annotations

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor

import torch

from offmap.model.forward import LRUCache, content_key, version_key


def test_lru_cache_drops_the_oldest_values_beyond_its_size() -> None:
    cache = LRUCache(100)
    for value in range(10):
        cache.put(value, (torch.zeros(10), torch.zeros(20)))
    assert len(cache) == 3
    assert cache.held == 90
    assert [cache.get(value) is None for value in (9, 7, 6)] == [False, False, True]


def test_lru_cache_keeps_no_value_larger_than_itself() -> None:
    cache = LRUCache(100)
    cache.put("small", torch.zeros(10))
    assert cache.put("large", torch.zeros(101)).shape == (101,)
    assert len(cache) == 1


def test_content_key_sees_content_dtype_shape_and_structure() -> None:
    x = torch.arange(6.0)
    key = content_key(x)
    assert content_key(x.clone()) == content_key(x.reshape(2, 3).T.reshape(3, 2).T.flatten()) == key
    others = [x.double(), x.reshape(2, 3), x + 1, (x, 1), (x, True), {"x": x, "flag": None}]
    assert len({content_key(other) for other in others} | {key}) == 1 + len(others)
    x.add_(10)  # the same memory
    assert content_key(x) != key


def test_version_key_sees_every_write() -> None:
    x = torch.zeros(3)
    before = version_key([x])
    x.add_(1)
    assert version_key([x]) != before
    assert version_key([x]) == version_key([x])
    assert version_key([x.clone()]) != version_key([x])


def test_copies_of_a_cache_start_empty() -> None:
    cache = LRUCache(7)
    cache.put("a", torch.zeros(2))
    for twin in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
        assert (len(twin), twin.numbers) == (0, 7)


def test_threads_may_share_a_cache() -> None:
    cache = LRUCache(50)

    def value(k: int) -> torch.Tensor:
        known = cache.get(k)
        return cache.put(k, torch.full((10,), float(k))) if known is None else known

    def work(seed: int) -> bool:
        return all(int(value(k % 7)[0]) == k % 7 for k in range(seed, seed + 300))

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))
    assert cache.held <= 50
