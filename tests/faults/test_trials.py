"""The first trials of every promise; all of them are for `make trust-run`."""

from pathlib import Path

import pytest

from benchmarks.trust import CHECKS, check_of

QUICK = [(name, seed) for name in CHECKS for seed in range(check_of(name).quick)]


@pytest.mark.parametrize(("name", "seed"), QUICK)
def test_the_promise_holds(name: str, seed: int, tmp_path: Path):
    assert check_of(name).trial(seed, tmp_path)
