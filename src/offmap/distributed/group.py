"""The processes that fit one guard together: a rank, a size, a few collectives, by torch.distributed.

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

from offmap.errors import RankError, first_line

JOIN_TIMEOUT = timedelta(minutes=10)  # how long the first ranks wait for the last one: it may still be reading its data
BUCKET = 1 << 20  # longer tensors are reduced by themselves
BEAT = 1.0  # seconds between two heartbeats
SILENCE = 30.0  # seconds that a rank may be silent, stopped or without a connection, until the others give it up
STATE_BYTES = 1024  # of a heartbeat: the state of a rank, and why it failed
WORKING, LEFT, FAILED = 0, 1, 2
RESTART = "Start all ranks again: with `checkpoint=` the fit goes on from its last state."


class Group:
    """One process by itself, and what several of them override. All make the same calls in the same order.

    >>> SINGLE_PROCESS.all_gather_object("here")
    ['here']
    """

    rank: int = 0
    size: int = 1

    def all_reduce(self, *tensors: Tensor) -> None:
        """Replace every tensor, in place, by its sum over the ranks: the same bits on all of them."""

    def broadcast(self, *tensors: Tensor) -> None:
        """Replace every tensor, in place, by that of rank 0."""

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return the plain values of all ranks, in their order."""
        return [value]

    def all_gather(self, tensors: Sequence[Tensor]) -> list[list[Tensor]]:
        """Return the tensors of all ranks, in their order; they may differ in number, shape and type."""
        return [list(tensors)]


SINGLE_PROCESS = Group()


def shard_slice(group: Group, rows: int) -> slice:
    """Return which of so many rows are this rank's: consecutive ones, as many as any other's up to one.

    >>> shard_slice(SINGLE_PROCESS, 7)
    slice(0, 7, None)
    """
    return slice(rows * group.rank // group.size, rows * (group.rank + 1) // group.size)


def all_gather_concat(group: Group, tensor: Tensor | None, dim: int = 0) -> Tensor:
    """Return the shards of all ranks as one tensor; None from ranks without rows."""
    if group.size == 1 and tensor is not None:
        return tensor
    parts = group.all_gather([] if tensor is None else [tensor])
    return torch.cat([part for parts_of_rank in parts for part in parts_of_rank], dim)


class ProcessGroup(Group):
    """This process among all that entered `join_group`."""

    def __init__(self, group: Any, heartbeat: Heartbeat) -> None:
        self.group: Any = group
        self.heartbeat: Heartbeat = heartbeat
        self.rank: int = dist.get_rank(group)
        self.size: int = dist.get_world_size(group)

    @torch.no_grad()
    def all_reduce(self, *tensors: Tensor) -> None:
        """Replace every tensor by its sum over the ranks: long ones by themselves, short ones of a kind together."""
        buckets: dict[Any, list[Tensor]] = {}
        for i, tensor in enumerate(tensors):
            buckets.setdefault(i if tensor.numel() >= BUCKET else (tensor.dtype, tensor.device), []).append(tensor)
        for bucket in buckets.values():
            parts = [t.detach().reshape(-1) for t in bucket]
            flat = torch.cat(parts) if len(parts) > 1 else parts[0]
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
        buffer = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        lengths = [torch.zeros(1, dtype=torch.int64, device="cpu") for _ in range(self.size)]
        self._wait(dist.all_gather(lengths, torch.tensor([len(buffer)], device="cpu"), group=self.group, async_op=True))
        longest = max(int(length) for length in lengths)
        parts = [torch.empty(longest, dtype=torch.uint8, device="cpu") for _ in range(self.size)]
        self._wait(dist.all_gather(parts, F.pad(buffer, (0, longest - len(buffer))), group=self.group, async_op=True))
        return [part[: int(length)].numpy().tobytes() for part, length in zip(parts, lengths, strict=True)]

    def _wait(self, work: Any) -> None:
        """Wait until the collective is done, or a rank is gone."""
        pause, cause = 2e-5, None
        while not work.is_completed() and self.heartbeat.trouble is None:
            time.sleep(pause)
            pause = min(1.5 * pause, 2e-3)
        if work.is_completed():
            try:
                work.wait()
                return
            except RuntimeError as error:  # a connection closed: the heartbeat may know more in a moment
                cause = error
                self.heartbeat.over.wait(5)
        trouble = self.heartbeat.trouble or "The connection to another rank is lost."
        raise RankError(f"{trouble} Look at that rank's own output. {RESTART}") from cause


class Heartbeat:
    """Exchanges states with the other ranks in a thread, so that slow work is no silence; `trouble` says what is wrong.

    A rank that leaves says so, and why if it failed: the others know it within a second.
    """

    def __init__(self, group: Any) -> None:
        self.group: Any = group
        self.rank: int = dist.get_rank(group)
        self.size: int = dist.get_world_size(group)
        self.trouble: str | None = None
        self.over: threading.Event = threading.Event()
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
                state = self._state
                timeout = 10 * BEAT if state[0] == FAILED else SILENCE  # a rank that failed does not wait long to say so
                dist.monitored_barrier(self.group, timeout=timedelta(seconds=timeout))
                content = torch.frombuffer(bytearray(state.ljust(STATE_BYTES, b"\0")), dtype=torch.uint8)
                parts = [torch.zeros_like(content) for _ in range(self.size)]
                dist.all_gather(parts, content, group=self.group)
                states = [part.numpy().tobytes() for part in parts]
                for rank, other in enumerate(states):
                    if other[0] == FAILED:
                        reason = other[1:].rstrip(b"\0").decode(errors="ignore")
                        self.trouble = self.trouble or f"Rank {rank} failed: {reason}"
                if all(other[0] == LEFT for other in states):
                    return
        except RuntimeError as error:  # of two ranks it is the other, of more only rank 0 can tell, by the text of the error
            ranks = re.findall(r"Rank (\d+),? failed", str(error)) if self.rank == 0 else []
            gone = [str(1 - self.rank)] if self.size == 2 else ranks
            name = f"Rank {gone[0]}" if gone else "Another rank"
            self.trouble = self.trouble or f"{name} died, or has been silent for {SILENCE:g} seconds."
        finally:
            self.over.set()


@contextmanager
def join_group(*, alone: bool = False) -> Generator[Group]:
    """Join the group of all ranks that enter this block; `SINGLE_PROCESS` if there are no others, or if so asked.

    Under `torchrun` the process group is initialised here unless the script did, and stays so. Ranks but 0 log errors only. A
    SIGTERM is raised as a RankError, unless the program handles it, or this is not its main thread.
    """
    if not alone and dist.is_available() and dist.is_initialized():
        alone = dist.get_world_size() == 1
    elif not alone:
        alone = not (dist.is_available() and dist.is_torchelastic_launched()) or os.environ.get("WORLD_SIZE", "1") == "1"
    if alone:
        yield SINGLE_PROCESS
        return
    working, heartbeat = _new_groups()
    logger, main = logging.getLogger("offmap"), threading.current_thread() is threading.main_thread()
    level, handled = logger.level, not main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL

    def stop(*_: Any) -> None:
        reason = "This rank was told to stop (SIGTERM): `torchrun` does that when another rank has died, and says which below."
        raise RankError(f"{reason} {RESTART}")

    if heartbeat.rank:
        logger.setLevel(logging.ERROR)
    try:
        if not handled:
            signal.signal(signal.SIGTERM, stop)
        try:
            yield ProcessGroup(working, heartbeat)
        finally:
            if not handled:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
    except BaseException as error:
        heartbeat.leave(f"{type(error).__name__}: {error}")
        # never release a group whose collective may wait for a rank that hangs: its end, and so this process, would wait too
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(working))
        raise
    else:
        heartbeat.leave()
        dist.destroy_process_group(working)
        dist.destroy_process_group(heartbeat.group)
    finally:
        logger.setLevel(level)


def _new_groups() -> tuple[Any, Heartbeat]:
    """Return groups of our own over all ranks, with our own timeouts; the user's group is left alone.

    The store of `torchrun` outlives restarts and keeps addresses of dead ranks, which new ranks could take for each other's: so
    its prefix differs at every restart.
    """
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
    try:
        if not dist.is_initialized():
            from torch.distributed.distributed_c10d import PrefixStore  # some builds of torch have neither
            from torch.distributed.rendezvous import rendezvous

            store, rank, size = next(rendezvous("env://", timeout=JOIN_TIMEOUT))
            store.set_timeout(JOIN_TIMEOUT)
            store = PrefixStore(f"offmap-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
            dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=JOIN_TIMEOUT)
        beating = dist.new_group(backend="gloo", timeout=JOIN_TIMEOUT)
        working = dist.new_group(backend=backend, timeout=timedelta(days=7))  # the heartbeat ends a wait in vain
    except (RuntimeError, ValueError) as error:
        raise RankError(
            f"Expected all ranks to call `offmap.fit`, but they did not within {JOIN_TIMEOUT.seconds // 60} minutes, or cannot "
            f"reach each other: {first_line(error)}. Call it on every rank, or pass `ranks='alone'`."
        ) from error
    return working, Heartbeat(beating)
