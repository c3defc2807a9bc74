"""The net and the data that every theme uses: 8-100-100-100-2, trained for regression on a made-up table."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor, nn

import offmap
from offmap.integrations.mlp import mlp
from offmap.likelihoods import Gaussian
from offmap.posterior.noise import generator

FEATURES, OUTPUTS, HIDDEN = 8, 2, (100, 100, 100)
DRAWS, ROWS, BATCH = 50, 10_000, 128

Pair = tuple[Tensor, Tensor]


@cache
def table() -> dict[str, Pair]:
    """3,600 rows to train on, 400 to validate, 10,000 to score; the target is smooth with noise 0.1."""
    sizes = {"train": 3_600, "valid": 400, "score": ROWS}
    source = generator("offmap_bench.speed", "table")
    x = torch.randn(sum(sizes.values()), FEATURES, generator=source)
    y = x[:, 0].sin() + x[:, 1] * x[:, 2] / 2 + 0.1 * torch.randn(len(x), generator=source)
    parts = zip(x.split(list(sizes.values())), y.split(list(sizes.values())), strict=True)
    return dict(zip(sizes, parts, strict=True))


@cache
def net(seed: int = 0) -> nn.Sequential:
    """A trained model; 300 steps are enough for offmap_bench.speed of speed."""
    model = mlp(FEATURES, OUTPUTS, hidden=HIDDEN, seed=seed)
    x, y = table()["train"]
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    source = generator("offmap_bench.speed", "order", seed)
    for _ in range(300):
        rows = torch.randint(len(x), (BATCH,), generator=source)
        loss = Gaussian().nll(model(x[rows]).unsqueeze(0), y[rows]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


def fitted(solver: Literal["closed-form", "refine"] = "closed-form", *, score: str = "default") -> offmap.Guard:
    """An SVD guard around the net."""
    data = table()
    return offmap.fit(net(), data["train"], data["valid"], solver=solver, score=score, draws=DRAWS, progress=False)


def products() -> int:
    """Σ in·out over the layers: multiplications for one row and one draw."""
    widths = [FEATURES, *HIDDEN, OUTPUTS]
    return sum(a * b for a, b in pairwise(widths))
