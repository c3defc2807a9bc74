"""MC-dropout: one draw is one thinned net for all rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import offmap
from offmap.data import Place, as_batches, load_rows
from offmap.errors import ModelError
from offmap.integrations.nets import mlp
from offmap_bench.methods.mc_dropout import Config, Mask, mask_shapes, mc_dropout, replace_dropout
from trained import inputs, regression

PLACE = Place(torch.device("cpu"), torch.float32)
LAW = offmap.Gaussian(noise=torch.tensor([0.1]))


def train_nets(nets: Any, *, seed: int = 0, **config: Any) -> Any:
    train = load_rows(as_batches(regression(60, 0), PLACE, name="train", batch_size=16))
    valid = load_rows(as_batches(regression(30, 1), PLACE, name="valid"))
    settings = Config(**{"steps": 20, "check_every": 10, "lr": 0.01} | config)
    return mc_dropout.fit(nets, train, valid, likelihood=LAW, config=settings, seed=seed)


def model(seed: int = 0, dropout: float = 0.3) -> nn.Sequential:
    return mlp(3, 1, hidden=[8, 8], dropout=dropout, seed=seed)


def test_a_masked_copy_without_masks_is_the_model_in_evaluation_mode() -> None:
    net, x = model(), inputs(9, 5)
    twin = replace_dropout(net)
    assert torch.equal(twin(x), net.eval()(x))
    assert sum(isinstance(m, nn.Dropout) for m in net.modules()) == 2  # the model keeps its own
    assert [m.rate for m in twin.modules() if isinstance(m, Mask)] == [0.3, 0.3]


def test_masks_have_the_shape_of_what_they_drop() -> None:
    assert mask_shapes(replace_dropout(model()), inputs(9)) == {"2.mask": (0.3, (8,)), "5.mask": (0.3, (8,))}
    image = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Dropout2d(0.25), nn.Dropout(0.5), nn.Flatten(), nn.Linear(16, 1))
    shapes = mask_shapes(replace_dropout(image), torch.zeros(2, 1, 4, 4))
    # whole channels, and single numbers
    assert shapes == {"1.mask": (0.25, (4, 1, 1)), "2.mask": (0.5, (4, 2, 2))}


def test_one_draw_is_one_thinned_net_for_all_rows() -> None:
    predictive = train_nets(model())
    x = inputs(9, 5)
    outputs = predictive.outputs(x, 6, seed=3)
    assert outputs.shape == (6, 9, 1)
    # the same masks whichever rows are asked for
    torch.testing.assert_close(predictive.outputs(x[4:6], 6, seed=3), outputs[:, 4:6], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(predictive.outputs(x, 2, seed=3), outputs[:2], rtol=1e-5, atol=1e-6)
    assert outputs.std(0).min() > 0
    assert not torch.equal(outputs, predictive.outputs(x, 6, seed=4))
    assert torch.equal(outputs, predictive.outputs(x, 6, seed=3))


def test_draws_are_the_trained_net_with_hidden_units_dropped() -> None:
    predictive = train_nets(model())
    x = inputs(9, 5)
    drawn = predictive.draw(range(4), 0)
    (net,) = predictive.nets()
    for draw in range(4):
        first, second = drawn["2.mask"][draw], drawn["5.mask"][draw]
        for mask in (first, second):
            torch.testing.assert_close(mask.unique(), torch.tensor([0.0, 1 / 0.7])[-len(mask.unique()) :])
        h = net[1](net[0](x)) * first
        h = net[4](net[3](h)) * second
        torch.testing.assert_close(predictive.outputs(x, 4)[draw], net[6](h), rtol=1e-5, atol=1e-6)


def test_the_share_of_dropped_units_is_the_models_own() -> None:
    predictive = train_nets(model(dropout=0.2), steps=1)
    masks = predictive.draw(range(500), 0)["2.mask"]
    assert (masks == 0).float().mean().item() == pytest.approx(0.2, abs=0.03)
    assert masks.mean().item() == pytest.approx(1.0, abs=0.04)


def test_layers_and_members_get_different_masks() -> None:
    predictive = train_nets([model(0, 0.5), model(1, 0.5)], steps=1)
    drawn = predictive.draw(range(20), 0)
    assert drawn["2.mask"].shape == (40, 8)
    assert not torch.equal(drawn["2.mask"], drawn["5.mask"])
    assert not torch.equal(drawn["2.mask"][:20], drawn["2.mask"][20:])
    assert predictive.outputs(inputs(9, 5), 20).shape == (40, 9, 1)


def test_training_lowers_the_error_and_repeats() -> None:
    x, y = regression(30, 1)
    net = model(dropout=0.1)
    predictive = train_nets(net, steps=200)
    after = (predictive.outputs(x, 30).mean(0)[:, 0] - y).square().mean()
    assert after < 0.5 * (net.eval()(x)[:, 0] - y).square().mean()
    assert torch.equal(train_nets(net).outputs(x, 3), train_nets(net).outputs(x, 3))
    assert not torch.equal(train_nets(net).outputs(x, 3), train_nets(net, seed=1).outputs(x, 3))


def test_training_shorter_than_a_check_is_not_lost() -> None:
    net, x = model(), inputs(9, 5)
    (after,) = train_nets(net, steps=5, check_every=100).nets()
    assert not torch.allclose(after(x), net.eval()(x))


def test_dropout_guards_give_verdicts() -> None:
    guard = offmap.guard(train_nets(model(), steps=100), regression(60, 1), draws=20)
    result = guard(inputs(9, 5))
    assert result.score.isfinite().all()
    assert result.mean.shape == (9,)
    assert guard.score(10 * inputs(40, 5)).median() > guard.score(inputs(40, 5)).median()


def test_divergence_keeps_finite_weights_and_is_said(caplog: pytest.LogCaptureFixture) -> None:
    predictive = train_nets(model(), lr=1e25)
    assert predictive.outputs(inputs(9, 5), 3).isfinite().all()
    assert caplog.messages == [
        "Training diverged (the loss is not finite); every member keeps its best state so far. Lower `lr`."
    ]


def test_a_model_without_dropout_is_refused() -> None:
    with pytest.raises(
        ModelError, match="Expected a model with Dropout layers, but Sequential has none. Add them, or use another"
    ):
        train_nets(mlp(3, 1, hidden=[8]))
