"""Several processes as one group, by torch.distributed: under `torchrun`, or in a process group of the user's own.

Exchanges wait without end for ranks that work, however slow, and not at all for those that are gone: `distributed/pulse.py` tells.
Numbers on a GPU are added by NCCL, all else goes over gloo.
"""

from __future__ import annotations

import ctypes
import json
import logging
import math
import os
import signal
import threading
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from offmap.distributed.group import SINGLE_PROCESS, Group
from offmap.distributed.pulse import Pulse
from offmap.errors import RankError

ARRIVAL = timedelta(minutes=10)
"""How long the first ranks wait for the last one to come: it may still be reading its data."""

BUCKET = 1 << 20
"""Numbers of short tensors that are added in one exchange; longer ones go by themselves."""

FIRST = 4096
"""Bytes of a first exchange: mostly they are all."""

REMEDY = "Look at that rank's own output; then start all ranks again: with `checkpoint=` the fit goes on from its last state."

STOPPED = (
    "This rank was told to stop (SIGTERM): `torchrun` does that when another rank has died, and says which below. Start all "
    "ranks again: with `checkpoint=` the fit goes on from its last state."
)


class Ranks:
    """This process among all that called `together`."""

    def __init__(self, group: Any, pulse: Pulse) -> None:
        self.group, self.pulse = group, pulse
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    @torch.no_grad()
    def sum(self, *tensors: Tensor) -> None:
        """All-reduce: long tensors by themselves, short ones of a kind together."""
        short: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for tensor in tensors:
            if tensor.numel() >= BUCKET and tensor.is_contiguous():
                self._wait(dist.all_reduce(tensor, group=self.group, async_op=True))
            else:
                short.setdefault((tensor.dtype, tensor.device), []).append(tensor)
        for alike in short.values():
            flat = torch.cat([t.detach().reshape(-1) for t in alike])
            self._wait(dist.all_reduce(flat, group=self.group, async_op=True))
            for tensor, whole in zip(alike, flat.split([t.numel() for t in alike]), strict=True):
                tensor.copy_(whole.view(tensor.shape))

    @torch.no_grad()
    def copy(self, *tensors: Tensor) -> None:
        """Broadcast from rank 0."""
        for tensor in tensors:
            sent = _as_bytes(tensor)
            self._wait(dist.broadcast(sent, 0, group=self.group, async_op=True))
            if self.rank:
                tensor.copy_(sent.view(tensor.dtype).view(tensor.shape))

    def tell(self, value: Any) -> list[Any]:
        """All-gather of JSON."""
        return [json.loads(bytes(said.tolist())) for said in self._bytes(_of(json.dumps(value).encode()))]

    def all_gather(self, tensors: Sequence[Tensor]) -> list[list[Tensor]]:
        """All-gather of bytes: what the tensors are, and then their numbers."""
        forms = json.dumps([[str(t.dtype).removeprefix("torch."), list(t.shape)] for t in tensors]).encode()
        parts = [_of(len(forms).to_bytes(8, "little") + forms), *(_as_bytes(t).cpu() for t in tensors)]
        device = tensors[0].device if tensors else torch.device("cpu")
        return [_apart(said, device) for said in self._bytes(torch.cat(parts))]

    def _bytes(self, own: Tensor) -> list[Tensor]:
        """Bytes (n,) of every rank: short ones in one exchange, behind their number; long ones in a second."""
        first = torch.zeros(FIRST, dtype=torch.uint8, device="cpu")
        first[:8] = _of(len(own).to_bytes(8, "little"))
        if len(own) <= FIRST - 8:
            first[8 : 8 + len(own)] = own
        heard = self._gathered(first)
        sizes = [int.from_bytes(bytes(each[:8].tolist()), "little") for each in heard]
        if max(sizes) <= FIRST - 8:
            return [each[8 : 8 + size] for each, size in zip(heard, sizes, strict=True)]
        padded = torch.zeros(max(sizes), dtype=torch.uint8, device="cpu")
        padded[: len(own)] = own
        return [each[:size] for each, size in zip(self._gathered(padded), sizes, strict=True)]

    def _gathered(self, own: Tensor) -> list[Tensor]:
        heard = [torch.empty_like(own) for _ in range(self.size)]
        self._wait(dist.all_gather(heard, own, group=self.group, async_op=True))
        return heard

    def _wait(self, work: Any) -> None:
        """Until the exchange is done, or a rank is known to be gone."""
        pause = 2e-5
        try:
            while not work.is_completed():
                if self.pulse.trouble is not None:
                    raise RankError(f"{self.pulse.trouble} {REMEDY}")
                time.sleep(pause)
                pause = min(1.5 * pause, 2e-3)
            work.wait()
        except RuntimeError as error:  # a connection closed: the pulse may know more in a moment
            self.pulse.over.wait(5)
            raise RankError(f"{self.pulse.trouble or 'The connection to another rank is lost.'} {REMEDY}") from error


def _of(content: bytes) -> Tensor:
    return torch.tensor(list(content), dtype=torch.uint8, device="cpu")


def _as_bytes(tensor: Tensor) -> Tensor:
    """The numbers of a tensor as bytes, (n,), a copy of their own unless they lie in one piece."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _apart(said: Tensor, device: torch.device) -> list[Tensor]:
    """The tensors in what one rank sent."""
    start = 8 + int.from_bytes(bytes(said[:8].tolist()), "little")
    forms = [(getattr(torch, name), shape) for name, shape in json.loads(bytes(said[8:start].tolist()))]
    pieces = said[start:].split([math.prod(shape) * dtype.itemsize for dtype, shape in forms]) if forms else ()
    return [piece.clone().view(dtype).view(shape).to(device) for piece, (dtype, shape) in zip(pieces, forms, strict=True)]


def launched() -> bool:
    """Whether this process is one of several: of a process group that is initialised, or started by `torchrun`."""
    if not dist.is_available():
        return False
    if dist.is_initialized():
        return dist.get_world_size() > 1
    return dist.is_torchelastic_launched() and int(os.environ.get("WORLD_SIZE", "1")) > 1


@contextmanager
def together(*, alone: bool = False) -> Generator[Group]:
    """The group of all ranks that enter this block; `SINGLE_PROCESS` if there are no others, or if so asked.

    Under `torchrun` the process group is initialised here unless the script did, and stays so.
    """
    if alone or not launched():
        yield SINGLE_PROCESS
        return
    group, pulse = _joined()
    quiet = _Quiet()
    logger = logging.getLogger("offmap")
    if dist.get_rank(group):
        logger.addFilter(quiet)
    try:
        with _told_of_the_end():
            yield Ranks(group, pulse)
    except BaseException as error:
        pulse.leave(f"{type(error).__name__}: {error}")
        _abandon(group)
        raise
    else:
        pulse.leave()
        dist.destroy_process_group(group)
        dist.destroy_process_group(pulse.group)
    finally:
        logger.removeFilter(quiet)


def _abandon(group: Any) -> None:
    """Never let go of a group whose exchange may still wait for a rank that hangs: its end would wait too, and so the exit of
    this process. Nothing else ends such an exchange.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def _joined() -> tuple[Any, Pulse]:
    """Our own groups over all ranks, with our own patience; the user's group is left alone."""
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
    try:
        if not dist.is_initialized():
            _initialise(backend)
        beating = dist.new_group(backend="gloo", timeout=ARRIVAL)
        working = dist.new_group(backend=backend, timeout=timedelta(days=7))  # the pulse tells when there is nothing to wait for
    except (RuntimeError, ValueError) as error:
        raise RankError(
            f"Expected all ranks to call `offmap.fit`, but they did not within {ARRIVAL.seconds // 60} minutes, or cannot reach "
            f"each other: {(str(error).splitlines() or [''])[0]}. Call it on every rank, or pass `ranks='alone'`."
        ) from error
    return working, Pulse(beating, dist.get_rank())


def _initialise(backend: str) -> None:
    """The process group of all ranks, with a part of `torchrun`'s store for every time that it starts them.

    It keeps one store for all restarts, and in it the addresses of ranks that are dead: those of a new start could take them for
    their own, and wait for each other.
    """
    from torch.distributed.distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous  # some builds of torch have neither

    store, rank, size = next(rendezvous("env://", timeout=ARRIVAL))
    store.set_timeout(ARRIVAL)
    apart = PrefixStore(f"offmap-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    dist.init_process_group(backend, store=apart, rank=rank, world_size=size, timeout=ARRIVAL)


class _Quiet(logging.Filter):
    """What rank 0 says need not be said by all."""

    def filter(self, record: logging.LogRecord) -> bool:
        return record.levelno >= logging.ERROR


@contextmanager
def _told_of_the_end() -> Generator[None]:
    """SIGTERM as an error of ours, unless the program has plans for it, or this is not its main thread."""
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
