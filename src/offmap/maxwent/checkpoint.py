"""The state of a fit in one file, so that a fit that was killed can go on; and the identity of a fit, to which a file belongs.

A state has parts, each with plain values and tensors: the bases, the closed form, the gradient steps. Every write replaces the
file at once, so that it always holds the state of one moment; what a write costs decides how often there is one. A fit that goes
on gives what it would have given undisturbed, to the bit in one process: noise and order have addresses, and where a DataLoader
shuffles by itself, the states of its generators are stored too.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from offmap._torch_private import tree_leaves
from offmap._types import Weights
from offmap.atomic import digest, seal, unseal_as, write_whole
from offmap.data import Batches, Rows
from offmap.distributed.group import SINGLE_PROCESS, Group
from offmap.errors import ConfigError, DataError, FileError, ModelError, OffmapError
from offmap.maxwent.train import Cycle, RiskMonitor
from offmap.model.matrix_view import MatrixView
from offmap.model.params import StackedModel
from offmap.posterior.basis import Basis, Observed
from offmap.posterior.distribution import WeightDistribution

FORMAT = "offmap-checkpoint-2"
REMEDY = "Delete the file to start anew, or pass another `checkpoint=`."

TIME_SHARE = 0.1  # of a fit that may be spent on writing its state
MODEL = "the model"
SAME_DATA = (DataError, "Pass the same data on every rank, a DataLoader with a DistributedSampler, or `ranks='sharded'`.")
REMEDIES: dict[str, tuple[type[OffmapError], str]] = {
    MODEL: (ModelError, "Load the same weights on every rank."), "`train`": SAME_DATA, "`valid`": SAME_DATA,
}  # fmt: skip


class Part(NamedTuple):
    """A result of a fit: plain values as JSON has them, and tensors by name."""

    values: dict[str, Any]
    tensors: Weights


class Checkpoint:
    """Parts of a fit by name: those that an earlier run left at `path`, and those of this one."""

    def __init__(self, path: Path, identity: Mapping[str, str], group: Group = SINGLE_PROCESS) -> None:
        self.path: Path = path
        self.identity: dict[str, str] = dict(identity)
        self.group: Group = group
        self._next = 0.0  # when the next write is due
        self.parts: dict[str, Part] = self._read()

    def __getitem__(self, name: str) -> Part | None:
        """Return a part, if there is one."""
        return self.parts.get(name)

    def due(self) -> bool:
        """Return, the same on every rank, whether the last write is long enough ago for what writes cost."""
        return self.group.all_gather_object(time.monotonic() >= self._next)[0]

    def keep(self, name: str, values: dict[str, Any], tensors: Weights) -> None:
        """Write the state with this part in it."""
        self.parts[name] = Part(values, tensors)
        if self.group.rank == 0:
            start = time.monotonic()
            header = {"format": FORMAT, "identity": self.identity, "parts": {n: part.values for n, part in self.parts.items()}}
            write_whole(self.path, seal(header, {f"{n}/{key}": t for n, p in self.parts.items() for key, t in p.tensors.items()}))
            self._next = time.monotonic() + (time.monotonic() - start) * (1 / TIME_SHARE - 1)

    def done(self) -> None:
        """Remove the file: the fit is over."""
        if self.group.rank == 0:
            with contextlib.suppress(FileNotFoundError):
                self.path.unlink()

    def _read(self) -> dict[str, Part]:
        content, path = list[Tensor](), self.path
        if self.group.rank == 0 and path.exists():
            try:
                content = [torch.frombuffer(bytearray(path.read_bytes() or b" "), dtype=torch.uint8)]
            except OSError as error:
                raise FileError(f"Cannot read {path}: {error.strerror}.") from error
        content = self.group.all_gather(content)[0]
        if not content:
            return {}
        header, tensors = unseal_as("the state of a fit", FORMAT, content[0].numpy().tobytes(), path, REMEDY)
        try:
            identity = dict(header["identity"])
            parts = {name: Part(dict(values), {}) for name, values in header["parts"].items()}
            for name, tensor in tensors.items():
                part, _, key = name.partition("/")
                parts[part].tensors[key] = tensor
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise FileError(f"{path} is damaged or not the state of a fit (malformed parts). {REMEDY}") from error
        for name in identity | self.identity:
            before, now = identity.get(name, "nothing"), self.identity.get(name, "nothing")
            if before != now:
                raise FileError(f"{path} is the state of another fit: {name} was {before} and is {now} now. {REMEDY}")
        return parts


def observe_once(checkpoint: Checkpoint, train: Batches, device: torch.device, observe: Callable[[], Observed]) -> Observed:
    """Return the bases of a pass over the data, in this run or an earlier one."""
    part, names = checkpoint["bases"], ("input_rms", "output_rms", "matrix")
    if part is None:
        observed = observe()
        values = {"bases": {n: [asdict(b.view), b.bias] for n, b in observed.bases.items()}, "why": observed.why}
        tensors = {f"{f}.{n}": t for n, b in observed.bases.items() for f in names if (t := getattr(b, f)) is not None}
        checkpoint.keep("bases", values, tensors | _save_order(_order(train), checkpoint.group))
        return observed
    _set_order(train, _load_order(part, checkpoint.group))
    tensors, bases = {name: tensor.to(device) for name, tensor in part.tensors.items()}, dict[str, Basis]()
    for name, (state, bias) in part.values["bases"].items():
        view = MatrixView(**{key: tuple(numbers) for key, numbers in state.items()})
        bases[name] = Basis(view, bias=bias, **{f: tensors[f"{f}.{name}"] for f in names if f"{f}.{name}" in tensors})
    return Observed(bases, part.values["why"])


def keep_once(
    checkpoint: Checkpoint | None, name: str, train: Batches, device: torch.device, find: Callable[[], Weights]
) -> Weights:
    """Return tensors that were found in this run or an earlier one, and leave the data in the order after that."""
    if checkpoint is None:
        return find()
    part = checkpoint[name]
    if part is not None:
        _set_order(train, _load_order(part, checkpoint.group))
        return {key.removeprefix("found."): t.to(device) for key, t in part.tensors.items() if key.startswith("found.")}
    tensors = find()
    checkpoint.keep(name, {}, {f"found.{n}": t for n, t in tensors.items()} | _save_order(_order(train), checkpoint.group))
    return tensors


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
        values, tensors = part
        _copy(self.q.trained().values(), [tensors[name] for name in self.q.trained()])
        vars(self.monitor.history).update(values["history"])
        if values["stop_reason"] is not None:
            _set_order(self.cycle.data, _load_order(part, group))
            return values["stop_reason"]
        self.step, self.monitor.failures = values["step"], values["failures"]
        _copy(self.monitor.best, [tensors[f"best.{i}"] for i in range(len(self.monitor.best))])
        state = self.optimizer.state_dict()
        count = sum(len(params["params"]) for params in state["param_groups"])
        state["state"] = {i: {key: tensors[f"optimizer.{i}.{key}"] for key in values["optimizer"]} for i in range(count)}
        self.optimizer.load_state_dict(state)
        positions = values["positions"]
        self.cycle.epoch, self.cycle.taken = positions[group.rank if len(positions) == group.size else 0]
        self.cycle.order = _load_order(part, group)
        _set_order(self.cycle.data, _load_order(part, group, "now"))  # for what follows, should no step be left
        return None

    def __call__(self, step: int, loss: Tensor) -> bool:
        """Keep the state after every check, as a monitor that never stops the loop."""
        if (step + 1) % self.monitor.every == 0 and self.checkpoint.due():
            group, states = self.checkpoint.group, self.optimizer.state_dict()["state"]
            tensors = {f"best.{i}": t.clone() for i, t in enumerate(self.monitor.best)}
            tensors |= {f"optimizer.{i}.{key}": value.clone() for i, state in states.items() for key, value in state.items()}
            positions = group.all_gather_object([self.cycle.epoch, self.cycle.taken])
            tensors |= _save_order(_order(self.cycle.data), group, "now")
            values = {"step": step + 1, "failures": self.monitor.failures, "optimizer": list(states[0]), "positions": positions}
            self._keep(values | {"stop_reason": None}, tensors, self.cycle.order)
        return False

    def end(self) -> None:
        """Keep the result; later runs do not repeat the steps."""
        self._keep({"stop_reason": self.monitor.history.stop_reason}, {}, _order(self.cycle.data))

    def _keep(self, values: dict[str, Any], tensors: Weights, order: Sequence[Tensor]) -> None:
        tensors |= {name: t.detach().clone() for name, t in self.q.trained().items()}
        tensors |= _save_order(order, self.checkpoint.group)
        self.checkpoint.keep(self.name, values | {"history": asdict(self.monitor.history)}, tensors)


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
    prefix = f"{when}.{group.rank if len(ranks) == group.size else 0}."
    return [part.tensors[f"{prefix}{i}"] for i in range(sum(name.startswith(prefix) for name in part.tensors))]


def identify(models: StackedModel, data: Mapping[str, Batches | None], config: Any, **options: Any) -> dict[str, str]:
    """Return models, data and options by name, each as a text that is equal for equal things in every process."""
    weights = models.mean | models.fixed | dict(models.module.named_buffers())
    # options first: another seed shuffles the data otherwise, and then they look different too
    texts = {f"`{name}`": _describe(value) for name, value in (options | vars(config)).items()}
    texts |= {MODEL: _hash([[name, *digest(tensor)] for name, tensor in sorted(weights.items())])}
    return texts | {f"`{name}`": _describe_data(rows) for name, rows in data.items() if rows is not None}


def check_same_on_all(identity: Mapping[str, str], group: Group) -> None:
    """Raise, on every rank, if the identity of one of them differs."""
    first, *others = group.all_gather_object(dict(identity))
    for name in first:
        for rank, other in enumerate(others, 1):
            if other.get(name) != first[name]:
                error, remedy = REMEDIES.get(name, (ConfigError, "Pass the same options on every rank."))
                raise error(
                    f"Expected {name} to be the same on every rank, but it is {first[name]} on rank 0 and "
                    f"{other.get(name, 'nothing')} on rank {rank}. {remedy}"
                )


def _describe_data(data: Batches) -> str:
    """Return the number of rows and a hash of all of them, or of the first batch of a stream, as if nothing had been read."""
    if isinstance(data, Rows):
        return f"{data.rows} rows ({_describe((data.inputs, data.targets))})"
    states = _order(data)
    first = next(iter(data), None)
    _set_order(data, states)
    length = getattr(data.source.dataset, "__len__", None)
    return f"{length() if length else 'some'} rows ({_describe(first)} first)"


def _describe(value: Any) -> str:
    """Return an option, or a tree of tensors, as a text that does not change from run to run."""
    if isinstance(value, type) or (callable(value) and hasattr(value, "__qualname__")):
        return f"{value.__module__}.{value.__qualname__}"
    if is_dataclass(value):
        return f"{type(value).__name__}({', '.join(_describe(getattr(value, f.name)) for f in fields(value))})"
    tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
    if tensors:
        return _hash([digest(tensor) for tensor in tensors])
    return type(value).__name__ if type(value).__repr__ is object.__repr__ else repr(value)


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:12]
