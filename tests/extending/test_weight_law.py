"""A law of weights from outside: every component of the noise is stretched by z³, far out more than near."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import Tensor

import offmap
from offmap._types import Tensors, Weights
from offmap.posterior.parameterization import PARAMETERIZATIONS, Draw, WeightLaw
from trained import inputs, regression, regressor


@dataclass(frozen=True)
class Cubic(WeightLaw):
    """T(z) = z + a·z³, whose slope is 1 + 3a·z²."""

    a: float = 0.1
    rotated: ClassVar[bool] = True

    def delta(self, mean: Tensors, scale: Tensors, state: Tensors, draw: Draw) -> Weights:
        return {name: scale[name].unsqueeze(1) * (z + self.a * z**3) for name, z in draw(scale).items()}

    def log_volume(self, scale: Tensors, state: Tensors, draw: Draw) -> Tensor:
        slopes = [(1 + 3 * self.a * z.square()).log().flatten(2).sum(2).mean(1) for z in draw(scale).values()]
        return super().log_volume(scale, state, draw) + torch.stack(slopes).sum(0)


@pytest.fixture
def registered() -> Iterator[None]:
    PARAMETERIZATIONS["cubic"] = Cubic()
    yield
    del PARAMETERIZATIONS["cubic"]


def test_a_law_of_ones_own_is_fitted_saved_and_loaded_by_name(registered: None, tmp_path: Path) -> None:
    net, train, valid = regressor(), regression(80, 0), regression(60, 1)
    guard = offmap.fit(net, train, valid, parameterization="cubic", noise="normal", steps=40, check_every=20, progress=False)
    assert guard.history.final_risk[0] <= guard.history.max_risk[0]
    guard.save(tmp_path / "guard")
    again = offmap.load(tmp_path / "guard", net)
    assert torch.equal(again.score(inputs(9, 3)), guard.score(inputs(9, 3)))
    q = again.predictive.q  # pyright: ignore
    assert q.parameterization == Cubic(0.1)
    plain = offmap.WeightDistribution(dict(q.mean.items()), initial_scale=q.scale(), noise=q.noise)
    more = q.entropy(draws=500) - plain.requires_grad_(False).entropy()
    assert float(more) == pytest.approx(0.2242 * q.dimension, rel=0.02)  # E log(1 + 0.3 z²)
