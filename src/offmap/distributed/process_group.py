"""Several processes as one group, by torch.distributed: under `torchrun`, or in a process group of the user's own.

Collectives wait without end for ranks that work, however slow, and stop when a rank is gone: a heartbeat notices. Tensors on a
GPU are reduced by NCCL, all else goes over gloo.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import re
import signal
import threading
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import load as load_bytes
from safetensors.torch import save as to_bytes
from torch import Tensor

from offmap.distributed.group import SINGLE_PROCESS, Group
from offmap.errors import RankError

JOIN_TIMEOUT = timedelta(minutes=10)
"""How long the first ranks wait for the last one to join: it may still be reading its data."""

BUCKET = 1 << 20
"""Numbers of short tensors that are reduced together; longer tensors go by themselves."""

BEAT = 1.0
"""Seconds between two heartbeats."""

SILENCE = 30.0
"""Seconds that a rank may be silent, stopped or without a connection, until the others give it up."""

WORKING, LEFT, FAILED = 0, 1, 2
STATE_BYTES = 1024
"""Bytes of a heartbeat: the state of a rank, and why it failed."""

REMEDY = "Look at that rank's own output; then start all ranks again: with `checkpoint=` the fit goes on from its last state."

STOPPED = (
    "This rank was told to stop (SIGTERM): `torchrun` does that when another rank has died, and says which below. Start all "
    "ranks again: with `checkpoint=` the fit goes on from its last state."
)


class ProcessGroup:
    """This process among all that entered `join_group`."""

    def __init__(self, group: Any, heartbeat: Heartbeat) -> None:
        self.group, self.heartbeat = group, heartbeat
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    @torch.no_grad()
    def all_reduce(self, *tensors: Tensor) -> None:
        """Replace every tensor by its sum over the ranks: long ones by themselves, short ones of a kind together."""
        short: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for tensor in tensors:
            if tensor.numel() >= BUCKET and tensor.is_contiguous():
                self._wait(dist.all_reduce(tensor, group=self.group, async_op=True))
            else:
                short.setdefault((tensor.dtype, tensor.device), []).append(tensor)
        for bucket in short.values():
            flat = torch.cat([t.detach().reshape(-1) for t in bucket])
            self._wait(dist.all_reduce(flat, group=self.group, async_op=True))
            for tensor, total in zip(bucket, flat.split([t.numel() for t in bucket]), strict=True):
                tensor.copy_(total.view(tensor.shape))

    @torch.no_grad()
    def broadcast(self, *tensors: Tensor) -> None:
        """Replace every tensor by that of rank 0, sent as bytes."""
        for tensor in tensors:
            content = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
            self._wait(dist.broadcast(content, 0, group=self.group, async_op=True))
            if self.rank:
                tensor.copy_(content.view(tensor.dtype).view(tensor.shape))

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return the plain values of all ranks, sent as JSON."""
        return [json.loads(content) for content in self._all_gather(json.dumps(value).encode())]

    def all_gather(self, tensors: Sequence[Tensor]) -> list[list[Tensor]]:
        """Return the tensors of all ranks on this one's device, sent as safetensors."""
        device = tensors[0].device if tensors else torch.device("cpu")
        named = {str(i): tensor.detach().cpu().clone(memory_format=torch.contiguous_format) for i, tensor in enumerate(tensors)}
        ranks = [load_bytes(content) for content in self._all_gather(to_bytes(named))]
        return [[parts[str(i)].to(device) for i in range(len(parts))] for parts in ranks]

    def _all_gather(self, content: bytes) -> list[bytes]:
        """Return the bytes of all ranks: first their lengths, then all padded to the longest."""
        own = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        lengths = [torch.zeros(1, dtype=torch.int64, device="cpu") for _ in range(self.size)]
        self._wait(dist.all_gather(lengths, torch.tensor([len(own)], device="cpu"), group=self.group, async_op=True))
        longest = max(int(length) for length in lengths)
        parts = [torch.empty(longest, dtype=torch.uint8, device="cpu") for _ in range(self.size)]
        self._wait(dist.all_gather(parts, F.pad(own, (0, longest - len(own))), group=self.group, async_op=True))
        return [part[: int(length)].numpy().tobytes() for part, length in zip(parts, lengths, strict=True)]

    def _wait(self, work: Any) -> None:
        """Wait until the collective is done, or a rank is gone."""
        pause = 2e-5
        try:
            while not work.is_completed():
                if self.heartbeat.trouble is not None:
                    raise RankError(f"{self.heartbeat.trouble} {REMEDY}")
                time.sleep(pause)
                pause = min(1.5 * pause, 2e-3)
            work.wait()
        except RuntimeError as error:  # a connection closed: the heartbeat may know more in a moment
            self.heartbeat.over.wait(5)
            raise RankError(f"{self.heartbeat.trouble or 'The connection to another rank is lost.'} {REMEDY}") from error


class Heartbeat:
    """Exchanges states with the other ranks in a thread, so that slow work is no silence; `trouble` says what is wrong.

    A rank that leaves says so, and why if it failed: the others know it within a second.
    """

    def __init__(self, group: Any, rank: int) -> None:
        self.group, self.rank, self.size = group, rank, dist.get_world_size(group)
        self.trouble: str | None = None
        self.over = threading.Event()
        self._leaving = threading.Event()
        self._state = bytes([WORKING])
        self._thread = threading.Thread(target=self._beat, daemon=True, name="offmap-heartbeat")
        self._thread.start()

    def leave(self, failure: str | None = None) -> None:
        """Tell the others that this rank leaves, and wait until they know."""
        self._state = bytes([LEFT]) if failure is None else bytes([FAILED]) + failure.encode()[: STATE_BYTES - 1]
        self._leaving.set()
        self._thread.join(SILENCE + 2 * BEAT)

    def _beat(self) -> None:
        try:
            while self.trouble is None:
                self._leaving.wait(BEAT)
                if all(state[0] == LEFT for state in self._exchange()):
                    return
        except RuntimeError as error:
            self.trouble = self.trouble or _explain_silence(error, self.rank, self.size)
        finally:
            self.over.set()

    def _exchange(self) -> list[bytes]:
        """Return the states of all ranks, and set `trouble` if one failed."""
        state = self._state
        timeout = 10 * BEAT if state[0] == FAILED else SILENCE  # a rank that failed does not wait long to say so
        dist.monitored_barrier(self.group, timeout=timedelta(seconds=timeout))
        content = torch.frombuffer(bytearray(state.ljust(STATE_BYTES, b"\0")), dtype=torch.uint8)
        parts = [torch.zeros_like(content) for _ in range(self.size)]
        dist.all_gather(parts, content, group=self.group)
        states = [part.numpy().tobytes().rstrip(b"\0") or b"\0" for part in parts]
        for rank, other in enumerate(states):
            if other[0] == FAILED and self.trouble is None:
                self.trouble = f"Rank {rank} failed: {other[1:].decode(errors='ignore')}"
        return states


def _explain_silence(error: RuntimeError, rank: int, size: int) -> str:
    """Name the rank that is gone: of two it is the other, of more only rank 0 can tell, by the text of the error.

    >>> _explain_silence(RuntimeError("[Rank 0]: Rank 3 failed to pass monitoredBarrier in 30000 ms"), 0, 4)
    'Rank 3 died, or has been silent for 30 seconds.'
    """
    missing = [str(1 - rank)] if size == 2 else re.findall(r"Rank (\d+),? failed", str(error)) if rank == 0 else []
    return f"{f'Rank {missing[0]}' if missing else 'Another rank'} died, or has been silent for {SILENCE:g} seconds."


def is_launched() -> bool:
    """Return whether this process is one of several: of a process group that is initialised, or started by `torchrun`."""
    if not dist.is_available():
        return False
    if dist.is_initialized():
        return dist.get_world_size() > 1
    return dist.is_torchelastic_launched() and int(os.environ.get("WORLD_SIZE", "1")) > 1


@contextmanager
def join_group(*, alone: bool = False) -> Generator[Group]:
    """Join the group of all ranks that enter this block; `SINGLE_PROCESS` if there are no others, or if so asked.

    Under `torchrun` the process group is initialised here unless the script did, and stays so. Ranks but 0 log errors only.
    """
    if alone or not is_launched():
        yield SINGLE_PROCESS
        return
    group, heartbeat = _new_groups()
    logger = logging.getLogger("offmap")
    if dist.get_rank(group):
        logger.addFilter(_errors_only)
    try:
        with _sigterm_as_error():
            yield ProcessGroup(group, heartbeat)
    except BaseException as error:
        heartbeat.leave(f"{type(error).__name__}: {error}")
        # never release a group whose collective may wait for a rank that hangs: its end, and so this process, would wait too
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
        raise
    else:
        heartbeat.leave()
        dist.destroy_process_group(group)
        dist.destroy_process_group(heartbeat.group)
    finally:
        logger.removeFilter(_errors_only)


def _errors_only(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR


def _new_groups() -> tuple[Any, Heartbeat]:
    """Return groups of our own over all ranks, with our own timeouts; the user's group is left alone."""
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
    try:
        if not dist.is_initialized():
            _initialise(backend)
        beating = dist.new_group(backend="gloo", timeout=JOIN_TIMEOUT)
        working = dist.new_group(backend=backend, timeout=timedelta(days=7))  # the heartbeat ends a wait in vain
    except (RuntimeError, ValueError) as error:
        raise RankError(
            f"Expected all ranks to call `offmap.fit`, but they did not within {JOIN_TIMEOUT.seconds // 60} minutes, or cannot "
            f"reach each other: {(str(error).splitlines() or [''])[0]}. Call it on every rank, or pass `ranks='alone'`."
        ) from error
    return working, Heartbeat(beating, dist.get_rank())


def _initialise(backend: str) -> None:
    """Initialise the process group of all ranks, under a prefix of `torchrun`'s store that differs at every restart.

    The store outlives restarts and keeps addresses of dead ranks, which new ranks could take for each other's.
    """
    from torch.distributed.distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous  # some builds of torch have neither

    store, rank, size = next(rendezvous("env://", timeout=JOIN_TIMEOUT))
    store.set_timeout(JOIN_TIMEOUT)
    store = PrefixStore(f"offmap-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=JOIN_TIMEOUT)


@contextmanager
def _sigterm_as_error() -> Generator[None]:
    """Raise a RankError on SIGTERM, unless the program handles it, or this is not its main thread."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    def stop(*_: Any) -> None:
        raise RankError(STOPPED)

    signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
