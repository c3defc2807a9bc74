"""The state of a fit in one file, so that a fit that was killed can go on: safetensors with a JSON header, never code.

A state has parts, each with plain values and tensors. Every write replaces the whole file at once, so that it is always the state
of one moment. What a write costs decides how often there is one.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load as load_bytes
from safetensors.torch import save as to_bytes

from offmap._types import Weights
from offmap.distributed.group import SINGLE_PROCESS, Group
from offmap.errors import FileError
from offmap.io.atomic import HEADER, write_whole
from offmap.model.params import checksum, sealed

FORMAT = "offmap-checkpoint-2"
REMEDY = "Delete the file to start anew, or pass another `checkpoint=`."

SHARE = 0.1
"""Of the time of a fit that may be spent on writing its state."""


@dataclass
class Part:
    """Something that a fit has found out: plain values as JSON has them, and tensors by name."""

    values: dict[str, Any] = field(default_factory=dict[str, Any])
    tensors: Weights = field(default_factory=Weights)


class Checkpoint:
    """Parts of a fit by name: those that an earlier run left at `path`, and those of this one. Without a path, nothing is kept.

    `identity` is what makes it this fit and no other, by name; a file with another one is refused. Of several processes rank 0
    reads and writes.
    """

    def __init__(
        self, path: Path | None = None, identity: Mapping[str, str] | None = None, group: Group = SINGLE_PROCESS
    ) -> None:
        self.path, self.identity, self.group = path, dict(identity or {}), group
        self.parts: dict[str, Part] = {}
        self._next = 0.0  # when the next write is due
        if path is not None:
            self.parts = self._read(path)

    def __getitem__(self, name: str) -> Part | None:
        """A part, if it is known."""
        return self.parts.get(name)

    def once(self, name: str, make: Callable[[], Any]) -> Any:
        """A plain value that is found out once for all runs of this fit."""
        if self.path is None:
            return make()
        if name not in self.parts:
            self.parts[name] = Part({"value": make()})
        return self.parts[name].values["value"]

    def keep(self, name: str, make: Callable[[], Part], *, always: bool = False) -> None:
        """Write the state with this part in it, unless the last write was too short a time ago for what writes cost."""
        if self.path is None or not (always or self.group.all_gather_object(time.monotonic() >= self._next)[0]):
            return
        self.parts[name] = make()
        if self.group.rank == 0:
            start = time.monotonic()
            write_whole(self.path, self._content())
            self._next = time.monotonic() + (time.monotonic() - start) * (1 / SHARE - 1)

    def done(self) -> None:
        """The fit is over: its result is all that matters, and the file goes."""
        if self.path is not None and self.group.rank == 0:
            with contextlib.suppress(FileNotFoundError):
                self.path.unlink()

    def _content(self) -> bytes:
        tensors = {f"{part}/{n}": t.detach().contiguous().cpu() for part, p in self.parts.items() for n, t in p.tensors.items()}
        values = {name: part.values for name, part in self.parts.items()}
        text = json.dumps({"format": FORMAT, "identity": self.identity, "parts": values})
        return to_bytes(tensors, metadata={"offmap": sealed(text, tensors)})

    def _read(self, path: Path) -> dict[str, Part]:
        content = self._bytes(path)
        if content is None:
            return {}
        header, tensors = _parsed(path, content)
        for name in header["identity"] | self.identity:
            before, now = header["identity"].get(name, "nothing"), self.identity.get(name, "nothing")
            if before != now:
                raise FileError(f"{path} is the state of another fit: {name} was {before} and is {now} now. {REMEDY}")
        parts = {name: Part(values) for name, values in header["parts"].items()}
        for name, tensor in tensors.items():
            part, _, own = name.partition("/")
            parts[part].tensors[own] = tensor
        return parts

    def _bytes(self, path: Path) -> bytes | None:
        """The file as rank 0 has it; None if there is none."""
        content: bytes | None = None
        if self.group.rank == 0 and path.exists():
            try:
                content = path.read_bytes()
            except OSError as error:
                raise FileError(f"Cannot read {path}: {error.strerror}.") from error
        size = self.group.all_gather_object(None if content is None else len(content))[0]
        if self.group.size == 1 or size is None:
            return content
        sent = torch.zeros(size, dtype=torch.uint8, device="cpu")
        if content is not None:
            sent = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        self.group.broadcast(sent)
        return sent.numpy().tobytes()


NONE = Checkpoint()


def _parsed(path: Path, content: bytes) -> tuple[dict[str, Any], Weights]:
    try:
        size = int.from_bytes(content[:8], "little")
        if size > HEADER:
            raise ValueError(f"a header of {size} bytes")
        tensors = load_bytes(content)
        expected, _, text = json.loads(content[8 : 8 + size]).get("__metadata__", {})["offmap"].partition(" ")
        header = json.loads(text)
        right = expected == checksum(text, tensors)
    except Exception as error:  # whatever the bytes are, they are no state of ours
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise FileError(f"{path} is damaged or not the state of a fit ({reason}). {REMEDY}") from error
    if not right:
        raise FileError(f"{path} is damaged (its checksum does not fit). {REMEDY}")
    version = header.get("format") if isinstance(header, dict) else None
    if version != FORMAT:
        raise FileError(f"{path} is not the state of a fit: expected {FORMAT!r}, but got {version!r}. {REMEDY}")
    identity, parts = header.get("identity"), header.get("parts")
    known = {name for name, part in parts.items() if isinstance(part, dict)} if isinstance(parts, dict) else set[str]()
    if not isinstance(identity, dict) or known != set(parts or ()) or not {name.partition("/")[0] for name in tensors} <= known:
        raise FileError(f"{path} is damaged or not the state of a fit (its parts make no sense). {REMEDY}")
    return header, tensors
