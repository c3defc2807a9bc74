"""Which parameters are random: `params` made into names, by a look at a forward pass where a word needs one."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from offmap._torch_private import TorchDispatchMode, tree_leaves
from offmap._types import Inputs, Weights
from offmap.data.inputs import take_rows
from offmap.errors import ConfigError
from offmap.model.capture import LOOKUP, CaptureMode, ParamUse, slow_attention
from offmap.model.forward import OutputFn, call, first_tensor
from offmap.model.inspect import ROWS
from offmap.model.params import LAST_LAYER, ParamSelection, chooser, copy_model, entries, floating, listed
from offmap.model.params import select_params as select_weights
from offmap.posterior.construct import StackedModel

aten = torch.ops.aten


def choose(
    at: StackedModel,
    inputs: Inputs,
    params: ParamSelection = None,
    output_fn: OutputFn = first_tensor,
    *,
    unreached: Collection[str] = (),
) -> StackedModel:
    """The same centre with those parameters random that `params` asks for and some input reaches; the others stay fixed."""
    asked = select_weights(at.net, _spelled_out(at.net, inputs, params, output_fn))
    names = [name for name in asked if name not in unreached]
    if not names:
        raise ConfigError(
            f"Expected `params` to pick a parameter that some input reaches, but {params!r} picks {listed(asked)} alone. "
            "Check `output_fn`, or pick others."
        )
    rest = {n: w for n, w in at.mean.items() if n not in names}
    # one member alone finds its fixed weights in the private model itself
    return replace(at, mean={n: at.mean[n] for n in names}, fixed=at.fixed | rest if at.members > 1 else at.fixed)


def _spelled_out(net: nn.Module, inputs: Inputs, params: ParamSelection, output_fn: OutputFn) -> ParamSelection:
    """`params` with "last-layer" replaced by what it stands for."""
    if params is None or callable(params) or LAST_LAYER not in entries(params):
        return params
    names = last_layer(net, take_rows(inputs, slice(0, ROWS)), output_fn)
    rest = chooser([entry for entry in entries(params) if entry != LAST_LAYER])
    return lambda name, tensor: name in names or rest(name, tensor)


@torch.no_grad()
def last_layer(net: nn.Module, x: Inputs, output_fn: OutputFn = first_tensor) -> list[str]:
    """Weight and bias of the last matrix product that leads to the selected output, in order of execution.

    Products are tried from the last one backwards: the first whose result matters when it is changed is the one.

    >>> last_layer(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)), torch.ones(4, 2))
    ['2.weight', '2.bias']
    """
    weights = floating(net)

    def run(nudge: Nudge) -> Tensor:
        with slow_attention(), CaptureMode(weights, nudge.reads.append), nudge:
            return call(copy_model(net, share=True), weights, x, output_fn)

    plain = run(watched := Nudge(weights))
    for position, read in reversed(list(enumerate(watched.reads))):
        if read.why != LOOKUP and weights[read.name].ndim >= 2 and not torch.equal(run(nudge := Nudge(weights, position)), plain):
            return [name for name in floating(net) if name in (read.name, read.bias, nudge.bias)]
    raise ConfigError(
        f"Expected a matrix product on the way to the output for params={LAST_LAYER!r}, but {type(net).__name__} has none. "
        "Pick parameters by name."
    )


class Nudge(TorchDispatchMode):
    """Inside a ReadWatcher that files into `reads`: changes the result of the read at `position`; sees what is added to it."""

    def __init__(self, weights: Weights, position: int = -1) -> None:
        super().__init__()
        self.reads: list[ParamUse] = []
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
