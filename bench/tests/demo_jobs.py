"""Jobs for the processes of the demo: a spawned process can import them, unlike a test file."""

from __future__ import annotations

import os

import torch

from offmap.errors import DataError


def square(x: torch.Tensor, report) -> torch.Tensor:
    report(f"squaring {len(x)}")
    return x.square()


def fail(report) -> None:
    raise DataError("Expected a fine day, but got rain.")


def die(report) -> None:
    report("about to die")
    os._exit(7)


def die_once(mark: str, report) -> str:
    report("about to die, or not")
    if not os.path.exists(mark):
        with open(mark, "x"):
            os._exit(7)
    return "alive"
