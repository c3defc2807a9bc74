"""The least that work could take: its products, at the rate of a bare one."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from offmap_bench.speed.race import Timing

SIDE, PRODUCTS = 1024, 10

NAME = "a bare GEMM of the same FLOPs"


def flops(work: Callable[[], object]) -> int:
    """Operations of all matrix products and convolutions that run in it, forwards and backwards, also under `vmap`.

    Eigenvectors, random numbers and whatever treats every number alike are left out.

    >>> flops(lambda: torch.zeros(3, 4) @ torch.zeros(4, 5))
    120
    """
    with FlopCounterMode(display=False, custom_mapping=MISSING) as counter:
        work()
    return counter.get_total_flops()


def _added(to: torch.Size, a: torch.Size, b: torch.Size, *_: Any, **__: Any) -> int:
    return 2 * math.prod(a) * b[-1]


def _attended(query: torch.Size, key: torch.Size, value: torch.Size, *_: Any, **__: Any) -> int:
    return sdpa_flop_count(query, key, value)


MISSING: dict[Any, Callable[..., int]] = {
    torch.ops.aten.addmm_: _added,
    torch.ops.aten.baddbmm_: _added,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attended,
}
"""What torch's counter does not know: products added in place, and attention on the CPU."""


def product() -> Callable[[], None]:
    """The bare GEMM, as a contestant: ten float32 products of 1024 × 1024 × 1024."""
    a, b = torch.randn(SIDE, SIDE), torch.randn(SIDE, SIDE)

    def multiply() -> None:
        for _ in range(PRODUCTS):
            torch.mm(a, b)

    return multiply


def least(gemm: Timing, flop: float) -> Timing:
    """What so many operations take at the rate of that contestant."""
    share = flop / (PRODUCTS * 2 * SIDE**3)
    return Timing([share * seconds for seconds in gemm.cpu], [share * seconds for seconds in gemm.wall])
