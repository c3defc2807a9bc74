"""What is found in every model: which matrices are rotated, in how many blocks, along what; and why the others are not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import oracle_moments
from offmap.data.batch import take_rows
from offmap.model.forward import copy_model
from offmap.model.params import stack_models
from offmap.posterior.basis import Moment, eigenbasis, observe, second_moments
from offmap.posterior.distribution import svd
from oracles import run_once
from zoo import ZOO, Case, Through
from zoo.case import weight
from zoo.ways import MODELS


def moments(case: Case, *batches: Any, limit: int = 4096) -> dict[str, Moment]:
    held = stack_models(case.build())
    run = second_moments(held.module, [held.weights(0)], batches, case.output_fn, limit=limit)
    return run[0]


@MODELS
def test_exactly_the_expected_matrices_are_rotated_in_the_expected_blocks(case: Case):
    q = svd([case.build(m) for m in range(2)], [case.inputs()])
    assert {name: matrix.shape[1] for name, matrix in q.rotation.items()} == case.rotated()
    assert all(len(q.views[name].blocks) == blocks for name, blocks in case.rotated().items())
    assert q.views.keys() == case.rotated().keys()


@MODELS
def test_what_is_not_rotated_says_why(case: Case):
    q = svd(case.build(), [case.inputs()])
    assert set(q.why) == set(q.mean) - set(q.rotation)
    assert all(q.why.values())
    for name, reason in case.plain.items():
        assert reason in q.why[name]


def test_a_host_in_which_nothing_is_rotated_says_why():
    q = svd(Through(lambda s, x: -(x.unsqueeze(1) - s.w).square().sum(-1), w=weight(2, 3)), [torch.randn(5, 3)])
    assert list(q.rotation) == []
    assert q.why == {"w": "no product with an input"}


@MODELS
def test_second_moments_are_those_of_the_slow_oracle(case: Case):
    slow = oracle_moments.second_moments(case.build(), [case.inputs()], case.layer_inputs)
    fast = moments(case, case.inputs())
    for name in case.rotated():
        value = fast[name].value()
        assert value.shape[1] == 1
        assert value.dtype == torch.float64
        case.assert_close(value[:, 0], slow[name], rtol=1e-5, atol=1e-6)


@MODELS
def test_moments_of_a_stream_are_those_of_all_at_once(case: Case):
    x = case.inputs(12)
    whole = moments(case, x)
    parts = moments(case, *(take_rows(x, slice(a, b)) for a, b in ((0, 5), (5, 6), (6, 12))))
    assert whole.keys() == parts.keys()
    for name, moment in whole.items():
        assert (moment.why, moment.view) == (parts[name].why, parts[name].view)
        if moment.view is not None:
            assert moment.blocks() == parts[name].blocks()
            case.assert_close(parts[name].value(), moment.value(), rtol=1e-5, atol=1e-6)


@MODELS
def test_every_basis_diagonalises_the_oracles_moment(case: Case):
    slow = oracle_moments.second_moments(case.build(), [case.inputs()], case.layer_inputs)
    q = svd(case.build(), [case.inputs()])
    for name, matrix in q.rotation.items():
        v = matrix[0, :, 0].double()
        along = v.mT @ slow[name] @ v
        size = float(along.abs().max())
        case.assert_close(along, along.diagonal(dim1=1, dim2=2).diag_embed(), rtol=0, atol=1e-5 * size)
        assert bool((along.diagonal(dim1=1, dim2=2).diff() <= (1e-4 if case.dtype != torch.bfloat16 else 1e-2) * size).all())


@pytest.mark.parametrize("limit", [1, 2, 3, 5])
@pytest.mark.parametrize("name", ["mlp", "conv2d", "grouped", "depthwise", "transposed2d", "bilinear", "cross_attention", "lstm"])
def test_a_large_fan_in_is_cut_into_pieces_of_the_whole_moment(name: str, limit: int):
    case = ZOO[name]
    whole, cut = moments(case, case.inputs()), moments(case, case.inputs(), limit=limit)
    q = svd(case.build(), [case.inputs()], limit=limit, initial_scale=0.05)
    for name in case.rotated():
        full, pieces = whole[name].value()[:, 0], cut[name].value()
        fan_in, size = full.shape[-1], pieces.shape[-1]
        assert size <= limit
        assert pieces.shape[1] == -(-fan_in // limit)
        v = q.rotation[name][0]
        torch.testing.assert_close(v.mT @ v, torch.eye(size).expand_as(v), rtol=0, atol=1e-5)
        for n, start in enumerate(range(0, fan_in, size)):
            width = min(size, fan_in - start)
            part = full[:, start : start + width, start : start + width]
            torch.testing.assert_close(pieces[:, n, :width, :width], part, rtol=1e-6, atol=1e-9)
            assert not pieces[:, n, width:].any()
            spectrum = eigenbasis(part)[0].square()
            along = (v[:, n].mT.double() @ pieces[:, n] @ v[:, n].double()).diagonal(dim1=1, dim2=2)
            torch.testing.assert_close(along[:, :width], spectrum, rtol=1e-3, atol=1e-5 * float(spectrum.max()))


LAYERS = (nn.Linear, nn.Bilinear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def sizes_of_outputs(case: Case) -> dict[str, Tensor]:
    """Root mean square of what every unit of the layers above gives, without its bias, by the name of its weight."""
    twin = copy_model(case.build())
    names = {id(p): name for name, p in twin.named_parameters()}
    seen: dict[str, list[Tensor]] = {}

    def hook(layer: Any, _: Any, output: Tensor) -> None:
        units = output if isinstance(layer, nn.Linear | nn.Bilinear) else output.movedim(1, -1)
        bias = 0 if layer.bias is None else layer.bias
        seen.setdefault(names[id(layer.weight)], []).append((units - bias).flatten(0, -2).double())

    for layer in twin.modules():
        if isinstance(layer, LAYERS) and id(layer.weight) in names:  # not one that is computed
            layer.register_forward_hook(hook)
    with oracle_moments.slow_path(), torch.no_grad():
        run_once(twin, case.inputs())
    return {name: torch.cat(rows).square().mean(0).sqrt() for name, rows in seen.items()}


@MODELS
def test_reach_is_the_size_of_what_each_unit_gives(case: Case):
    # this ties moments, frames and blocks to the layers' own arithmetic
    seen = observe(stack_models(case.build()), lambda rows: [case.inputs()], rotated=True, output_fn=case.output_fn)
    for name, size in sizes_of_outputs(case).items():
        if name in case.rotated():
            case.assert_close(seen.bases[name].output_rms[0], size, rtol=1e-4, atol=1e-5 * float(size.max()))
