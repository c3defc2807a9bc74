"""Data without spread, with ties, with copies, or with fewer rows than columns: numbers stay finite, and copies weigh nothing."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

import offmap
from checks.trust import Check
from offmap.integrations.nets import mlp
from trained import quick


def trial(seed: int, folder: Path) -> str:
    """One kind of data for a random net, with a random basis and score; scores, predictions and intervals are looked at."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    kind = list(KINDS)[seed % len(KINDS)]
    x = KINDS[kind](rng, generator)
    net = mlp(x.shape[1], 1, hidden=[rng.choice([4, 30])], seed=seed)
    with torch.no_grad():
        y = net(x)[:, 0] + 0.1 * torch.randn(len(x), generator=generator)
    if rng.random() < 0.2:
        y = torch.full_like(y, 3.0)  # targets without spread
    options = {"basis": rng.choice(["svd", "identity"]), "score": rng.choice(["default", "paper"]), "progress": False}
    guard = quick(net, (x, y), (x, y), **options)
    ood = torch.cat([x[:5], x[:5] + 3 * torch.randn(min(5, len(x)), x.shape[1], generator=generator)])
    fresh = replace(guard, calibration=replace(guard.calibration, seen=False))  # as if the net had not been trained on these rows
    result, interval = guard(ood), fresh.interval(ood, level=0.5)
    for name, values in {"score": result.score, "mean": result.mean, "std": result.std, "ends": interval.upper}.items():
        assert values is not None
        assert bool(values.isfinite().all()), f"{kind}, seed {seed}: {name} is not finite"
    _copies_weigh_nothing(net, x, y, guard, ood, options)
    return kind


def _copies_weigh_nothing(
    net: torch.nn.Module, x: Tensor, y: Tensor, guard: offmap.Guard, at: Tensor, options: Mapping[str, object]
):
    # distances see copies; and of directions that met nothing any basis is as good as another
    if options["score"] != "paper" or options["basis"] != "identity":
        return
    twice = quick(net, (x.repeat(2, 1), y.repeat(2)), (x, y), **options)
    torch.testing.assert_close(twice.score(at), guard.score(at), rtol=1e-3, atol=1e-6 + 1e-3 * float(guard.score(at).mean()))


def _random(generator: torch.Generator, n: int, columns: int) -> Tensor:
    return torch.randn(n, columns, generator=generator)


def constant(rng: random.Random, generator: torch.Generator) -> Tensor:
    """Some columns have one value."""
    x = _random(generator, 40, 5)
    x[:, : rng.randint(1, 4)] = rng.choice([0.0, 1.0, -7.5, 1e6])
    return x


def copies(rng: random.Random, generator: torch.Generator) -> Tensor:
    """A few rows, many times."""
    return _random(generator, rng.randint(3, 6), 4).repeat(10, 1)


def ties(rng: random.Random, generator: torch.Generator) -> Tensor:
    """All corners of a cube: every direction has the same second moment."""
    return torch.tensor(list(itertools.product([-1.0, 1.0], repeat=rng.randint(3, 5))))


def flat(rng: random.Random, generator: torch.Generator) -> Tensor:
    """Columns that are the same but for a factor."""
    return _random(generator, 40, 1) * _random(generator, 1, 6)


def wide(rng: random.Random, generator: torch.Generator) -> Tensor:
    """Fewer rows than columns."""
    return _random(generator, rng.randint(5, 12), rng.randint(20, 60))


KINDS = {made.__name__: made for made in (constant, copies, ties, flat, wide)}

CHECK = Check("Constant columns, copies, ties and fewer rows than columns give finite numbers.", trial, 500, 30.0, 10)
