"""Eigenbases: orthogonal, sorted, with signs that rounding does not flip; amplitude and reach."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offmap.model.capture import LayerInput
from offmap.model.matrix_view import MatrixView
from offmap.model.params import stack_models
from offmap.posterior import basis as module
from offmap.posterior.basis import Basis, eigenbasis
from offmap.posterior.basis import observe as observe_feed
from zoo import ZOO

BATCHES = {
    "full rank": torch.randn(50, 4, generator=torch.Generator().manual_seed(0)) @ torch.tensor(
        [[1.0, 2, 0, 0], [0, 1, 1, 0], [0, 0, 3, 0], [0.5, 0, 0, 0.1]]
    ),
    "fewer rows than features": torch.randn(2, 4, generator=torch.Generator().manual_seed(1)),
    "one row": torch.tensor([[1.0, -2, 0.5, 3]]),
    "constant features": torch.cat([torch.randn(20, 2, generator=torch.Generator().manual_seed(2)), torch.ones(20, 2)], 1),
    "a dead feature": torch.randn(20, 4, generator=torch.Generator().manual_seed(3)) * torch.tensor([1.0, 0, 1, 2]),
    "zeros": torch.zeros(5, 4),
    "huge and tiny": torch.randn(20, 4, generator=torch.Generator().manual_seed(4)) * torch.tensor([1e6, 1, 1e-3, 1e-6]),
}  # fmt: skip


def moment(x: Tensor) -> Tensor:
    return x.double().mT @ x.double() / len(x)


@pytest.mark.parametrize("name", BATCHES)
def test_an_eigenbasis_is_orthogonal_sorted_and_rebuilds_the_moment(name: str):
    m = moment(BATCHES[name])
    s, v = eigenbasis(m)
    torch.testing.assert_close(v.mT @ v, torch.eye(4, dtype=torch.float64), rtol=0, atol=1e-12)
    assert bool((s >= 0).all())
    assert bool((s.diff() <= 0).all())
    torch.testing.assert_close(v @ s.square().diag() @ v.mT, m, rtol=1e-12, atol=1e-12 * float(m.abs().max()))
    largest = v.gather(0, v.abs().argmax(0, keepdim=True))
    assert bool((largest.abs() >= v.abs().amax(0) - 1e-12).all())
    assert bool((v.gather(0, (v.abs() >= v.abs().amax(0) * (1 - 1e-6)).int().argmax(0, keepdim=True)) > 0).all())


def test_amplitudes_beyond_the_rank_are_nothing():
    s, _ = eigenbasis(moment(BATCHES["fewer rows than features"]))
    assert bool((s[2:] < 1e-7 * s[0]).all())
    assert eigenbasis(moment(BATCHES["zeros"]))[0].tolist() == [0.0] * 4


@pytest.mark.parametrize("seed", range(5))
def test_signs_survive_a_tiny_change_of_the_moment(seed: int):
    generator = torch.Generator().manual_seed(seed)
    v = torch.linalg.qr(torch.randn(6, 6, generator=generator, dtype=torch.float64))[0]
    m = v @ torch.linspace(1, 6, 6, dtype=torch.float64).diag() @ v.mT
    change = 1e-12 * torch.randn(6, 6, generator=generator, dtype=torch.float64)
    torch.testing.assert_close(eigenbasis(m + change + change.mT)[1], eigenbasis(m)[1], rtol=0, atol=1e-9)


@pytest.mark.parametrize("seed", range(5))
def test_rounding_does_not_choose_between_entries_of_one_size(seed: int):
    # the eigenvectors are (±1, ±1)/√2: which entry is larger is rounding alone
    m = torch.tensor([[2.0, -1.0], [-1.0, 2.0]], dtype=torch.float64)
    change = 1e-13 * torch.randn(2, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    _, v = eigenbasis(m + change + change.mT)
    torch.testing.assert_close(v, torch.tensor([[1.0, 1.0], [-1.0, 1.0]], dtype=torch.float64) / 2**0.5, rtol=0, atol=1e-9)


def observe(nets: nn.Module | Sequence[nn.Module], x: Any, *, rotated: bool = True) -> dict[str, Basis]:
    return observe_feed(stack_models(nets), lambda rows: [x], rotated=rotated).bases


@pytest.mark.parametrize("rotated", [True, False])
@pytest.mark.parametrize("name", BATCHES)
def test_amplitude_and_reach_are_root_mean_squares(name: str, rotated: bool):
    net, x = nn.Linear(4, 3).double(), BATCHES[name].double()
    (basis,) = observe(net, x, rotated=rotated).values()
    along = x if not rotated else x @ basis.matrix[0, 0, 0]
    size = float(x.abs().max())
    torch.testing.assert_close(basis.input_rms[0, 0], along.square().mean(0).sqrt(), rtol=1e-6, atol=1e-7 * size + 1e-30)
    reach = (x @ net.weight.detach().mT).square().mean(0).sqrt()
    torch.testing.assert_close(basis.output_rms[0], reach, rtol=1e-6, atol=1e-30)


@pytest.mark.parametrize("name", ZOO)
def test_every_basis_in_the_zoo_is_orthogonal_in_the_models_dtype(name: str):
    case = ZOO[name]
    bases = observe([case.build(0), case.build(1)], case.inputs())
    assert bases
    for basis in (b for b in bases.values() if b.matrix is not None):
        assert basis.matrix.dtype == torch.promote_types(case.dtype, torch.float32)
        eye = torch.eye(basis.matrix.shape[-1], dtype=basis.matrix.dtype).expand_as(basis.matrix)
        torch.testing.assert_close(basis.matrix.mT @ basis.matrix, eye, rtol=0, atol=1e-5)


def test_members_have_bases_of_their_own():
    nets = [ZOO["mlp"].build(m) for m in range(2)]
    x = ZOO["mlp"].inputs()
    both = observe(nets, x)
    for m, net in enumerate(nets):
        alone = observe(net, x)
        for name, basis in alone.items():
            torch.testing.assert_close(both[name].input_rms[m], basis.input_rms[0])
            torch.testing.assert_close(both[name].output_rms[m], basis.output_rms[0])


def layer_input(count: int, fan_in: int, outputs: int = 1) -> LayerInput:
    return LayerInput(MatrixView((outputs, fan_in), (0,), (1,)), 0, outputs, 1, count, lambda chosen: ())


def test_inputs_of_small_matrices_are_all_counted():
    """Up to 2¹¹ rows, two for every one of the fan-in, or 2²⁶ multiplications."""
    for count, fan_in in ((2**11, 10**4), (2 * 10**4, 10**4), (2**26 // 100, 10)):
        assert module._sample_rows(layer_input(count, fan_in), "w", 0) is None
        beyond = module._sample_rows(layer_input(count + 1, fan_in), "w", 0)
        assert (beyond is None) == (count < 2 * fan_in)
        if beyond is not None:
            assert len(beyond) == count
