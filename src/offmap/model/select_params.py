"""Which parameters are random: `where` made into names, by a look at a forward pass where a word needs one."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from offmap._types import Inputs, Weights
from offmap.data.inputs import take_rows
from offmap.errors import ConfigError
from offmap.model.capture import LOOKUP, Read, ReadWatcher, slow_attention
from offmap.model.forward import Select, call, first_tensor
from offmap.model.inspect import ROWS
from offmap.model.params import LAST_LAYER, Where, chooser, copy_host, entries, floating, listed
from offmap.model.params import select as select_weights
from offmap.posterior.construct import Centre

aten = torch.ops.aten


def choose(
    at: Centre, inputs: Inputs, where: Where = None, select: Select = first_tensor, *, unreached: Collection[str] = ()
) -> Centre:
    """The same centre with those parameters random that `where` asks for and some input reaches; the others stay fixed."""
    asked = select_weights(at.net, _spelled_out(at.net, inputs, where, select))
    names = [name for name in asked if name not in unreached]
    if not names:
        raise ConfigError(
            f"Expected `where` to pick a parameter that some input reaches, but {where!r} picks {listed(asked)} alone. "
            "Check `select`, or pick others."
        )
    rest = {n: w for n, w in at.mean.items() if n not in names}
    # one member alone finds its fixed weights in the private host itself
    return replace(at, mean={n: at.mean[n] for n in names}, fixed=at.fixed | rest if at.members > 1 else at.fixed)


def _spelled_out(net: nn.Module, inputs: Inputs, where: Where, select: Select) -> Where:
    """`where` with "last-layer" replaced by what it stands for."""
    if where is None or callable(where) or LAST_LAYER not in entries(where):
        return where
    names = last_layer(net, take_rows(inputs, slice(0, ROWS)), select)
    rest = chooser([entry for entry in entries(where) if entry != LAST_LAYER])
    return lambda name, tensor: name in names or rest(name, tensor)


@torch.no_grad()
def last_layer(net: nn.Module, x: Inputs, select: Select = first_tensor) -> list[str]:
    """Weight and bias of the last matrix product that leads to the selected output, in order of execution.

    Products are tried from the last one backwards: the first whose result matters when it is changed is the one.

    >>> last_layer(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)), torch.ones(4, 2))
    ['2.weight', '2.bias']
    """
    weights = floating(net)

    def run(nudge: Nudge) -> Tensor:
        with slow_attention(), ReadWatcher(weights, nudge.reads.append), nudge:
            return call(copy_host(net, share=True), weights, x, select)

    plain = run(watched := Nudge(weights))
    for position, read in reversed(list(enumerate(watched.reads))):
        if read.why != LOOKUP and weights[read.name].ndim >= 2 and not torch.equal(run(nudge := Nudge(weights, position)), plain):
            return [name for name in floating(net) if name in (read.name, read.bias, nudge.bias)]
    raise ConfigError(
        f"Expected a matrix product on the way to the output for where={LAST_LAYER!r}, but {type(net).__name__} has none. "
        "Pick parameters by name."
    )


class Nudge(TorchDispatchMode):
    """Inside a ReadWatcher that files into `reads`: changes the result of the read at `position`; sees what is added to it."""

    def __init__(self, weights: Weights, position: int = -1) -> None:
        super().__init__()
        self.reads: list[Read] = []
        self.position = position
        self.bias: str | None = None
        self.names = {w.data_ptr(): n for n, w in weights.items()}
        self.product = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator, and change what it gives if it is the one."""
        before = len(self.reads)
        if self.product and func.overloadpacket in (aten.add, aten.add_):
            a, b = args[:2]
            for left, right in ((a, b), (b, a)):
                if isinstance(left, Tensor) and isinstance(right, Tensor) and _address(left) == self.product:
                    self.bias = self.bias or self.names.get(right.data_ptr())
        result = func(*args, **(kwargs or {}))
        if before <= self.position < len(self.reads):
            for leaf in tree_leaves(result):
                if isinstance(leaf, Tensor) and leaf.is_floating_point():
                    # not a constant: a softmax would not see it
                    leaf.add_(torch.linspace(0.5, 1.5, leaf.numel(), device=leaf.device).reshape(leaf.shape).to(leaf))
                    self.product = _address(leaf)
        return result


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
