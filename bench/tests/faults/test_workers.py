"""Trials that hang or crash are failures of their seed, and the next one goes on."""

import os
import time
from pathlib import Path

import pytest

from checks import trust
from checks.trust import Check


def trial(seed: int, folder: Path) -> str:
    if seed == 1:
        time.sleep(60)
    if seed == 2:
        os._exit(3)
    assert seed != 3, "not held"
    return "held"


CHECK = Check("A promise.", trial, limit=1.0)


@pytest.mark.slow
def test_hangs_crashes_and_errors_are_failures(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(trust, "check_of", check_here)
    outcomes = {seed: (ending, failure) for seed, ending, failure, _ in trust.try_seeds("test_workers", [0, 1, 2, 3, 4])}
    assert outcomes == {
        0: ("held", None), 1: ("", "hang: over 1 s"), 2: ("", "crash: the process ended"),
        3: ("", "AssertionError: not held"), 4: ("held", None),
    }  # fmt: skip


def check_here(name: str) -> Check:
    return CHECK
