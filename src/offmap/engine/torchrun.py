"""Several processes as one group, by torch.distributed: under `torchrun`, or in a process group of the user's own.

Exchanges wait without end for ranks that work, however slow, and not at all for those that are gone: `engine/pulse.py` tells.
Numbers on a GPU are added by NCCL, all else goes over gloo.
"""

from __future__ import annotations

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

from offmap.engine.pulse import Pulse
from offmap.errors import RankError
from offmap.group import ALONE, Group

ARRIVAL = timedelta(minutes=10)
"""How long the first ranks wait for the last one to come: it may still be reading its data."""

BUCKET = 1 << 20
"""Numbers of short tensors that are added in one exchange; longer ones go by themselves."""

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

    def everyones(self, tensors: Sequence[Tensor]) -> list[list[Tensor]]:
        """All-gather of bytes, after what they are."""
        forms = self.tell([[str(t.dtype).removeprefix("torch."), list(t.shape)] for t in tensors])
        sent = torch.cat([_as_bytes(t).cpu() for t in tensors]) if tensors else _of(b"")
        device = tensors[0].device if tensors else torch.device("cpu")
        return [_apart(said, form, device) for said, form in zip(self._bytes(sent), forms, strict=True)]

    def _bytes(self, own: Tensor) -> list[Tensor]:
        """Bytes (n,) of every rank, n as it may be."""
        sizes = torch.zeros(self.size, dtype=torch.int64, device="cpu")
        sizes[self.rank] = len(own)
        self._wait(dist.all_reduce(sizes, group=self.group, async_op=True))
        padded = torch.zeros(int(sizes.max()), dtype=torch.uint8, device="cpu")
        padded[: len(own)] = own
        heard = [torch.empty_like(padded) for _ in range(self.size)]
        self._wait(dist.all_gather(heard, padded, group=self.group, async_op=True))
        return [each[:size] for each, size in zip(heard, sizes.tolist(), strict=True)]

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


def _apart(said: Tensor, forms: list[Any], device: torch.device) -> list[Tensor]:
    dtypes = [getattr(torch, name) for name, _ in forms]
    sizes = [math.prod(shape) * dtype.itemsize for dtype, (_, shape) in zip(dtypes, forms, strict=True)]
    pieces = zip(said.split(sizes) if sizes else (), dtypes, forms, strict=True)
    return [piece.clone().view(dtype).view(shape).to(device) for piece, dtype, (_, shape) in pieces]


def launched() -> bool:
    """Whether this process is one of several: of a process group that is initialised, or started by `torchrun`."""
    if not dist.is_available():
        return False
    if dist.is_initialized():
        return dist.get_world_size() > 1
    return dist.is_torchelastic_launched() and int(os.environ.get("WORLD_SIZE", "1")) > 1


@contextmanager
def together(*, alone: bool = False) -> Generator[Group]:
    """The group of all ranks that enter this block; `ALONE` if there are no others, or if so asked.

    Under `torchrun` the process group is initialised here unless the script did, and stays so.
    """
    if alone or not launched():
        yield ALONE
        return
    group, pulse = _gathered()
    quiet = _Quiet()
    logger = logging.getLogger("offmap")
    if dist.get_rank(group):
        logger.addFilter(quiet)
    try:
        with _told_of_the_end():
            yield Ranks(group, pulse)
    except BaseException as error:
        pulse.leave(f"{type(error).__name__}: {error}")
        raise
    else:
        pulse.leave()
        dist.destroy_process_group(group)
        dist.destroy_process_group(pulse.group)
    finally:
        logger.removeFilter(quiet)


def _gathered() -> tuple[Any, Pulse]:
    """Our own groups over all ranks, with our own patience; the user's group is left alone."""
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
    try:
        if not dist.is_initialized():
            dist.init_process_group(backend, timeout=ARRIVAL)
        beating = dist.new_group(backend="gloo", timeout=ARRIVAL)
        working = dist.new_group(backend=backend, timeout=timedelta(days=7))  # the pulse tells when there is nothing to wait for
    except (RuntimeError, ValueError) as error:
        raise RankError(
            f"Expected all ranks to call `offmap.fit`, but they did not within {ARRIVAL.seconds // 60} minutes, or cannot reach "
            f"each other: {(str(error).splitlines() or [''])[0]}. Call it on every rank, or pass `ranks='alone'`."
        ) from error
    return working, Pulse(beating, dist.get_rank(beating))


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
