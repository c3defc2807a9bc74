"""From trained models to a weight distribution centred on them: `scaling(nets)` and `svd(nets, inputs)`."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from offmap._types import Weights
from offmap.data.inputs import rows_of
from offmap.distributed.group import SINGLE_PROCESS
from offmap.model.capture import CaptureMode, ParamUse
from offmap.model.forward import MODEL_ERRORS, OutputFn, call, first_tensor, model_failed, no_fast_path
from offmap.model.params import ParamSelection
from offmap.model.select import StackedModel, stack_models
from offmap.posterior.basis import BIAS, LIMIT, Basis, second_moments
from offmap.posterior.distribution import Rotation, WeightDistribution
from offmap.posterior.merge_moments import Dealt, build_together, pool
from offmap.posterior.noise import Noise, as_noise

logger = logging.getLogger("offmap")

MOMENT_NUMBERS = 1 << 24
"""Numbers of all second moments that are held at a time (128 MB)."""


ACTIVATIONS, MOST_ROWS = 1 << 20, 1 << 12
"""Numbers in the widest activation, and rows, of one batch of the pass over the data, where its size is free."""

Feed: TypeAlias = Callable[[int], Iterable[Any]]
"""The data's inputs in batches, of about so many rows where that can be chosen; may be asked several times."""


@dataclass(frozen=True)
class Observed:
    """What a pass over the data saw: bases by parameter, and why the others have none."""

    bases: dict[str, Basis] = field(default_factory=dict)
    why: dict[str, str] = field(default_factory=dict)

    def rotation(self) -> Rotation:
        """The part of it that the equation needs."""
        turned = {n: b for n, b in self.bases.items() if b.matrix is not None}
        matrices = {n: b.matrix for n, b in turned.items() if b.matrix is not None}
        return Rotation(matrices, {n: b.frame for n, b in turned.items()}, self.why)


def observe(
    at: StackedModel,
    feed: Feed,
    *,
    rotated: bool,
    along: Mapping[str, Tensor] | None = None,
    pick: OutputFn = first_tensor,
    limit: int = LIMIT,
    dealt: Dealt | None = None,
) -> Observed:
    """Pass the data through every member: how large each parameter's inputs are, and along which directions.

    These are their eigenvectors if `rotated`, else the columns of `along` (M, G, N, d, d) by name, else the parameter's axes.
    The data are gone through once per group of parameters whose second moments are held at a time; mostly that is once. Several
    processes each go through the batches `dealt` to them, and all see the same in the end.
    """
    group = SINGLE_PROCESS if dealt is None else dealt.group

    def run(net: nn.Module, weights: Weights, x: Any) -> Any:
        try:
            return call(net, weights, x, pick)
        except MODEL_ERRORS as error:
            raise model_failed(net, x, error) from error

    members = [at.weights(m) for m in range(at.members)]
    seen = Observed()
    plan = _plan(at, members, next(iter(feed(1))), run, limit)
    for names in group.all_gather_object(plan.names)[0]:
        inputs, others = (feed(plan.rows), None) if dealt is None else _own(dealt, plan)
        moments = second_moments(at.net, members, inputs, run, names=names, among=at.mean, limit=limit, others=others)
        pool(moments, group, at.device)
        bases, why = build_together(moments, {n: at.mean[n] for n in names}, group, rotated=rotated, along=along)
        seen.bases.update(bases)
        seen.why.update(why)
    seen.why.update({b.bias: BIAS for b in seen.bases.values() if b.bias in seen.why})
    if not rotated and along is None:
        return replace(seen, why={})  # nobody asked
    if not rotated:
        return seen
    _report(seen, limit)
    return seen


@dataclass(frozen=True)
class Plan:
    """How the data are gone through: groups of parameters, largest first, whose moments fit in memory together; rows whose
    activations stay small; and how often each row of the data is met by part of a parameter.
    """

    names: list[list[str]]
    rows: int
    rates: dict[tuple[str, int, int, int], float]


def _plan(at: StackedModel, members: Sequence[Weights], first: Any, run: Callable[..., Any], limit: int) -> Plan:
    """What one batch tells."""
    sizes = dict.fromkeys(at.mean, 0)
    met: Counter[tuple[str, int, int, int]] = Counter()

    def visit(read: ParamUse) -> None:
        if read.input is not None and read.name in sizes:
            frame = read.input.view
            blocks = read.input.groups * -(-frame.fan_in // limit)
            sizes[read.name] = max(sizes[read.name], blocks * min(frame.fan_in, limit) ** 2 * len(members))
            met[_place(read)] += read.input.count

    with torch.no_grad(), no_fast_path, CaptureMode({n: members[0][n] for n in at.mean}, visit) as watch:
        run(at.net, members[0], first)
    groups: list[list[str]] = [[]]
    room = MOMENT_NUMBERS
    for name in sorted(sizes, key=lambda n: -sizes[n]):
        if sizes[name] > room and groups[-1]:
            groups.append([])
            room = MOMENT_NUMBERS
        groups[-1].append(name)
        room -= sizes[name]
    rows = min(MOST_ROWS, ACTIVATIONS * rows_of(first) // max(1, watch.widest))
    return Plan(groups, rows, {place: count / rows_of(first) for place, count in met.items()})


def _place(read: ParamUse) -> tuple[str, int, int, int]:
    """The part of a parameter that a read met."""
    assert read.input is not None
    return (read.name, read.input.start, read.input.stop, read.input.groups)


def _own(dealt: Dealt, plan: Plan) -> tuple[Iterator[Any], Callable[[ParamUse], int]]:
    """This process's batches, and how many rows of a read the others met before: so it samples those that one alone would."""
    before = 0

    def inputs() -> Iterator[Any]:
        nonlocal before
        for x, before in dealt.feed(plan.rows):  # noqa: B007
            yield x

    return inputs(), lambda read: round(before * plan.rates.get(_place(read), 0.0)) if read.input else 0


def _report(seen: Observed, limit: int) -> None:
    large = {n: b.frame.fan_in for n, b in seen.bases.items() if b.frame.fan_in > limit}
    if large:
        listed = ", ".join(f"`{n}` ({d:,})" for n, d in large.items())
        logger.warning(
            "A basis for the whole fan-in of %s would be larger than `fan_in_limit` = %d: each gets several smaller ones, which "
            "do not see correlations between them.", listed, limit,
        )  # fmt: skip


def scaling(
    nets: nn.Module | Sequence[nn.Module],
    *,
    params: ParamSelection = None,
    noise: str | Noise = "uniform",
    initial_scale: float = 1e-3,
) -> WeightDistribution:
    """V = I: every weight has its own scale.

    >>> scaling(nn.Linear(3, 2)).dimension
    8
    """
    at_hosts = stack_models(nets, params)
    return WeightDistribution(at_hosts.mean, fixed=at_hosts.fixed, noise=as_noise(noise), initial_scale=initial_scale)


def svd(
    nets: nn.Module | Sequence[nn.Module],
    inputs: Iterable[Any],
    *,
    params: ParamSelection = None,
    noise: str | Noise = "uniform",
    initial_scale: float = 1e-3,
    limit: int = LIMIT,
) -> WeightDistribution:
    """V from the second moments of what each matrix meets when the model sees `inputs` (an iterable of batches)."""
    at_hosts = stack_models(nets, params)
    batches = list(inputs)
    observed = observe(at_hosts, lambda rows: batches, rotated=True, limit=limit)
    return WeightDistribution(
        at_hosts.mean,
        rotation=observed.rotation(),
        fixed=at_hosts.fixed,
        noise=as_noise(noise),
        initial_scale=initial_scale,
    )
