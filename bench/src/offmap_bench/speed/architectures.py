"""What scoring with P draws costs against P plain calls of the model, over architectures and batch sizes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from offmap.posterior.construct import centre, svd
from offmap.posterior.predictive import Stochastic
from offmap.posterior.protocol import Runtime
from offmap_bench.speed.models import CONV1D, MLP, RESNET, SMALL_CONV1D, TRANSFORMER, Subject
from offmap_bench.speed.race import race
from offmap_bench.speed.record import Claim, Measurement, Record

HOW = """`Stochastic.outputs` in the SVD basis, everything included: a new seed every turn, so that all draws are made anew, and
the chunk chosen by `chunk_size="auto"` for that batch. It is compared with as many plain calls of the model, without gradients, on
the same rows in batches of the same size. Draws are made once for all rows of a call, so a set of rows costs less per row than
one batch; both are shown. For small models one batch does not pay for its draws."""


@dataclass(frozen=True)
class Case:
    """`target` bounds the cost against plain calls; without it the number is only shown."""

    subject: Subject
    draws: int
    batch: int
    target: float | None = None
    whole: bool = False

    @property
    def rows(self) -> int:
        return self.subject.rows if self.whole else self.batch

    def __str__(self) -> str:
        rows = f"{self.rows:,} rows in batches of {self.batch}" if self.whole else f"one batch of {self.batch}"
        return f"{self.subject.name}, {self.draws} draws, {rows}"


CASES = [
    *(Case(small, 50, batch, 0.5 if batch <= 128 else 1.2, whole)
      for small in (MLP, SMALL_CONV1D, CONV1D) for whole in (True, False) for batch in (32, 128, 512)),
    Case(RESNET, 10, 1), Case(RESNET, 10, 128, 1.3),
    Case(TRANSFORMER, 10, 32), Case(TRANSFORMER, 10, 128, 1.3), Case(TRANSFORMER, 10, 512, 1.3),
]  # fmt: skip


def run(rounds: int = 5) -> Record:
    """Case by case, ours and the base model in turns."""
    measurements: list[Measurement] = []
    claims: list[Claim] = []
    for case in CASES:
        chunk, contestants = match(case)
        timings = race(contestants, rounds=rounds)
        ratio = timings["ours"].best / timings["plain"].best
        measurements += [
            Measurement.of(f"{case}: plain calls", timings["plain"], unit="ms"),
            Measurement.of(f"offmap, chunks of {chunk} ({ratio:.2f} times)", timings["ours"], unit="ms"),
        ]
        if case.target is not None:
            claims.append(Claim(f"{case}: times the plain calls", ratio, "at most", case.target))
        print(f"{case}: {ratio:.2f}, chunk {chunk}", flush=True)
    return Record("architectures", "Scoring against plain calls", HOW, rounds, measurements, claims)


def match(case: Case) -> tuple[int, dict[str, Callable[[], object]]]:
    """The chunk that was chosen, and both contestants."""
    net, x, seeds = case.subject.net(), case.subject.inputs(case.rows), itertools.count()
    at = centre(net)
    model = Runtime(batch_size=case.batch).model(at.net, at.mean, x)
    predictive = Stochastic(model, svd(net, batches(case.subject.inputs(64), 64)))
    return model.chunk_size, {
        "plain": lambda: plain(net, x, case.batch, case.draws),
        "ours": lambda: predictive.outputs(x, case.draws, clip=None, seed=next(seeds)),
    }


@torch.no_grad()
def plain(net: nn.Module, x: Tensor, batch: int, times: int = 1) -> None:
    """The model on all rows, so many times."""
    for _ in range(times):
        for part in batches(x, batch):
            net(part)


def batches(x: Tensor, size: int) -> Iterator[Tensor]:
    """Rows in batches."""
    return iter(x.split(size))
