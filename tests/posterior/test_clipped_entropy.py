"""Entropy after clipping, against samples."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import offmap
import trained
from offmap.errors import ConfigError
from offmap.model.matrix_view import MatrixView
from offmap.posterior.basis import Rotation
from offmap.posterior.distribution import WeightDistribution
from offmap.posterior.noise import Noise, Normal, Rademacher, Uniform

NOISES = (Uniform(), Uniform(1.0), Normal())


def one(scale: float, noise: Noise) -> WeightDistribution:
    return WeightDistribution({"w": torch.zeros(1, 1)}, initial_scale=scale, noise=noise)


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize(("scale", "clip"), [(0.5, 0.3), (2.0, 1.0), (1.0, 1.7), (1.0, 0.05), (0.1, 5.0)])
def test_both_parts_are_those_of_a_histogram_of_draws(noise: Noise, scale: float, clip: float) -> None:
    q = one(scale, noise)
    y = (scale * noise.sample((1_000_000,), torch.Generator().manual_seed(0)).double()).clamp(-clip, clip)
    ends = torch.stack([(y == -clip).double().mean(), (y == clip).double().mean()])
    inside = y[(y > -clip) & (y < clip)]
    counts = torch.histc(inside, bins=100)
    width = float(inside.max() - inside.min()) / 100
    mass = counts / len(y)
    found = q.clipped_entropy(clip)
    assert float(found.continuous) == pytest.approx(float(-(torch.xlogy(mass, mass / width)).sum()), abs=0.02)
    assert float(found.points) == pytest.approx(float(-torch.xlogy(ends, ends).sum()), abs=0.01)
    assert float(found.share) == pytest.approx(float(ends.sum()), abs=0.005)


def test_both_parts_are_those_of_weights_drawn_along_a_basis() -> None:
    scale, clip = torch.tensor([[[0.2, 0.5, 1.0], [2.0, 0.4, 0.7]]], dtype=torch.float64), 0.6
    v = torch.linalg.qr(torch.randn(3, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64))[0]
    rotation = Rotation({"w": v.view(1, 1, 1, 3, 3)}, {"w": MatrixView(view=(2, 3), outs=(0,), axes=(1,), blocks=(2,))})
    q = WeightDistribution({"w": torch.zeros_like(scale)}, initial_scale={"w": scale}, rotation=rotation)
    y = (q.draw(range(40_000), clip=clip)["w"].detach() @ v).flatten(1).mT  # along the basis: (6, draws)
    cut = y.abs() > clip - 1e-9
    found = q.clipped_entropy(clip)
    assert float(found.share) == pytest.approx(float(cut.double().mean()), abs=0.005)
    ends = torch.stack([(cut & (y < 0)).double().mean(1), (cut & (y > 0)).double().mean(1)])
    assert float(found.points) == pytest.approx(float(-torch.xlogy(ends, ends).sum()), abs=0.02)
    mass = (
        torch.stack([torch.histc(row[~own], bins=40, min=-clip, max=clip) for row, own in zip(y, cut, strict=True)]) / y.shape[1]
    )
    assert float(found.continuous) == pytest.approx(float(-torch.xlogy(mass, mass / (2 * clip / 40)).sum()), abs=0.1)


@given(st.floats(1e-3, 1e3), st.sampled_from(NOISES))
def test_without_a_clip_it_is_the_entropy(scale: float, noise: Noise) -> None:
    q = one(scale, noise)
    found = q.clipped_entropy(None)
    assert float(found.continuous) == pytest.approx(float(q.entropy().detach()), rel=1e-5, abs=1e-5)
    assert (float(found.points), float(found.share)) == (0.0, 0.0)


@given(st.floats(1e-2, 1e2), st.floats(1e-3, 1e2), st.sampled_from(NOISES))
def test_a_tighter_clip_puts_more_on_the_points(scale: float, clip: float, noise: Noise) -> None:
    q = one(scale, noise)
    wide, tight = q.clipped_entropy(clip), q.clipped_entropy(clip / 2)
    assert 0 <= float(wide.share) <= float(tight.share) <= 1
    assert all(math.isfinite(float(part)) for part in (tight.continuous, tight.points))
    assert 0 <= float(tight.points) <= 2 / math.e + 1e-6


def test_clip_zero_is_one_point() -> None:
    found = one(1.0, Uniform()).clipped_entropy(0.0)
    assert (float(found.continuous), float(found.points), float(found.share)) == (0.0, 0.0, 1.0)


def test_members_and_parameters_add_up() -> None:
    scales = {"a": torch.tensor([[0.5, 2.0], [1.0, 3.0]]), "b": torch.tensor([[0.1], [4.0]])}
    q = WeightDistribution({n: torch.zeros_like(s) for n, s in scales.items()}, initial_scale=scales)
    found = q.clipped_entropy(1.0)
    for member in range(2):
        alone = [one(float(s), Uniform()).clipped_entropy(1.0) for t in scales.values() for s in t[member]]
        assert float(found.continuous[member]) == pytest.approx(sum(float(a.continuous) for a in alone), rel=1e-5)
        assert float(found.points[member]) == pytest.approx(sum(float(a.points) for a in alone), rel=1e-5)
        assert float(found.share[member]) == pytest.approx(sum(float(a.share) for a in alone) / 3, rel=1e-5)


def test_the_summary_tells_both_parts() -> None:
    train = trained.regression(60)
    guard = offmap.fit(trained.regressor(), train, trained.regression(30, 1), steps=5, progress=False)
    left = guard.predictive.q.clipped_entropy(0.5)
    line = f"with the clip 0.5: {float(left.continuous):.4g} nats of the weights inside it, {float(left.points):.4g} of the"
    assert line in str(replace(guard, clip=0.5).summary())
    assert "with the clip" not in str(replace(guard, clip=None).summary())


def test_noise_without_a_density_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="Expected noise with a `truncated_entropy`.*for the entropy of clipped draws.*Rademacher"
    ):
        one(1.0, Rademacher()).clipped_entropy(1.0)
