"""The state of a fit in one file, so that a fit that was killed can go on: safetensors with a JSON header, never code.

A state has parts, each with plain values and tensors: the bases, the closed form, the gradient steps. Every write replaces the
file at once, so that it always holds the state of one moment; what a write costs decides how often there is one. A fit that goes
on gives what it would have given undisturbed, to the bit in one process: noise and order have addresses, and where a DataLoader
shuffles by itself, the states of its generators are stored too.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load as load_bytes
from safetensors.torch import save as to_bytes
from torch import Tensor

from offmap._types import Weights
from offmap.atomic import HEADER, write_whole
from offmap.data import Batches
from offmap.distributed.group import SINGLE_PROCESS, Group
from offmap.errors import FileError
from offmap.maxwent.train import Cycle, RiskMonitor
from offmap.model.matrix_view import MatrixView
from offmap.model.params import checksum, sealed
from offmap.posterior.basis import Basis, Observed
from offmap.posterior.distribution import WeightDistribution

FORMAT = "offmap-checkpoint-2"
REMEDY = "Delete the file to start anew, or pass another `checkpoint=`."

TIME_SHARE = 0.1
"""Fraction of the time of a fit that may be spent on writing its state."""


@dataclass
class Part:
    """A result of a fit: plain values as JSON has them, and tensors by name."""

    values: dict[str, Any] = field(default_factory=dict[str, Any])
    tensors: Weights = field(default_factory=Weights)


class Checkpoint:
    """Parts of a fit by name: those that an earlier run left at `path`, and those of this one."""

    def __init__(
        self, path: Path | None = None, identity: Mapping[str, str] | None = None, group: Group = SINGLE_PROCESS
    ) -> None:
        self.path, self.identity, self.group = path, dict(identity or {}), group
        self.parts: dict[str, Part] = {}
        self._next = 0.0  # when the next write is due
        if path is not None:
            self.parts = self._read(path)

    def __getitem__(self, name: str) -> Part | None:
        """Return a part, if there is one."""
        return self.parts.get(name)

    def keep(self, name: str, part: Callable[[], Part], *, always: bool = False) -> None:
        """Write the state with this part in it, unless the last write is too recent for what writes cost."""
        if self.path is None or not (always or self.group.all_gather_object(time.monotonic() >= self._next)[0]):
            return
        self.parts[name] = part()
        if self.group.rank == 0:
            start = time.monotonic()
            write_whole(self.path, self._content())
            self._next = time.monotonic() + (time.monotonic() - start) * (1 / TIME_SHARE - 1)

    def done(self) -> None:
        """Remove the file: the fit is over."""
        if self.path is not None and self.group.rank == 0:
            with contextlib.suppress(FileNotFoundError):
                self.path.unlink()

    def _content(self) -> bytes:
        tensors = {f"{part}/{n}": t.detach().contiguous().cpu() for part, p in self.parts.items() for n, t in p.tensors.items()}
        values = {name: part.values for name, part in self.parts.items()}
        text = json.dumps({"format": FORMAT, "identity": self.identity, "parts": values})
        return to_bytes(tensors, metadata={"offmap": sealed(text, tensors)})

    def _read(self, path: Path) -> dict[str, Part]:
        content: bytes | None = None
        if self.group.rank == 0 and path.exists():
            try:
                content = path.read_bytes()
            except OSError as error:
                raise FileError(f"Cannot read {path}: {error.strerror}.") from error
        sent = [] if content is None else [torch.from_numpy(np.frombuffer(content, dtype=np.uint8).copy())]
        received = self.group.all_gather(sent)[0]
        if not received:
            return {}
        content = received[0].numpy().tobytes()
        header, tensors = _parse(path, content)
        for name in header["identity"] | self.identity:
            before, now = header["identity"].get(name, "nothing"), self.identity.get(name, "nothing")
            if before != now:
                raise FileError(f"{path} is the state of another fit: {name} was {before} and is {now} now. {REMEDY}")
        parts = {name: Part(values) for name, values in header["parts"].items()}
        for name, tensor in tensors.items():
            part, _, key = name.partition("/")
            parts[part].tensors[key] = tensor
        return parts


NO_CHECKPOINT = Checkpoint()


def _parse(path: Path, content: bytes) -> tuple[dict[str, Any], Weights]:
    """Return header and tensors of a file; a FileError if it is none of ours."""
    try:
        size = int.from_bytes(content[:8], "little")
        if size > HEADER:
            raise ValueError(f"a header of {size} bytes")
        tensors = load_bytes(content)
        expected, _, text = json.loads(content[8 : 8 + size]).get("__metadata__", {})["offmap"].partition(" ")
        header = json.loads(text)
        intact = expected == checksum(text, tensors)
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise FileError(f"{path} is damaged or not the state of a fit ({reason}). {REMEDY}") from error
    if not intact:
        raise FileError(f"{path} is damaged (its checksum does not fit). {REMEDY}")
    version = header.get("format") if isinstance(header, dict) else None
    if version != FORMAT:
        raise FileError(f"{path} is not the state of a fit: expected {FORMAT!r}, but got {version!r}. {REMEDY}")
    identity, parts = header.get("identity"), header.get("parts")
    names = {name for name, part in parts.items() if isinstance(part, dict)} if isinstance(parts, dict) else set[str]()
    if not isinstance(identity, dict) or names != set(parts or ()) or not {n.partition("/")[0] for n in tensors} <= names:
        raise FileError(f"{path} is damaged or not the state of a fit (malformed parts). {REMEDY}")
    return header, tensors


def observe_once(checkpoint: Checkpoint, train: Batches, device: torch.device, observe: Callable[[], Observed]) -> Observed:
    """Return the bases of a pass over the data, in this run or an earlier one."""
    part = checkpoint["bases"]
    if part is not None:
        _set_order(train, _load_order(part, checkpoint.group))
        return _load_bases(part, device)
    observed = observe()

    def save() -> Part:
        named = {name: [asdict(b.view), b.bias] for name, b in observed.bases.items()}
        fields = ("input_rms", "output_rms", "matrix")
        tensors = {f"{f}.{n}": t for n, b in observed.bases.items() for f in fields if (t := getattr(b, f)) is not None}
        return Part({"bases": named, "why": observed.why}, tensors | _save_order(_order(train), checkpoint.group))

    checkpoint.keep("bases", save, always=True)
    return observed


def _load_bases(part: Part, device: torch.device) -> Observed:
    bases: dict[str, Basis] = {}
    tensors = {name: tensor.to(device) for name, tensor in part.tensors.items()}
    for name, (state, bias) in part.values["bases"].items():
        view = MatrixView(**{key: tuple(numbers) for key, numbers in state.items()})
        bases[name] = Basis(
            view, tensors[f"input_rms.{name}"], tensors[f"output_rms.{name}"], tensors.get(f"matrix.{name}"), bias
        )
    return Observed(bases, part.values["why"])


@dataclass
class Descent:
    """Gradient steps that an earlier run may have begun: `step` of them are taken."""

    checkpoint: Checkpoint
    name: str
    q: WeightDistribution
    monitor: RiskMonitor
    optimizer: torch.optim.Optimizer
    cycle: Cycle
    step: int = 0

    def resume(self) -> str | None:
        """Restore the state of the earlier run, if there was one; return its stop reason, if it took all steps."""
        part, group = self.checkpoint[self.name], self.checkpoint.group
        if part is None:
            return None
        _copy(self.q.raw_scale.values(), [part.tensors[f"raw_scale.{n}"] for n, _ in self.q.raw_scale.items()])
        vars(self.monitor.history).update(part.values["history"])
        if part.values["stop_reason"] is not None:
            _set_order(self.cycle.data, _load_order(part, group))
            return part.values["stop_reason"]
        self.step, self.monitor.failures = part.values["step"], part.values["failures"]
        _copy(self.monitor.best, [part.tensors[f"best.{i}"] for i in range(len(self.monitor.best))])
        state, keys = self.optimizer.state_dict(), part.values["optimizer"]
        count = len(self._parameters())
        state["state"] = {i: {key: part.tensors[f"optimizer.{i}.{key}"] for key in keys} for i in range(count)}
        self.optimizer.load_state_dict(state)
        positions = part.values["positions"]
        self.cycle.epoch, self.cycle.taken = positions[group.rank if len(positions) == group.size else 0]
        self.cycle.order = _load_order(part, group)
        _set_order(self.cycle.data, _load_order(part, group, "now"))  # for what follows, should no step be left
        return None

    def __call__(self, step: int, loss: Tensor) -> bool:
        """Keep the state after every check, as a monitor that never stops the loop."""
        if (step + 1) % self.monitor.every == 0:
            self.checkpoint.keep(self.name, lambda: self._save(step + 1))
        return False

    def end(self) -> None:
        """Keep the result; later runs do not repeat the steps."""
        history = self.monitor.history

        def save() -> Part:
            values = {"stop_reason": history.stop_reason, "history": asdict(history)}
            return Part(values, self._scales() | _save_order(_order(self.cycle.data), self.checkpoint.group))

        self.checkpoint.keep(self.name, save, always=True)

    def _save(self, step: int) -> Part:
        group, states = self.checkpoint.group, [self.optimizer.state[p] for p in self._parameters()]
        tensors = {f"best.{i}": t.clone() for i, t in enumerate(self.monitor.best)}
        tensors |= {f"optimizer.{i}.{key}": value.clone() for i, state in enumerate(states) for key, value in state.items()}
        values = {
            "step": step, "stop_reason": None, "failures": self.monitor.failures, "history": asdict(self.monitor.history),
            "optimizer": list(states[0]), "positions": group.all_gather_object([self.cycle.epoch, self.cycle.taken]),
        }  # fmt: skip
        orders = _save_order(self.cycle.order, group) | _save_order(_order(self.cycle.data), group, "now")
        return Part(values, self._scales() | tensors | orders)

    def _scales(self) -> Weights:
        return {f"raw_scale.{n}": t.detach().clone() for n, t in self.q.raw_scale.items()}

    def _parameters(self) -> list[Tensor]:
        return [p for params in self.optimizer.param_groups for p in params["params"]]


@torch.no_grad()
def _copy(tensors: Iterable[Tensor], values: Sequence[Tensor]) -> None:
    for tensor, value in zip(tensors, values, strict=True):
        tensor.copy_(value)


def _order(data: Batches) -> list[Tensor]:
    """Return the states of the generators by which data are shuffled."""
    return [generator.get_state() for generator in data.generators()]


def _set_order(data: Batches, states: Sequence[Tensor]) -> None:
    for generator, state in zip(data.generators(), states, strict=False):
        generator.set_state(state)


def _save_order(states: Sequence[Tensor], group: Group, when: str = "order") -> Weights:
    """Return the generator states of all ranks by name: "order" when the epoch or pass began, "now" in the middle of it."""
    return {f"{when}.{rank}.{i}": t for rank, tensors in enumerate(group.all_gather(states)) for i, t in enumerate(tensors)}


def _load_order(part: Part, group: Group, when: str = "order") -> list[Tensor]:
    """Return the generator states of this rank, or of the first if the number of ranks has changed."""
    ranks = {name.split(".")[1] for name in part.tensors if name.startswith(f"{when}.")}
    rank = group.rank if len(ranks) == group.size else 0
    states = {name: t for name, t in part.tensors.items() if name.startswith(f"{when}.{rank}.")}
    return [states[f"{when}.{rank}.{i}"] for i in range(len(states))]
