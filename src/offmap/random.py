"""Random numbers with an address: the only file of the library that makes a `torch.Generator`."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor


def generator(*address: object) -> torch.Generator:
    """Return a CPU generator seeded by a stable hash of the address (not Python's `hash`, which changes between runs)."""
    digest = hashlib.blake2b("\x1f".join(map(str, address)).encode(), digest_size=8).digest()
    return torch.Generator(device="cpu").manual_seed(int.from_bytes(digest, "little") >> 1)


def permutation(n: int, *address: object) -> Tensor:
    """Shuffle 0 … n−1, by the address alone."""
    return torch.randperm(n, generator=generator(*address), device="cpu")


def sample(n: int, size: int, *address: object) -> Tensor:
    """Choose `size` of the numbers 0 … n−1, none twice, by the address alone; few of many are spread, one in each of equal runs.

    >>> len(set(sample(10**9, 4096, "rows").tolist()))
    4096
    """
    source = generator(*address)
    if 4 * size > n:
        return torch.randperm(n, generator=source, device="cpu")[:size]
    ends = torch.arange(size + 1, device="cpu") * n // size
    shares = torch.rand(size, generator=source, dtype=torch.float64, device="cpu")
    return ends[:-1] + (shares * ends.diff()).long()
