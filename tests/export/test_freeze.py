"""P draws as one plain module."""

from __future__ import annotations

import pytest
import torch

from offmap.export.freeze import freeze
from offmap.model.forward import copy_model, forward
from offmap.posterior.distribution import svd
from zoo import ZOO


@pytest.mark.parametrize("name", ZOO)
def test_frozen_draws_give_the_outputs_of_the_draws(name: str):
    case = ZOO[name]
    net, x = copy_model(case.build()), case.inputs()
    weights = svd([case.build(0), case.build(1)], [x], initial_scale=0.1).requires_grad_(False).draw(range(2))
    frozen = freeze(net, weights)
    output = frozen(**x) if isinstance(x, dict) else frozen(*x) if isinstance(x, tuple) else frozen(x)
    torch.testing.assert_close(output, forward(net, weights, x, loop=True), rtol=1e-5, atol=1e-6)


def test_freezing_leaves_the_host_alone_and_does_not_follow_it():
    net = ZOO["dropout"].build()
    x = ZOO["dropout"].inputs()
    frozen = freeze(net, {"0.weight": net[0].weight.detach()[None].clone()})
    before = frozen(x)
    assert net.training
    with torch.no_grad():
        net[3].weight.add_(1)
    assert torch.equal(frozen(x), before)


@pytest.mark.parametrize("name", ["mlp", "transformer"])
def test_frozen_draws_export_with_any_batch(name: str):
    case = ZOO[name]
    net = copy_model(case.build())
    weights = svd(net, [case.inputs()], initial_scale=0.1).requires_grad_(False).draw(range(3))
    frozen = freeze(net, weights)
    program = torch.export.export(frozen, (case.inputs(4),), dynamic_shapes=(({0: torch.export.Dim("rows", min=2)},),))
    for rows in (2, 9):
        torch.testing.assert_close(program.module()(case.inputs(rows)), frozen(case.inputs(rows)), rtol=1e-5, atol=1e-6)
    assert not any("rand" in str(node.target) or "normal" in str(node.target) for node in program.graph.nodes)
