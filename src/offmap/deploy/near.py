"""How far rows are from familiar ones, and from which layers: as operations of a graph, any number of rows at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from offmap._types import Inputs, Weights
from offmap.core.forward import call
from offmap.deploy.draws import Draws
from offmap.distance import NEIGHBOURS, relative
from offmap.errors import HostError

REMEDY = "Fit with score='epistemic', which compares no layers."


class Scaled(nn.Module):
    """Numbers in standard deviations above the familiar mean, `least` at least; 0 where familiar ones are all the same."""

    def __init__(self, centre: float, spread: float, least: float) -> None:
        super().__init__()
        self.centre, self.spread, self.least = centre, spread, least

    def forward(self, values: Tensor) -> Tensor:
        """(B,) -> (B,)."""
        if self.spread < 1e-6 * (1 + abs(self.centre)):
            return torch.where(values.isfinite(), 0.0, values)
        return ((values - self.centre) / self.spread).clamp_min(self.least)


class Near(nn.Module):
    """Familiar rows (N, D), and the scaled log ratio of how far others are: `offmap.distance`, without blocks.

    `rows` are centred, so that little cancels in |x − row|² − |x|² = |row|² − 2 x·row, which finds the nearest.
    """

    rows: Tensor
    centre: Tensor
    unit: Tensor
    spacings: Tensor

    def __init__(self, tensors: Weights, scale: Scaled) -> None:
        super().__init__()
        for name in ("rows", "centre", "unit", "spacings"):
            self.register_buffer(name, tensors[name].detach().clone())
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        """How strange rows (B, D) are here, (B,)."""
        x, apart = self._apart(x)
        numbers = apart.topk(min(NEIGHBOURS, len(self.rows) - 1), dim=1, largest=False).indices
        distances = (self.rows[numbers].double() - x.double().unsqueeze(1)).square().sum(2).sqrt()
        return self.scale(relative(distances, numbers, self.spacings))

    def _apart(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The scaled rows, and |x − row|² − |x|², (B, N)."""
        x = ((x.double() - self.centre) / self.unit).to(self.rows.dtype)
        near = self.rows.float()
        return x, near.square().sum(1) - 2 * (x.float() @ near.mT)

    def undecided(self, x: Tensor) -> Tensor:
        """Rows (B, D) whose k-th and next neighbour are equally far up to rounding, (B,): either may count, on any machine."""
        x, apart = self._apart(x)
        count = min(NEIGHBOURS, len(self.rows) - 1)
        last, after = apart.topk(count + 1, dim=1, largest=False).values[:, -2:].unbind(1)
        size = x.float().square().sum(1) + self.rows.float().square().sum(1).amax()
        return after - last <= 1e-5 * size


class Layers(nn.Module):
    """What named matrices of all plain members meet, side by side: `directions` (D, NARROW) turn those that are wide.

    Only `nn.Linear` tells what it meets while a graph is traced.
    """

    def __init__(self, plain: Draws, names: Sequence[str], directions: Weights) -> None:
        super().__init__()
        self.plain, self.names = plain, tuple(names)
        self.wide = tuple(directions)
        for place, name in enumerate(directions):
            self.register_buffer(f"directions{place}", directions[name].clone())
        net, _ = plain.host[0]
        self.owners = {name: _owners(net, name) for name in names}

    def forward(self, inputs: Inputs) -> dict[str, Tensor]:
        """{name: (B, D)}."""
        each = [self._met(member, inputs) for member in range(self.plain.members)]
        met = {name: torch.cat([one[name] for one in each], 1) for name in self.names}
        for place, name in enumerate(self.wide):
            directions = getattr(self, f"directions{place}")
            met[name] = met[name].to(directions.dtype) @ directions
        return met

    def _met(self, member: int, inputs: Inputs) -> dict[str, Tensor]:
        """{name: (B, D)} of one member, at first use."""
        net, select = self.plain.host[0]
        found: dict[str, Tensor] = {}
        hooks: list[RemovableHandle] = []

        def watch(name: str) -> Callable[[nn.Module, Any], None]:
            def keep(module: nn.Module, args: Any) -> None:
                if name not in found:
                    found[name] = args[0].flatten(0, -2)

            return keep

        try:
            for name, owners in self.owners.items():
                hooks += [owner.register_forward_pre_hook(watch(name)) for owner in owners]
            call(net, self.plain.weights(member), inputs, select)
        finally:
            for hook in hooks:
                hook.remove()
        for name in self.names:
            if name not in found:
                raise HostError(f"Expected `{name}` to be used by its own layer, but the host reads it elsewhere, which a traced "
                                f"graph does not show. {REMEDY}")  # fmt: skip
        return found


def _owners(net: nn.Module, name: str) -> list[nn.Module]:
    """The layers that hold this parameter, refused unless all are `nn.Linear`."""
    parameter = dict(net.named_parameters())[name]
    owners = [m for m in net.modules() if any(p is parameter for p in vars(m)["_parameters"].values())]
    other = [m for m in owners if not isinstance(m, nn.Linear)]
    if other:
        raise HostError(f"Expected `{name}`, whose inputs the default score compares, to belong to an nn.Linear for export, but "
                        f"it belongs to {type(other[0]).__name__}. {REMEDY}")  # fmt: skip
    return owners
