"""How the processes of a group know of each other's end: a thread in each meets those of the others every second."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

BEAT = 1.0
"""Seconds between two meetings."""

PATIENCE = 30.0
"""Seconds that a rank may be silent, stopped or without a connection, until the others give it up."""

WORKING, LEFT, FAILED = 0, 1, 2
LENGTH = 1024
"""Bytes that a rank can say at a meeting: its state, and why it failed."""


class Pulse:
    """Meets the other ranks in a thread of its own, so that slow work is no silence; `trouble` says what is wrong with them.

    A rank that leaves says so, and whether it failed: the others hear it within a second, and why.
    """

    def __init__(self, group: Any, rank: int) -> None:
        self.group, self.rank = group, rank
        self.trouble: str | None = None
        self.over = threading.Event()
        self._leaving = threading.Event()
        self._said = bytes([WORKING])
        self._thread = threading.Thread(target=self._meet, daemon=True, name="offmap-pulse")
        self._thread.start()

    def leave(self, failure: str | None = None) -> None:
        """Tell the others, and wait until they have heard it."""
        self._said = bytes([LEFT]) if failure is None else bytes([FAILED]) + failure.encode()[: LENGTH - 1]
        self._leaving.set()
        self._thread.join(PATIENCE + 2 * BEAT)

    def _meet(self) -> None:
        try:
            while self.trouble is None:
                self._leaving.wait(BEAT)
                states = self._exchange()
                if all(state[0] == LEFT for state in states):
                    return
        except RuntimeError as error:
            self.trouble = self.trouble or _explained(error, self.rank, dist.get_world_size(self.group))
        finally:
            self.over.set()

    def _exchange(self) -> list[bytes]:
        """What every rank says of itself."""
        own = self._said
        patience = 10 * BEAT if own[0] == FAILED else PATIENCE  # one that failed does not wait long to say so
        dist.monitored_barrier(self.group, timeout=timedelta(seconds=patience))
        mine = torch.zeros(LENGTH, dtype=torch.uint8, device="cpu")
        mine[: len(own)] = torch.frombuffer(bytearray(own), dtype=torch.uint8)
        heard = [torch.zeros_like(mine) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(heard, mine, group=self.group)
        states = [bytes(each.tolist()).rstrip(b"\0") or b"\0" for each in heard]
        failed = {rank: state[1:].decode(errors="ignore") for rank, state in enumerate(states) if state[0] == FAILED}
        if failed:
            rank, why = next(iter(failed.items()))
            self.trouble = f"Rank {rank} failed: {why}"
        return states


def _explained(error: RuntimeError, rank: int, size: int) -> str:
    """What a meeting that failed says in words: of two ranks it is the other, of more only rank 0 can tell, and not always."""
    missing = [1 - rank] if size == 2 else [int(number) for number in _numbers(str(error))] if rank == 0 else []
    who = f"Rank {missing[0]}" if missing else "Another rank"
    return f"{who} died, or has been silent for {PATIENCE:g} seconds."


def _numbers(text: str) -> list[str]:
    """The ranks that an error of the barrier names.

    >>> _numbers("[Rank 0]: Rank 3 failed to pass monitoredBarrier in 30000 ms")
    ['3']
    """
    words = text.replace(",", " ").split()
    return [after for word, after, then in zip(words, words[1:], words[2:], strict=False) if word == "Rank" and then == "failed"]
