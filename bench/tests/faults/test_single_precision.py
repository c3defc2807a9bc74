"""What the trial of single precision goes by: ties are seen in the data, and the law does not depend on how they are cut."""

import pytest
import torch

from faults.single_precision import law, leaves_open
from offmap.model.matrix_view import MatrixView
from offmap.model.params import stack_models
from offmap.posterior.basis import Rotation, observe
from offmap.posterior.distribution import WeightDistribution
from zoo import ZOO


@pytest.mark.parametrize(
    ("name", "expected"),
    [("mlp", False), ("conv2d", False), ("padding2d", False), ("unet", True), ("transposed3d", True), ("padding3d", True)],
)
def test_directions_of_one_amplitude_are_seen_in_the_data(name: str, expected: bool):
    x = ZOO[name].data(40)[0]
    assert leaves_open(observe(stack_models(ZOO[name].build()), lambda rows: [x], rotated=True).bases) is expected


def test_axes_have_no_directions_to_leave_open():
    x = ZOO["unet"].data(40)[0]
    assert not leaves_open(observe(stack_models(ZOO["unet"].build()), lambda rows: [x], rotated=False).bases)


def rotate_scale(phi: list[list[float]], v: torch.Tensor) -> WeightDistribution:
    scale = torch.tensor([phi], dtype=torch.float64)
    frame = MatrixView(view=(2, 3), outs=(0,), axes=(1,), blocks=(2,))
    return WeightDistribution(
        {"w": torch.zeros_like(scale)}, initial_scale={"w": scale}, rotation=Rotation({"w": v}, {"w": frame})
    )


def test_the_law_is_that_of_any_basis_of_equals_and_of_no_other():
    v = torch.linalg.qr(torch.randn(3, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64))[0]
    other = v.clone()  # another basis of the plane of the last two
    other[:, 1:] = v[:, 1:] @ torch.tensor([[0.6, -0.8], [0.8, 0.6]], dtype=torch.float64)
    alike, unlike = [[1.0, 2.0, 2.0], [3.0, 5.0, 5.0]], [[1.0, 2.0, 4.0], [3.0, 5.0, 5.0]]
    expected = torch.stack([v @ torch.tensor(row, dtype=torch.float64).square().diag() @ v.mT for row in alike])
    one, two = (law(rotate_scale(alike, each.view(1, 1, 1, 3, 3)))["w"] for each in (v, other))
    torch.testing.assert_close(one, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(two, expected, rtol=0, atol=1e-12)
    three, four = (law(rotate_scale(unlike, each.view(1, 1, 1, 3, 3)))["w"] for each in (v, other))
    assert float((three - four)[0].abs().max()) > 1
    torch.testing.assert_close(three[1], four[1], rtol=0, atol=1e-12)
