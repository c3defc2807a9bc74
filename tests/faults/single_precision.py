"""A guard in single precision says what the same guard says in double precision, whatever the host."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_map

import offmap
from benchmarks.trust import Check
from hosts import ZOO, Case

TOLERANCE = 1e-3
"""In standard deviations of familiar rows: what scores are in."""

HOSTS = [name for name in ZOO if name not in ("float64", "bfloat16")]
TIED = {"padding3d"}
"""With fewer rows than fan-in, directions that met nothing are any basis of what is left: another one with other roundings."""


def trial(seed: int, folder: Path) -> str:
    """One host of the zoo: the even seeds along its axes, the odd ones along its principal directions."""
    name, basis = HOSTS[seed // 2 % len(HOSTS)], ("identity", "svd")[seed % 2]
    single, double = (_scores(ZOO[name], basis, dtype) for dtype in (torch.float32, torch.float64))
    assert bool(single.isfinite().all()), name
    apart = float((single.double() - double).abs().max())
    if basis == "svd" and name in TIED:
        return f"{basis}: finite"
    assert apart < TOLERANCE * (1 + float(double.abs().max())), f"{name}, {basis}: {apart:.1e} apart"
    return f"{basis}: alike"


def _scores(case: Case, basis: str, dtype: torch.dtype) -> torch.Tensor:
    def cast(data: Any) -> Any:
        return tree_map(lambda t: t.to(dtype) if t.is_floating_point() else t, data)

    guard = offmap.fit(
        case.build().to(dtype), cast(case.data(40)), cast(case.data(30)), select=case.select, chunk_size=3 if case.vmap else 1,
        basis=basis, solver="closed-form", draws=16, risk_draws=16, progress=False,  # pyright: ignore[reportArgumentType]
    )  # fmt: skip
    return guard.score(cast(case.inputs(8)))


CHECK = Check(
    "Scores in float32 are those in float64 to 0.001 standard deviations, over the host zoo.", trial, 2 * len(HOSTS), 60.0, 16
)
