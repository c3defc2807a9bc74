"""The first trials of every promise; all of them are for `make trust-run`."""

from pathlib import Path

import pytest

from offmap_bench.checks.trust import CHECKS, check_of

QUICK = [
    pytest.param(name, seed, marks=pytest.mark.xdist_group(name), id=f"{name}-{seed}")  # one process makes what trials share
    for name in CHECKS
    for seed in range(check_of(name).quick)
]


@pytest.mark.parametrize(("name", "seed"), QUICK)
def test_the_promise_holds(name: str, seed: int, tmp_path: Path):
    assert check_of(name).trial(seed, tmp_path)
