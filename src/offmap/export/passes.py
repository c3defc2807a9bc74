"""One pass of every plain member in a graph: its outputs, and what some of its layers meet on the way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from offmap._types import Inputs, Weights
from offmap.errors import ModelError
from offmap.model.capture import pool_map
from offmap.model.forward import BatchedModel, call
from offmap.model.params import NamedTensors, copy_model

REMEDY = "Fit with score='epistemic', which compares no layers."

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


@dataclass(frozen=True)
class Passed:
    """Of every member: what named matrices met, {name: (B, D)}; what the last layer met, (B, D), if that was asked; outputs."""

    met: list[dict[str, Tensor]]
    ends: list[Tensor]
    outputs: list[Tensor]


class Passes(nn.Module):
    """The plain members, watched while they run: `names` are matrices whose layers tell, `ending` the last layer.

    While a graph is traced only modules show what they are given: `nn.Linear` and, of `pictures`, convolutions, whose channels
    are summed up by mean and standard deviation.
    """

    def __init__(
        self, model: BatchedModel, members: Sequence[Weights], names: Sequence[str], *, pictures: bool = False, half: bool = False
    ) -> None:
        super().__init__()
        self.model = [(copy_model(model.net), model.output_fn)]
        self.dtypes = {name: w.dtype for name, w in members[0].items()}
        self.members = nn.ModuleList(
            NamedTensors(
                {n: w.detach().half() if half and w.dtype == torch.float32 else w.detach().clone() for n, w in m.items()}
            )
            for m in members
        )
        net, _ = self.model[0]
        self.owners = {name: _owners(net, name, pictures) for name in names}
        self.last = [net.get_submodule(model.last_layer)] if model.last_layer is not None else []

    def forward(self, inputs: Inputs) -> Passed:
        """All members, one after another."""
        each = [self._run(weights, inputs) for weights in self.members]  # pyright: ignore
        return Passed(*(list(parts) for parts in zip(*each, strict=True)))

    def _run(self, mirror: NamedTensors, inputs: Inputs) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        net, output_fn = self.model[0]
        found: dict[str, Tensor] = {}
        ends: list[Tensor] = []

        def watch(name: str) -> Callable[[nn.Module, Any], None]:
            def keep(module: nn.Module, args: Any) -> None:
                if name not in found:
                    found[name] = pool_map(args[0]) if isinstance(module, CONVOLUTIONS) else args[0].flatten(0, -2)

            return keep

        hooks = [owner.register_forward_pre_hook(watch(name)) for name, owners in self.owners.items() for owner in owners]
        hooks += [last.register_forward_pre_hook(lambda module, args: ends.append(args[0])) for last in self.last]
        try:
            output = call(net, {n: w.to(self.dtypes[n]) for n, w in mirror.items()}, inputs, output_fn)
        finally:
            for hook in hooks:
                hook.remove()
        for name in self.owners:
            if name not in found:
                raise ModelError(f"Expected `{name}` to be used by its own layer, but the model reads it elsewhere, which a traced "
                                f"graph does not show. {REMEDY}")  # fmt: skip
        return found, ends[-1] if ends else output, output.to(torch.promote_types(output.dtype, torch.float32))


def _owners(net: nn.Module, name: str, pictures: bool) -> list[nn.Module]:
    """The layers that hold this parameter, refused unless all show what they are given."""
    parameter = dict(net.named_parameters())[name]
    owners = [m for m in net.modules() if any(p is parameter for p in vars(m)["_parameters"].values())]
    shown = (nn.Linear, *CONVOLUTIONS) if pictures else (nn.Linear,)
    other = [m for m in owners if not isinstance(m, shown)]
    if other:
        raise ModelError(f"Expected `{name}`, whose inputs the default score compares, to belong to an nn.Linear for export, but "
                        f"it belongs to {type(other[0]).__name__}. {REMEDY}")  # fmt: skip
    return owners
