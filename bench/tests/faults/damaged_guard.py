"""A guard file that was cut, or in which bits were flipped, is refused by its name."""

from __future__ import annotations

import random
import re
from functools import cache
from pathlib import Path

import pytest
from torch import nn

import offmap
from checks.trust import Check
from faults.damage import damage
from offmap.errors import FileError
from trained import quick, regression, regressor


@cache
def _fit() -> tuple[nn.Module, offmap.Guard]:
    net = regressor()
    return net, quick(net, regression(60), regression(30, seed=1))


def trial(seed: int, folder: Path) -> str:
    """Even seeds cut the file at a random byte, odd ones flip one to three bits."""
    rng, (net, guard) = random.Random(seed), _fit()
    path = folder / "guard.safetensors"
    guard.save(path)
    what, content = damage(path.read_bytes(), seed, rng)
    path.write_bytes(content)
    with pytest.raises(FileError, match=re.escape(str(path))):
        offmap.load(path, net)
    return f"{what}, refused"


CHECK = Check(
    "A guard file that was cut or changed is refused, and the error names it.", trial, trials=1_000, limit=20.0, quick=20
)
