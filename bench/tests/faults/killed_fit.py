"""A fit with a checkpoint is killed, and started again: it goes on from its last state to the same guard."""

from __future__ import annotations

import os
import random
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import offmap
import rank_jobs as jobs
from checks.trust import Check
from faults.zygote import Ended, draw_moment, zygote

GUARD, STATE = "guard.safetensors", "fit.state"
ALWAYS = 17
"""Calls of the model that every start needs, however much is known: first it is looked at."""


class Tally:
    """A `output_fn` that counts the calls of the model in a file: a dot for each, a | for every state that was kept."""

    def __init__(self, path: Path) -> None:
        self.file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        sys.addaudithook(self.heard)

    def __call__(self, output: Tensor) -> Tensor:
        os.write(self.file, b".")
        return output

    def heard(self, event: str, args: tuple[Any, ...]) -> None:
        """Renaming is the last thing that is done for a state."""
        if event == "os.rename" and str(args[1]).endswith(STATE):
            os.write(self.file, b"|")


def work(folder: Path, tally: str) -> None:
    """A basis, a closed form, and 40 steps over a DataLoader that shuffles; then the guard is saved."""
    torch.manual_seed(os.getpid())  # nothing may depend on what a process was before
    train = DataLoader(TensorDataset(*jobs.rows(301)), batch_size=32, shuffle=True)
    options: dict[str, Any] = {"steps": 40, "check_every": 5, "patience": None, "chunk_size": 4, "seed": 5}
    guard = offmap.fit(
        jobs.mlp(), train, jobs.rows(60, 11), output_fn=Tally(folder / tally), checkpoint=folder / STATE, **jobs.OPTIONS | options
    )
    guard.save(folder / GUARD)


@cache
def fit_undisturbed() -> tuple[Ended, bytes, int]:
    """How a fit ends that is left alone, the guard's file, and how often it calls the model."""
    with TemporaryDirectory() as made:
        folder = Path(made)
        usual = zygote()(work, folder, "calls").check()
        return usual, (folder / GUARD).read_bytes(), (folder / "calls").read_bytes().count(b".")


def trial(seed: int, folder: Path) -> str:
    """Killed once or twice, then left alone: the same guard to the bit, and no more calls than what was not known needs."""
    rng, (usual, expected, calls) = random.Random(seed), fit_undisturbed()
    known, ending = 0, "finished before the kill"
    for start in range(rng.choice((1, 1, 2))):
        ended = zygote()(work, folder, f"calls-{start}", moment=draw_moment(rng, usual))
        if (folder / GUARD).exists():
            assert (folder / GUARD).read_bytes() == expected
        if not ended.killed:
            ended.check()
            return ending
        known, ending = _count_left(folder, start, ended, known)
    zygote()(work, folder, "calls-last").check()
    assert (folder / GUARD).read_bytes() == expected
    assert not (folder / STATE).exists()
    again = (folder / "calls-last").read_bytes().count(b".")
    assert again <= calls - known, f"{again} calls of {calls}, although {known} were known"
    return ending


def _count_left(folder: Path, start: int, ended: Ended, known: int) -> tuple[int, str]:
    """How many calls need not be made again after a kill, and where it hit."""
    calls = (folder / f"calls-{start}").read_bytes() if (folder / f"calls-{start}").exists() else b""
    if (folder / STATE).exists():
        place = "while a state was written" if ended.begun > ended.ended else "between two states"
        return known + max(0, calls.rpartition(b"|")[0].count(b".") - ALWAYS), f"killed {place}, went on"
    if b"|" in calls:  # the fit was over, its state gone, and the guard perhaps not yet saved
        return 0, "killed after the fit, fitted again"
    return 0, "killed before the first state, began anew"


CHECK = Check("A fit with a checkpoint that is killed goes on from its last state, to the same guard.", trial, quick=3)
