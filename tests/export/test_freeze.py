"""P draws as one plain module: `FrozenDraws`."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from offmap.export.module import FrozenDraws
from offmap.model.forward import BatchedModel, copy_model, forward, widen
from offmap.model.params import all_params
from offmap.posterior.distribution import svd
from zoo import ZOO


def freeze(model: nn.Module, weights: dict[str, Tensor]) -> FrozenDraws:
    fixed = {name: w[None] for name, w in all_params(model).items() if name not in weights}
    return FrozenDraws(BatchedModel(copy_model(model)), weights, fixed).eval()


@pytest.mark.parametrize("name", ZOO)
def test_frozen_draws_give_the_outputs_of_the_draws(name: str):
    case = ZOO[name]
    model, x = copy_model(case.build()), case.inputs()
    weights = svd([case.build(0), case.build(1)], [x], initial_scale=0.1).requires_grad_(False).draw(range(2))
    frozen = freeze(model, weights)
    torch.testing.assert_close(frozen(x), widen(forward(model, weights, x, loop=True)), rtol=1e-5, atol=1e-6)


def test_freezing_leaves_the_model_alone_and_does_not_follow_it():
    model = ZOO["dropout"].build()
    x = ZOO["dropout"].inputs()
    frozen = freeze(model, {"0.weight": model[0].weight.detach()[None].clone()})
    before = frozen(x)
    assert model.training
    with torch.no_grad():
        model[3].weight.add_(1)
    assert torch.equal(frozen(x), before)


@pytest.mark.parametrize("name", ["mlp", "transformer"])
def test_frozen_draws_export_with_any_batch(name: str):
    case = ZOO[name]
    model = copy_model(case.build())
    weights = svd(model, [case.inputs()], initial_scale=0.1).requires_grad_(False).draw(range(3))
    frozen = freeze(model, weights)
    program = torch.export.export(frozen, (case.inputs(4),), dynamic_shapes=({0: torch.export.Dim("rows", min=2)},))
    for rows in (2, 9):
        torch.testing.assert_close(program.module()(case.inputs(rows)), frozen(case.inputs(rows)), rtol=1e-5, atol=1e-6)
    assert not any("rand" in str(node.target) or "normal" in str(node.target) for node in program.graph.nodes)
