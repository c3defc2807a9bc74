"""φ from the geometry of the activations."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import oracles
from offmap.maxwent.search import FLOOR, unit_scale
from offmap.model.matrix_view import MatrixView
from offmap.model.params import stack_models
from offmap.posterior.basis import Basis, observe
from offmap.posterior.distribution import WeightDistribution
from zoo import ZOO, Through


def unit(net: nn.Module, x: Tensor, *, rotated: bool = True, eps: float = 1e-4) -> dict[str, Tensor]:
    stacked = stack_models(net)
    scale = unit_scale(stacked.mean, observe(stacked, lambda rows: [x], rotated=rotated).bases, eps=eps)
    return {name: scale(name) for name in stacked.mean}


@pytest.mark.parametrize("rotated", [True, False])
@pytest.mark.parametrize("eps", [1e-4, 0.5])
def test_scales_of_a_linear_layer_are_reach_over_root_fan_in_over_amplitude(rotated: bool, eps: float):
    x = torch.randn(50, 4, dtype=torch.float64) * torch.tensor([3.0, 1, 0.5, 0.1])
    net = nn.Linear(4, 3).double()
    scale = unit(net, x, rotated=rotated, eps=eps)
    moment = x.mT @ x / 50
    amplitude = (torch.linalg.eigvalsh(moment).flip(0) if rotated else moment.diagonal()).sqrt()
    for j in range(3):
        reach = float((x @ net.weight[j].detach()).square().mean().sqrt())
        assert float(scale["bias"][0, j]) == pytest.approx(reach / 2)
        for k in range(4):
            a = max(float(amplitude[k]), eps * float(amplitude.max()))
            assert float(scale["weight"][0, j, k]) == pytest.approx(reach / (2 * a))


@pytest.mark.parametrize("rotated", [True, False])
@pytest.mark.parametrize("name", ["conv1d", "conv2d", "conv3d"])
def test_scales_of_a_convolution_follow_its_patches(name: str, rotated: bool):
    net, x = ZOO[name].build().double(), ZOO[name].inputs().double()
    patches = oracles.windows(x, net[0])
    scale = unit(net, x, rotated=rotated)
    moment = patches.mT @ patches / len(patches)
    amplitude = (torch.linalg.eigvalsh(moment).flip(0) if rotated else moment.diagonal()).sqrt()
    reach = (patches @ net[0].weight.detach().flatten(1).mT).square().mean(0).sqrt()
    expected = reach[:, None] / math.sqrt(patches.shape[1]) / amplitude
    torch.testing.assert_close(scale["0.weight"][0].flatten(1), expected)
    torch.testing.assert_close(scale["0.bias"][0], reach / math.sqrt(patches.shape[1]))


@pytest.mark.parametrize("rotated", [True, False])
def test_at_factor_one_every_pre_activation_gets_noise_of_its_own_size(rotated: bool):
    x = torch.randn(100, 3, dtype=torch.float64) @ torch.randn(3, 3, dtype=torch.float64)
    net = nn.Linear(3, 5, bias=False).double()
    stacked = stack_models(net)
    seen = observe(stacked, lambda rows: [x], rotated=rotated)
    q = WeightDistribution(stacked.mean, initial_scale=unit_scale(stacked.mean, seen.bases, eps=1e-6), rotation=seen.rotation())
    noise = (q.draw(range(4000))["weight"].detach() - net.weight.detach()) @ x.mT  # (P, 5, 100)
    size = (net.weight.detach() @ x.mT).square().mean(1)
    torch.testing.assert_close(noise.square().mean((0, 2)), size, rtol=0.1, atol=0)


def test_parameters_that_no_product_reads_scale_with_their_own_size():
    net, x = ZOO["layernorm"].build(), ZOO["layernorm"].inputs()
    with torch.no_grad():
        net[1].weight.mul_(3)
        net[1].bias.zero_()
    scale = unit(net, x)
    torch.testing.assert_close(scale["1.weight"], torch.full((1, 6), 3.0))
    torch.testing.assert_close(scale["1.bias"], torch.full((1, 6), FLOOR))


def dead_unit() -> tuple[nn.Module, Tensor]:
    net = ZOO["mlp"].build()
    with torch.no_grad():
        net[0].weight[0].zero_()
        net[0].bias[0] = -1
    return net, ZOO["mlp"].inputs()


def dead_layer() -> tuple[nn.Module, Tensor]:
    net, x = dead_unit()
    with torch.no_grad():
        net[0].bias.fill_(-1e3)  # nothing passes the ReLU
    return net, x


def zero_weights() -> tuple[nn.Module, Tensor]:
    net = ZOO["mlp"].build()
    with torch.no_grad():
        for p in net.parameters():
            p.zero_()
    return net, ZOO["mlp"].inputs()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rotated", [True, False])
@pytest.mark.parametrize(
    ("net", "x"),
    [
        dead_unit(),
        dead_layer(),
        zero_weights(),
        (ZOO["mlp"].build(), torch.zeros(5, 3)),
        (ZOO["mlp"].build(), torch.tensor([[1.0, 0.0, 0.0]])),
        (ZOO["mlp"].build(), torch.ones(5, 3)),
        (ZOO["conv1d"].build(), torch.zeros(3, 2, 8)),
    ],
    ids=["dead unit", "dead layer", "zero weights", "zero inputs", "one row", "constant inputs", "zero images"],
)
def test_degenerate_activations_give_positive_and_moderate_scales(net: nn.Module, x: Tensor, rotated: bool, dtype: torch.dtype):
    for name, scale in unit(net.to(dtype), x.to(dtype), rotated=rotated).items():
        assert bool((scale > 0).all()), name
        # a layer whose inputs are all zero has no size to go by, but must not explode off the map
        assert float(scale.max()) < 1e6, name


def test_one_number_that_is_added_to_all_outputs_scales_with_its_own_size():
    net = Through(
        lambda s, x: torch.addmm(s.b, x, s.a.weight.mT), a=nn.Linear(3, 2, bias=False), b=nn.Parameter(torch.tensor([-0.7]))
    )
    scale = unit(net, torch.ones(5, 3))
    torch.testing.assert_close(scale["b"], torch.tensor([[0.7]]))


def test_rows_that_reach_nothing_get_a_share_of_what_is_typical_of_their_member():
    net = nn.Linear(2, 3, bias=False)
    basis = Basis(
        MatrixView((3, 2), (0,), (1,), (3,)),
        torch.ones(2, 1, 2),
        torch.tensor([[0.0, 3.0, 4.0], [0.0, 300.0, 400.0]]),
        None,
        None,
    )
    scale = unit_scale({"w": torch.stack([net.weight.detach()] * 2)}, {"w": basis}, eps=1e-4)("w")
    typical = math.sqrt(25 / 3)
    expected = torch.tensor([[FLOOR * typical, 3.0, 4.0], [100 * FLOOR * typical, 300.0, 400.0]])[..., None] / math.sqrt(2)
    torch.testing.assert_close(scale, expected.expand(2, 3, 2))
