"""A rank of `torchrun` is killed in a fit with a checkpoint: all ranks, started again, go on from the last state.

The agent is that of `torchrun`, with its store, restarts and signals; ranks are forked by it, so that a start costs little.
"""

from __future__ import annotations

import os
import random
import signal
import time
from functools import cache
from pathlib import Path
from threading import Thread
from typing import Any

from torch.utils.data import DataLoader, TensorDataset

import offmap
import rank_jobs as jobs
from checks.trust import Check
from faults.places import shared_folder
from faults.zygote import LIMIT, Ended, zygote

STATE = "fit.state"
RANKS = 2


def launch(folder: Path, start: str, restarts: int) -> None:
    """What `torchrun --standalone --nproc-per-node 2 --max-restarts N` does."""
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=RANKS, run_id=folder.name, rdzv_backend="c10d", rdzv_endpoint="localhost:0",
        max_restarts=restarts, monitor_interval=0.05, start_method="fork",
    )  # fmt: skip
    elastic_launch(config, work)(folder, start)


def work(folder: Path, start: str) -> None:
    """A fit of 40 steps; every rank tells its process when it begins, and keeps its guard."""
    rank, restart = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
    (folder / f"begun-{start}-{restart}-{rank}").write_text(str(os.getpid()))
    train = DataLoader(TensorDataset(*jobs.rows(301)), batch_size=32, shuffle=True)
    options: dict[str, Any] = {"steps": 40, "check_every": 5, "patience": None, "chunk_size": 4, "seed": 5}
    guard = offmap.fit(jobs.mlp(), train, jobs.rows(60, 11), checkpoint=folder / STATE, **jobs.OPTIONS | options)
    guard.save(folder / f"guard-{rank}.safetensors")
    (folder / f"ended-{start}-{restart}-{rank}").touch()


def guards(folder: Path) -> list[bytes]:
    return [(folder / f"guard-{rank}.safetensors").read_bytes() for rank in range(RANKS)]


@cache
def time_undisturbed() -> tuple[float, list[bytes]]:
    """Seconds from the beginning of the ranks' work to its end, longer than later ones take, and the guards' files."""
    folder = shared_folder()
    zygote()(launch, folder, "only", 0).check()
    begun, ended = ([(folder / f"{word}-only-0-{rank}").stat().st_mtime for rank in range(RANKS)] for word in ("begun", "ended"))
    return max(ended) - max(begun), guards(folder)


class Killer(Thread):
    """Waits until all ranks have begun, and so long; then it kills one. `known` is whether there was a state by then."""

    def __init__(self, folder: Path, rank: int, seconds: float) -> None:
        super().__init__(daemon=True)
        self.folder, self.rank, self.seconds = folder, rank, seconds
        self.known, self.hit = False, False

    def run(self) -> None:
        paths = [self.folder / f"begun-first-0-{rank}" for rank in range(RANKS)]
        end = time.monotonic() + LIMIT
        while not all(path.exists() and path.read_text() for path in paths) and time.monotonic() < end:
            time.sleep(0.001)
        time.sleep(self.seconds)
        self.known = (self.folder / STATE).exists()
        ended = (self.folder / f"ended-first-0-{self.rank}").exists()
        try:
            os.kill(int(paths[self.rank].read_text()), signal.SIGKILL)
            self.hit = not ended
        except (ProcessLookupError, ValueError, FileNotFoundError):
            return


def trial(seed: int, folder: Path) -> str:
    """Odd seeds let `torchrun` start the ranks again by itself; after even ones we do."""
    rng, (usual, expected) = random.Random(seed), time_undisturbed()
    killer = Killer(folder, rng.randrange(RANKS), rng.uniform(0, 0.8 * usual))
    killer.start()
    first: Ended = zygote()(launch, folder, "first", seed % 2)
    killer.join()
    again = (folder / "begun-first-1-0").exists()
    if first.code:
        assert seed % 2 == 0, first.said
        assert killer.hit, first.said
        zygote()(launch, folder, "second", 0).check()
    assert guards(folder) == expected
    assert not (folder / STATE).exists()
    if not first.code and not again:
        return "finished before the kill"
    return f"killed, started again by {'torchrun' if again else 'hand'}, {'went on' if killer.known else 'began anew'}"


CHECK = Check("A fit under torchrun one of whose ranks is killed goes on from its last state, to the same guard.",
              trial, trials=30, limit=200.0, quick=2)  # fmt: skip
