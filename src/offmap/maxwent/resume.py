"""What of a fit is kept in its checkpoint, and how it goes on from there: the bases, the closed form, the gradient steps.

A fit that goes on gives what it would have given undisturbed, to the bit in one process: noise and order have addresses, and
where a DataLoader shuffles by itself, the state of its generators is kept too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from offmap._types import Weights
from offmap.data import Batches
from offmap.distributed.group import Group
from offmap.maxwent.checkpoint import Checkpoint, Part
from offmap.maxwent.monitors import RiskThreshold
from offmap.maxwent.train import Cycle, generators_of
from offmap.model.matrix_view import MatrixView
from offmap.posterior.basis import Basis
from offmap.posterior.construct import Observed
from offmap.posterior.distribution import WeightDistribution


def seen_once(checkpoint: Checkpoint, train: Batches, device: torch.device, observe: Callable[[], Observed]) -> Observed:
    """What the pass over the data saw, in this run or an earlier one."""
    known = checkpoint["bases"]
    if known is not None:
        _set_order(train, _own_states(known, checkpoint.group))
        return _observed(known, device)
    seen = observe()
    checkpoint.keep("bases", lambda: _bases_part(seen, _all_states(_order(train), checkpoint.group)), always=True)
    return seen


def _bases_part(seen: Observed, states: Weights) -> Part:
    bases = {name: [asdict(b.frame), b.bias] for name, b in seen.bases.items()}
    tensors = {f"{field}.{name}": t for name, b in seen.bases.items() for field, t in _tensors(b).items()}
    return Part({"bases": bases, "why": seen.why}, tensors | states)


def _tensors(basis: Basis) -> Weights:
    both = {"amplitude": basis.amplitude, "reach": basis.reach}
    return both if basis.matrix is None else both | {"matrix": basis.matrix}


def _observed(part: Part, device: torch.device) -> Observed:
    bases: dict[str, Basis] = {}
    for name, (frame, bias) in part.values["bases"].items():
        amplitude, reach, matrix = (part.tensors.get(f"{field}.{name}") for field in ("amplitude", "reach", "matrix"))
        assert amplitude is not None
        assert reach is not None
        own = MatrixView(**{field: tuple(numbers) for field, numbers in frame.items()})
        bases[name] = Basis(own, amplitude.to(device), reach.to(device), None if matrix is None else matrix.to(device), bias)
    return Observed(bases, part.values["why"])


@dataclass
class Descent:
    """Gradient steps that may have been begun by an earlier run: `step` of them are taken, `stop_reason` says if that was all."""

    checkpoint: Checkpoint
    name: str
    q: WeightDistribution
    monitor: RiskThreshold
    optimizer: torch.optim.Optimizer
    cycle: Cycle
    step: int = 0

    def resume(self) -> str | None:
        """Bring everything to where the earlier run was; returns how the steps ended, if they did."""
        part, group = self.checkpoint[self.name], self.checkpoint.group
        if part is None:
            return None
        _copy(self.q.raw_scale.values(), [part.tensors[f"raw_scale.{n}"] for n, _ in self.q.raw_scale.items()])
        vars(self.monitor.history).update(part.values["history"])
        if part.values["stop_reason"] is not None:
            _set_order(self.cycle.data, _own_states(part, group))
            return part.values["stop_reason"]
        self.step, self.monitor.failures = part.values["step"], part.values["failures"]
        _copy(self.monitor.best, [part.tensors[f"best.{i}"] for i in range(len(self.monitor.best))])
        state = self.optimizer.state_dict()
        state["state"] = {
            i: {key: part.tensors[f"optimizer.{i}.{key}"] for key in part.values["optimizer"]}
            for i in range(len(self._trained()))
        }
        self.optimizer.load_state_dict(state)
        stands = part.values["stands"]
        mine = stands[group.rank] if len(stands) == group.size else stands[0]
        self.cycle.epoch, self.cycle.taken = mine
        self.cycle.order = _own_states(part, group)
        _set_order(self.cycle.data, _own_states(part, group, "now"))  # for what follows, should no step be left
        return None

    def __call__(self, step: int, loss: Tensor) -> bool:
        """A monitor that keeps the state after every check; never stops the loop."""
        if (step + 1) % self.monitor.every == 0:
            self.checkpoint.keep(self.name, lambda: self._part(step + 1))
        return False

    def _part(self, step: int) -> Part:
        group = self.checkpoint.group
        states = [self.optimizer.state[p] for p in self._trained()]
        tensors = {f"raw_scale.{n}": t for n, t in self.q.raw_scale.items()}
        tensors |= {f"best.{i}": t for i, t in enumerate(self.monitor.best)}
        tensors |= {f"optimizer.{i}.{key}": value for i, state in enumerate(states) for key, value in state.items()}
        values = {
            "step": step, "stop_reason": None, "failures": self.monitor.failures, "history": asdict(self.monitor.history),
            "optimizer": list(states[0]), "stands": group.all_gather_object([self.cycle.epoch, self.cycle.taken]),
        }  # fmt: skip
        orders = _all_states(self.cycle.order, group) | _all_states(_order(self.cycle.data), group, "now")
        return Part(values, {n: t.detach().clone() for n, t in tensors.items()} | orders)

    def end(self) -> None:
        """Keep the result; later runs do not repeat the steps."""
        history = self.monitor.history

        def made() -> Part:
            tensors = {f"raw_scale.{n}": t.detach().clone() for n, t in self.q.raw_scale.items()}
            states = _all_states(_order(self.cycle.data), self.checkpoint.group)
            return Part({"stop_reason": history.stop_reason, "history": asdict(history)}, tensors | states)

        self.checkpoint.keep(self.name, made, always=True)

    def _trained(self) -> list[Tensor]:
        return [p for each in self.optimizer.param_groups for p in each["params"]]


@torch.no_grad()
def _copy(tensors: Iterable[Tensor], values: Sequence[Tensor]) -> None:
    for tensor, value in zip(tensors, values, strict=True):
        tensor.copy_(value)


def _order(data: Batches) -> list[Tensor]:
    return [generator.get_state() for generator in generators_of(data)]


def _set_order(data: Batches, states: Sequence[Tensor]) -> None:
    for generator, state in zip(generators_of(data), states, strict=False):
        generator.set_state(state)


def _all_states(own: Sequence[Tensor], group: Group, when: str = "order") -> Weights:
    """The states of all ranks' generators, by rank: "order" when the epoch or pass began, "now" in the middle of it."""
    return {f"{when}.{rank}.{i}": t for rank, each in enumerate(group.all_gather(own)) for i, t in enumerate(each)}


def _own_states(part: Part, group: Group, when: str = "order") -> list[Tensor]:
    """Those of this rank, or of the first if there are not as many as there were."""
    ranks = {name.split(".")[1] for name in part.tensors if name.startswith(f"{when}.")}
    rank = group.rank if len(ranks) == group.size else 0
    found = {name: t for name, t in part.tensors.items() if name.startswith(f"{when}.{rank}.")}
    return [found[f"{when}.{rank}.{i}"] for i in range(len(found))]
