"""The zoo as parameters of tests: every model × basis × way to run it."""

from __future__ import annotations

from typing import Any

import pytest

from zoo import ZOO

KINDS = ("svd", "identity")


def _ways() -> list[Any]:
    return [
        pytest.param(case, basis, loop, id=f"{name}-{basis}-{'loop' if loop else 'vmap'}")
        for name, case in ZOO.items()
        for basis in KINDS
        for loop in ((False, True) if case.vmap else (True,))
    ]


def _bases(cases: Any) -> list[Any]:
    return [pytest.param(case, basis, id=f"{case.name}-{basis}") for case in cases for basis in KINDS]


MODELS = pytest.mark.parametrize("case", ZOO.values(), ids=ZOO)
LOOPED = pytest.mark.parametrize("case", [c for c in ZOO.values() if not c.vmap], ids=lambda c: c.name)
WAYS = pytest.mark.parametrize(("case", "basis", "loop"), _ways())
BASES = pytest.mark.parametrize(("case", "basis"), _bases(ZOO.values()))
BATCHED = pytest.mark.parametrize(("case", "basis"), _bases(c for c in ZOO.values() if c.vmap))
