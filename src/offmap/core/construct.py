"""From trained hosts to a weight distribution centred on them: `scaling(nets)` and `svd(nets, inputs)`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from offmap._types import Weights
from offmap.core.basis import Basis, build, second_moments
from offmap.core.distribution import Rotation, WeightDistribution
from offmap.core.forward import Select, call, first_tensor
from offmap.core.noise import Noise, as_noise
from offmap.core.weights import Where, at, copy_host, remainder, same_architecture, select, stack


@dataclass(frozen=True)
class Centre:
    """Where a distribution is centred: a private host, the members' random weights, and what else differs between them."""

    net: nn.Module
    mean: Weights
    fixed: Weights

    @property
    def members(self) -> int:
        """M."""
        return next(iter(self.mean.values())).shape[0]

    def weights(self, member: int) -> Weights:
        """All that one member needs to be called through the private host."""
        return at(self.mean, member) | at(self.fixed, member)


def centre(nets: nn.Module | Sequence[nn.Module], where: Where = None) -> Centre:
    """A private copy of the hosts; the users' own are never touched."""
    hosts = [nets] if isinstance(nets, nn.Module) else list(nets)
    same_architecture(hosts)
    net = copy_host(hosts[0], share=len(hosts) > 1)
    chosen = [select(host, where) for host in [net, *hosts[1:]]]
    mean = {n: w.unsqueeze(0) for n, w in chosen[0].items()} if len(hosts) == 1 else stack(chosen)
    fixed: Weights = {}
    if len(hosts) > 1:
        fixed = stack([remainder(host, c) for host, c in zip(hosts, chosen, strict=True)])
        for name, p in net.named_parameters():  # the private host reads the stack, which is all that is held
            p.data = (mean if name in mean else fixed)[name][0]
    return Centre(net, mean, fixed)


def observe(where: Centre, inputs: Iterable[Any], *, rotated: bool, pick: Select = first_tensor) -> dict[str, Basis]:
    """Pass the inputs through every member: how large each parameter's inputs are, and along which directions."""

    def run(net: nn.Module, weights: Weights, x: Any) -> Any:
        return call(net, weights, x, pick)

    members = [where.weights(m) for m in range(where.members)]
    return build(second_moments(where.net, members, inputs, run), where.mean, rotated=rotated)


def rotation(bases: dict[str, Basis]) -> Rotation:
    """The part of the bases that the equation needs."""
    turned = {n: b for n, b in bases.items() if b.matrix is not None}
    return Rotation({n: b.matrix for n, b in turned.items() if b.matrix is not None}, {n: b.axes for n, b in turned.items()})


def scaling(
    nets: nn.Module | Sequence[nn.Module],
    *,
    where: Where = None,
    noise: str | Noise = "uniform",
    initial_scale: float = 1e-3,
) -> WeightDistribution:
    """V = I: every weight has its own scale.

    >>> scaling(nn.Linear(3, 2)).dimension
    8
    """
    at_hosts = centre(nets, where)
    return WeightDistribution(at_hosts.mean, fixed=at_hosts.fixed, noise=as_noise(noise), initial_scale=initial_scale)


def svd(
    nets: nn.Module | Sequence[nn.Module],
    inputs: Iterable[Any],
    *,
    where: Where = None,
    noise: str | Noise = "uniform",
    initial_scale: float = 1e-3,
) -> WeightDistribution:
    """V from the second moments of what each matrix meets when the host sees `inputs` (an iterable of batches)."""
    at_hosts = centre(nets, where)
    bases = observe(at_hosts, inputs, rotated=True)
    return WeightDistribution(
        at_hosts.mean,
        rotation=rotation(bases),
        fixed=at_hosts.fixed,
        noise=as_noise(noise),
        initial_scale=initial_scale,
    )
